"""Any tree of image files whose folders are the classes."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from timm.data.readers.reader_image_folder import find_images_and_targets
from torch import Tensor

from .files import ItemImages, Paths, eval_transform, preparation, read_image, train_transform
from .sets import CorruptImage, ImageData, Preparation, hold_out

log = logging.getLogger(__name__)

TRAIN, VAL, TEST = ("train", "training"), ("val", "validation", "valid"), ("test",)
SAID = 20  # unreadable files named in the log and the report; all are counted

Samples = list[tuple[str, int]]  # path, class


def imagefolder(
    root: str,
    img_size: int | list[int] = 224,
    in_chans: int = 3,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    crop_pct: float = 0.9,
    interpolation: str = "bicubic",
    augment: dict[str, Any] | None = None,
    on_corrupt: str = "error",
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> ImageData:
    """Images of `root/train/<class>/`, `root/val/<class>/` and `root/test/<class>/`, or of `root/<class>/` alone.

    The test part is `test`, or `val` where there is no `test`, or `test_fraction` of the images where there is neither.
    The validation part is `val` if it is not the test part, else `val_fraction` of the training images. Parts that are
    made here are stratified, and always the same for the same files. A class is the name of the folder that holds the
    file, at any depth.

    Args:
        root: folder of the data set.
        img_size, in_chans, mean, std, crop_pct, interpolation: preparation of images; mean and std None for ImageNet's.
        augment: arguments of timm.data.create_transform for training images; None for its defaults.
        on_corrupt: "error": reading a file that is not an image ends the run; "skip": all files are decoded once at the
            start, and those that are not images are left out, and reported by path and number.
        val_fraction, test_fraction: see above; `val_fraction` 0 for no validation part.
        seed: of what the augmentation draws.

    Raises:
        FileNotFoundError: `root` is no folder, or has no images.
        ValueError: there is one class only, a part has a class that the training part has not, or an argument is wrong.
    """
    if on_corrupt not in ("error", "skip"):
        raise ValueError(f"data.on_corrupt: expected error or skip, got {on_corrupt!r}")
    prepare = preparation(img_size, in_chans, mean, std, crop_pct, interpolation)
    parts, classes = find_parts(Path(root).expanduser())
    notes: list[str] = []
    if on_corrupt == "skip":
        parts = {name: _readable(samples, in_chans, notes, name) for name, samples in parts.items()}
    train, val, test = _divide(parts, val_fraction, test_fraction)
    notes += _absent(classes, {"train": train, "val": val, "test": test})
    clean = eval_transform(prepare)
    return ImageData(
        Path(root).expanduser().resolve().name, classes, prepare,
        train=_part(train, prepare, train_transform(prepare, augment or {}), seed),
        val=_part(val, prepare, clean) if val else None,
        test=_part(test, prepare, clean) if test else None,
        notes=notes,
    )  # fmt: skip


def find_parts(root: Path) -> tuple[dict[str, Samples], list[str]]:
    """Images of each part that exists ("train", "val", "test"; "all" for a tree without parts), and the classes."""
    if not root.is_dir():
        raise FileNotFoundError(f"data.root: no folder {root}")
    folders = {"train": TRAIN, "val": VAL, "test": TEST}
    there = {part: next((root / n for n in names if (root / n).is_dir()), None) for part, names in folders.items()}
    if there["train"] is None:
        there = {"all": root}
    parts: dict[str, Samples] = {}
    index: dict[str, int] | None = None
    for part, folder in there.items():
        if folder is None:
            continue
        samples, found = find_images_and_targets(str(folder))
        if not samples:
            raise FileNotFoundError(f"data.root: no images in {folder}")
        if "" in found:
            raise ValueError(f"data.root: images directly in {folder}; an image belongs in the folder of its class")
        if index is None:
            index = found
        elif strange := sorted(found.keys() - index.keys()):
            raise ValueError(f"data.root: classes in {folder} that the training part has not: {', '.join(strange)}")
        parts[part] = [(path, index[Path(path).parent.name]) for path, _ in samples]
    if index is None or len(index) < 2:
        raise ValueError(
            f"data.root: {root} has one class only ({', '.join(index or ())}); a class is a folder of images"
        )
    return parts, list(index)


def _divide(
    parts: Mapping[str, Samples], val_fraction: float, test_fraction: float
) -> tuple[Samples, Samples, Samples]:
    if "all" in parts:
        train, test = _cut(parts["all"], test_fraction, "data.test_fraction")
    else:
        train, test = parts["train"], parts.get("test", parts.get("val", []))
    if "val" in parts and "test" in parts:
        return train, parts["val"], test
    train, val = _cut(train, val_fraction, "data.val_fraction")
    return train, val, test


def _cut(samples: Samples, share: float, what: str) -> tuple[Samples, Samples]:
    if not 0 <= share < 1:
        raise ValueError(f"{what}: expected a share from 0 to under 1, got {share}")
    stay, go = hold_out([label for _, label in samples], share, what)
    return [samples[i] for i in stay.tolist()], [samples[i] for i in go.tolist()]


def _readable(samples: Samples, in_chans: int, notes: list[str], part: str) -> Samples:
    def problem(sample: tuple[str, int]) -> str | None:
        try:
            read_image(sample[0], in_chans)
        except CorruptImage as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(problem, samples))
    bad = [problem for problem in problems if problem]
    if bad:
        more = "" if len(bad) <= SAID else f"\n  and {len(bad) - SAID} more"
        notes.append(
            f"{len(bad)} of {len(samples)} files of the {part} part are no images and were left out:\n  "
            + "\n  ".join(bad[:SAID])
            + more
        )
    return [sample for sample, problem in zip(samples, problems, strict=True) if problem is None]


def _absent(classes: Sequence[str], parts: Mapping[str, Samples]) -> list[str]:
    notes = []
    for part, samples in parts.items():
        there = {label for _, label in samples}
        if samples and len(there) < len(classes):
            names = [name for label, name in enumerate(classes) if label not in there]
            if part == "train":
                raise ValueError(f"data.root: classes without a readable training image: {', '.join(names)}")
            notes.append(f"classes without images in the {part} part: {', '.join(names)}")
    return notes


def _part(samples: Samples, prepare: Preparation, transform: Any, seed: int | None = None) -> ItemImages:
    labels: Tensor = torch.tensor([label for _, label in samples], dtype=torch.long)
    read = Paths([path for path, _ in samples], prepare.in_chans)
    return ItemImages(read, range(len(samples)), labels, transform, seed)

"""Data sets of torchvision and of the Hugging Face hub, through timm's factory."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from PIL import Image
from timm.data import create_dataset
from torch import Tensor

from .files import ItemImages, convert, eval_transform, preparation, read_image, train_transform
from .sets import ImageData, Preparation, hold_out


@dataclass(frozen=True)
class Items:
    """Reads the images of a data set of timm's factory: items (image, class), or a reader of files behind it."""

    dataset: Any
    in_chans: int

    def __call__(self, index: int) -> Image.Image:
        reader = getattr(self.dataset, "reader", None)
        if reader is None:
            return convert(self.dataset[index][0], self.in_chans)
        # not through the data set's own items: where a file is no image, they give the next one instead
        return read_image(reader[index][0], self.in_chans, f"image {index}")


def torchvision(
    name: str,
    root: str,
    download: bool = False,
    train_split: str = "train",
    test_split: str = "test",
    img_size: int | list[int] = 32,
    in_chans: int = 3,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
    augment: dict[str, Any] | None = None,
    val_images: int = 1000,
    seed: int = 0,
) -> ImageData:
    """A data set of torchvision: cifar10, cifar100, mnist, kmnist, fashion_mnist and others that timm knows.

    Args:
        name: its name in lower case.
        root: folder of the files.
        download: fetch them if they are not there.
        train_split, test_split: names of the two parts.
        img_size, in_chans, mean, std, crop_pct, interpolation, augment, seed: as `imagefolder`.
        val_images: how many training images are held out for choices; 0 for none.
    """
    make = {"name": f"torch/{name}", "root": root, "download": download}
    prepare = preparation(img_size, in_chans, mean, std, crop_pct, interpolation)
    return _data(name, make, (train_split, test_split), prepare, augment or {}, val_images, seed)


def hf_dataset(
    name: str,
    root: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    input_key: str = "image",
    target_key: str = "label",
    img_size: int | list[int] = 224,
    in_chans: int = 3,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    crop_pct: float = 0.9,
    interpolation: str = "bicubic",
    augment: dict[str, Any] | None = None,
    val_images: int = 1000,
    seed: int = 0,
) -> ImageData:
    """A data set of the Hugging Face hub, `org/name`; it needs the package `datasets`.

    Args:
        name: its name on the hub, or a local folder that `datasets` reads.
        root: folder of the cache; None for that of `datasets`.
        train_split, test_split: names of the two parts.
        input_key, target_key: columns of images and classes.
        img_size, in_chans, mean, std, crop_pct, interpolation, augment, seed: as `imagefolder`.
        val_images: how many training images are held out for choices; 0 for none.
    """
    if find_spec("datasets") is None:
        raise ModuleNotFoundError("data=hf_dataset needs the package datasets: pip install 'vmamba-npu[hf]'")
    make = {"name": f"hfds/{name}", "root": root, "input_key": input_key, "target_key": target_key}
    prepare = preparation(img_size, in_chans, mean, std, crop_pct, interpolation)
    return _data(name, make, (train_split, test_split), prepare, augment or {}, val_images, seed)


def _data(
    name: str, make: dict[str, Any], splits: tuple[str, str], prepare: Preparation, augment: dict[str, Any],
    val_images: int, seed: int,
) -> ImageData:  # fmt: skip
    parts = {part: create_dataset(split=split, **make) for part, split in zip(("train", "test"), splits, strict=True)}
    labels = {part: _labels(dataset) for part, dataset in parts.items()}
    stays, held = hold_out(labels["train"], val_images, "data.val_images")
    clean = eval_transform(prepare)

    def cut(part: str, indices: Tensor, transform: Any, seed: int | None = None) -> ItemImages:
        return ItemImages(Items(parts[part], prepare.in_chans), indices, labels[part][indices], transform, seed)

    return ImageData(
        name, _classes(parts["train"], labels["train"]), prepare,
        train=cut("train", stays, train_transform(prepare, augment), seed),
        val=cut("train", held, clean) if len(held) else None,
        test=cut("test", torch.arange(len(labels["test"])), clean),
    )  # fmt: skip


def _labels(dataset: Any) -> Tensor:
    """Class of each item, without reading images where the data set allows it."""
    reader = getattr(dataset, "reader", None)
    if reader is not None and hasattr(reader, "iter_targets"):
        values: Sequence[int] = list(reader.iter_targets())
    elif hasattr(dataset, "targets"):
        values = dataset.targets
    elif hasattr(dataset, "labels"):
        values = dataset.labels
    else:
        values = [dataset[i][1] for i in range(len(dataset))]
    return torch.as_tensor(values, dtype=torch.long)


def _classes(dataset: Any, labels: Tensor) -> list[str]:
    reader = getattr(dataset, "reader", None)
    index = getattr(reader, "class_to_idx", None) or getattr(dataset, "class_to_idx", None)
    if index:
        return [str(name) for name, _ in sorted(index.items(), key=lambda item: item[1])]
    names = getattr(dataset, "classes", None)
    return list(map(str, names)) if names else [str(i) for i in range(int(labels.max()) + 1)]

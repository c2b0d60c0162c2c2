"""Classes of image files."""

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from timm.data.readers.img_extensions import get_img_extensions
from torch import Tensor

from ..data.files import eval_transform, read_image
from .saved import Saved
from .step import Precision

NAMED = 5  # classes told for an image


def image_files(images: str | Sequence[str]) -> list[Path]:
    """Image files of a path, a folder, a pattern, or a list of them, each kind sorted by name.

    Raises:
        FileNotFoundError: one of them is no file, an empty folder, or a pattern of nothing.
    """
    files: list[Path] = []
    for name in [images] if isinstance(images, str) else images:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in get_img_extensions(as_set=True))
        else:
            found = [path] if path.is_file() else sorted(map(Path, glob(str(path), recursive=True)))
        if not found:
            raise FileNotFoundError(f"images: nothing found at {name}")
        files += found
    return files


@torch.no_grad()
def classify(
    model: nn.Module, saved: Saved, files: Sequence[Path], device: torch.device, precision: Precision,
    invert: bool = False, batch_size: int = 64,
) -> list[dict[str, Any]]:  # fmt: skip
    """The likeliest classes of image files.

    Args:
        model: the model in eval mode, on `device`.
        saved: says how images are prepared, and the names of classes.
        files: image files.
        device, precision: what it runs on.
        invert: take the negative of each image.
        batch_size: images of a forward.

    Returns:
        For each file its path and a list of (class, probability), the likeliest first.

    Raises:
        CorruptImage: a file is not a readable image.
    """
    transform = eval_transform(saved.prepare)
    found = []
    for start in range(0, len(files), batch_size):
        part = files[start : start + batch_size]
        x = torch.stack([_input(path, saved, transform, invert) for path in part])
        with precision.autocast():
            logits = model(x.to(device))
        shares, order = logits.float().softmax(-1).topk(min(NAMED, len(saved.classes)))
        for path, share, row in zip(part, shares.tolist(), order.tolist(), strict=True):
            classes = [(saved.classes[i], round(p, 4)) for i, p in zip(row, share, strict=True)]
            found.append({"image": str(path), "classes": classes})
    return found


def _input(path: Path, saved: Saved, transform, invert: bool) -> Tensor:
    image = read_image(path, saved.prepare.in_chans)
    return transform(image.point(lambda value: 255 - value) if invert else image)

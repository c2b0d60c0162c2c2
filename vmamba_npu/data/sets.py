"""What a data set is to training and evaluation: three parts, the classes, and how images are prepared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# (epoch, index): what an item of a data set is asked for by, so that its augmentation may depend on both
Key = tuple[int, int]


class CorruptImage(ValueError):
    """An image file that cannot be decoded."""


class Images(Dataset):
    """Images of a part, asked for as a list of (epoch, index) and given as one batch."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor]:  # [B, C, H, W] float32, [B] int64
        raise NotImplementedError


@dataclass(frozen=True)
class Preparation:
    """How an image becomes the model's input; stored with the weights, so that evaluation repeats it."""

    img_size: tuple[int, int]
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != self.in_chans:
                raise ValueError(f"data.{name}: expected {self.in_chans} values, one a channel, got {list(values)}")
        if min(self.std) <= 0:
            raise ValueError(f"data.std: expected positive values, got {list(self.std)}")
        if min(self.img_size) < 1:
            raise ValueError(f"data.img_size: expected at least 1 x 1 pixels, got {tuple(self.img_size)}")


@dataclass(frozen=True)
class ImageData:
    """A data set in three parts.

    Attributes:
        name: how it is called in reports.
        classes: name of each class.
        prepare: how its images are prepared.
        train, val, test: its parts; `val` is carved from the training part and serves every choice, `test` is looked at
            once, at the end. `val` or `test` may be None.
        reports_accuracy: False if accuracy means nothing on it.
        notes: what a reader of the results must know: files left out, classes without images.
        source: where the images come from, and their licence.
    """

    name: str
    classes: list[str]
    prepare: Preparation
    train: Images
    val: Images | None
    test: Images | None
    reports_accuracy: bool = True
    notes: list[str] = field(default_factory=list)
    source: str = ""


def hold_out(labels: Sequence[int] | Tensor, held: int | float, what: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of the images that stay and of those held out: stratified by class, seeded, each sorted.

    Args:
        labels: class of each image.
        held: how many are held out, or which share of them.
        what: name of the argument, for the message of a number that does not fit.
        seed: of the choice; never the seed of the training.
    """
    # takes a second to import, and not every program splits
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    classes = np.asarray(labels)
    if not held:
        return torch.arange(len(labels)), torch.empty(0, dtype=torch.long)
    try:
        stays, goes = train_test_split(np.arange(len(classes)), test_size=held, stratify=classes, random_state=seed)
    except ValueError as error:
        among = f"{len(classes)} images of {len(np.unique(classes))} classes"
        raise ValueError(f"{what}: cannot hold out {held} of {among}: {error}") from None
    return torch.from_numpy(np.sort(stays)), torch.from_numpy(np.sort(goes))


def size_of(img_size: int | list[int] | tuple[int, int] | None, default: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a number, a pair, or None for the default."""
    if img_size is None:
        return default
    if isinstance(img_size, int):
        return img_size, img_size
    if len(img_size) != 2:
        raise ValueError(f"data.img_size: expected a number or [height, width], got {list(img_size)}")
    return int(img_size[0]), int(img_size[1])

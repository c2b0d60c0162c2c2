"""Images that are read one by one: files of a folder, or items of another library's data set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor

from .randomness import mix, seeded
from .sets import CorruptImage, Images, Key, Preparation, size_of

MODES = {1: "L", 3: "RGB"}


def read_image(file: str | Path | BinaryIO, in_chans: int = 3, name: str = "") -> Image.Image:
    """An image file, decoded, as RGB or grey.

    Any mode is converted: 16-bit grey to 8 bits by its value over 257, transparency by leaving it out, CMYK and
    palettes by Pillow's conversion.

    Raises:
        CorruptImage: the file is not an image, or ends early.
    """
    _check_channels(in_chans)
    try:
        with Image.open(file) as image:
            image.load()
            return convert(image, in_chans)
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # Pillow's decoders raise errors of many types on bad bytes
        raise CorruptImage(f"{name or file}: not a readable image ({error})") from None


def _check_channels(in_chans: int) -> None:
    if in_chans not in MODES:
        raise ValueError(f"data.in_chans: image files give 1 or 3 channels, got {in_chans}")


def convert(image: Image.Image, in_chans: int) -> Image.Image:
    """An image as 8-bit RGB or grey, by the number of channels."""
    _check_channels(in_chans)
    if image.mode.startswith("I"):  # 16 bits in one of Pillow's integer modes; its own conversion would clip at 255
        image = Image.fromarray((np.clip(np.asarray(image, dtype=np.int64), 0, 65535) // 257).astype(np.uint8))
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(MODES[in_chans])


def preparation(
    img_size: int | list[int], in_chans: int, mean: list[float] | None, std: list[float] | None, crop_pct: float,
    interpolation: str,
) -> Preparation:  # fmt: skip
    """How images of files are prepared; mean and standard deviation None for ImageNet's (their mean, for grey)."""
    _check_channels(in_chans)
    usual = [[sum(v) / 3] if in_chans == 1 else list(v) for v in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)]
    size = size_of(img_size, (224, 224))
    return Preparation(size, in_chans, tuple(mean or usual[0]), tuple(std or usual[1]), interpolation, crop_pct)


def eval_transform(prepare: Preparation) -> Callable[[Image.Image], Tensor]:
    """How an image becomes the model's input when nothing is random."""
    return create_transform(
        (prepare.in_chans, *prepare.img_size), mean=prepare.mean, std=prepare.std, crop_pct=prepare.crop_pct,
        interpolation=prepare.interpolation,
    )  # fmt: skip


def train_transform(prepare: Preparation, augment: Mapping[str, Any]) -> Callable[[Image.Image], Tensor]:
    """How an image becomes the model's input in training; `augment` holds arguments of timm's create_transform.

    Raises:
        TypeError: one of them is not known.
    """
    return create_transform(
        (prepare.in_chans, *prepare.img_size), is_training=True, mean=prepare.mean, std=prepare.std,
        interpolation=prepare.interpolation, **augment,
    )  # fmt: skip


@dataclass(frozen=True)
class Paths:
    """Reads the images of paths."""

    paths: Sequence[str]
    in_chans: int

    def __call__(self, index: int) -> Image.Image:
        return read_image(self.paths[index], self.in_chans)


@dataclass
class ItemImages(Images):
    """Images read one by one.

    Attributes:
        read: gives the image of an index.
        indices: which images are in this part.
        labels: class of each image in this part.
        transform: makes the model's input of an image.
        seed: of what the transform draws, with the epoch and the position in this part; None if it draws nothing.
    """

    read: Callable[[int], Image.Image]
    indices: Sequence[int] | Tensor
    labels: Tensor
    transform: Callable[[Image.Image], Tensor]
    seed: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor]:
        images = torch.stack([self._one(*key) for key in keys])  # [B, C, H, W]
        return images, self.labels[[index for _, index in keys]]

    def _one(self, epoch: int, index: int) -> Tensor:
        image = self.read(int(self.indices[index]))
        if self.seed is None:
            return self.transform(image)
        with seeded(mix(self.seed, epoch, index)):
            return self.transform(image)

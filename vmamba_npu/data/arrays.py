"""Small images that fit in memory: batches are cut, augmented, resized and normalised as whole tensors."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .sets import Images, Key, Preparation


@dataclass(frozen=True)
class Affine:
    """Random small rotation, shift, scaling, shear and smooth distortion; what enters at the border is black.

    Attributes:
        degrees: largest rotation, either way.
        shift: largest shift, in pixels, along each axis.
        scale: largest relative change of the size, either way.
        shear: largest shear, in degrees.
        elastic: largest displacement of the smooth distortion, in pixels; 0 for none.
        elastic_grid: the distortion is drawn on a grid of this many points a side, and interpolated between them.
    """

    degrees: float = 0.0
    shift: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    elastic: float = 0.0
    elastic_grid: int = 4

    def __post_init__(self) -> None:
        for name in ("degrees", "shift", "scale", "shear", "elastic"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.augment.{name}: expected at least 0, got {getattr(self, name)}")
        if self.scale >= 1:
            raise ValueError(f"data.augment.scale: expected less than 1, got {self.scale}")
        if self.elastic_grid < 2:
            raise ValueError(f"data.augment.elastic_grid: expected at least 2, got {self.elastic_grid}")

    def draw(self, seed: int, epoch: int, images: int) -> Tensor:
        """Random numbers in [-1, 1) for every image of an epoch: [images, 5 + 2 * grid * grid]."""
        wanted = 5 + (2 * self.elastic_grid**2 if self.elastic else 0)
        rows = np.random.default_rng([seed, epoch]).random((images, wanted), dtype=np.float32)
        return torch.from_numpy(rows).mul_(2).sub_(1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:  # [B, C, H, W], [B, draws] -> [B, C, H, W]
        height, width = x.shape[-2:]
        angle, shear = (u[:, 0] * self.degrees).deg2rad(), (u[:, 1] * self.shear).deg2rad()
        zoom = 1 / (1 + u[:, 2] * self.scale)
        cos, sin, slant = angle.cos() * zoom, angle.sin() * zoom, shear.tan()
        # aspect: grid_sample's coordinates run from -1 to 1 along both sides of a map that need not be square
        aspect = height / width
        dx, dy = u[:, 3] * self.shift * 2 / width, u[:, 4] * self.shift * 2 / height
        top = torch.stack([cos, (cos * slant - sin) * aspect, dx], 1)
        low = torch.stack([sin / aspect, sin * slant + cos, dy], 1)
        grid = F.affine_grid(torch.stack([top, low], 1), list(x.shape), align_corners=False)  # [B, H, W, 2]
        if self.elastic:
            coarse = u[:, 5:].unflatten(1, (2, self.elastic_grid, self.elastic_grid))
            push = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=True)
            grid = grid + push.permute(0, 2, 3, 1) * grid.new_tensor([2 / width, 2 / height]) * self.elastic
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@dataclass
class ArrayImages(Images):
    """Images in memory.

    Attributes:
        images: [N, C, H, W] uint8.
        labels: [N] int64.
        prepare: size, mean and standard deviation.
        augment: what changes the images at random, or None.
        seed: of the augmentation, with the epoch and the index of the image.
    """

    images: Tensor
    labels: Tensor
    prepare: Preparation
    augment: Affine | None = None
    seed: int = 0
    _drawn: tuple[int, Tensor] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, indices: Tensor, augment: Affine | None = None, seed: int = 0) -> "ArrayImages":
        """The images of some indices as a data set of their own."""
        return ArrayImages(self.images[indices], self.labels[indices], self.prepare, augment, seed)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor]:
        epoch, indices = keys[0][0], torch.tensor([index for _, index in keys])
        x = self.images[indices].float().div_(255)  # [B, C, H, W]
        if self.augment is not None:
            if self._drawn is None or self._drawn[0] != epoch:
                self._drawn = epoch, self.augment.draw(self.seed, epoch, len(self))
            x = self.augment(x, self._drawn[1][indices])
        if x.shape[-2:] != self.prepare.img_size:
            x = F.interpolate(x, self.prepare.img_size, mode="bicubic", antialias=True).clamp_(0, 1)
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.prepare.mean, self.prepare.std))
        return x.sub_(mean).div_(std), self.labels[indices]

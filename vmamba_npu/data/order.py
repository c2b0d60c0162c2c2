"""Which images form which batch: a pure function of (seed, epoch), shared between processes, entered at any update."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .randomness import mix
from .sets import Images, Key


@dataclass(frozen=True)
class TrainOrder:
    """Batches of one process.

    An update takes `batch_size` images of the epoch's permutation, cut into `accumulate * world` equal parts; the last
    images of the permutation that fill no update are left out. With equal parts the mean gradient of an update is the
    same for any number of processes and of accumulated parts.
    """

    images: int
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        parts = self.accumulate * self.world
        if self.batch_size < 1 or self.batch_size % parts:
            raise ValueError(
                f"trainer.batch_size: expected a positive multiple of {parts} (trainer.accumulate {self.accumulate} x "
                f"{self.world} processes), got {self.batch_size}"
            )
        if self.batch_size > self.images:
            raise ValueError(
                f"trainer.batch_size: {self.batch_size} images an update, but the training part has {self.images}"
            )

    @property
    def updates(self) -> int:
        """Updates of an epoch."""
        full = self.images // self.batch_size
        return full if self.limit is None else min(full, self.limit)

    def indices(self, epoch: int) -> Tensor:
        """Images of an epoch in the order of their use: [updates, accumulate * world, images of a part]."""
        order = torch.randperm(self.images, generator=torch.Generator().manual_seed(mix(self.seed, epoch)))
        return order[: self.updates * self.batch_size].view(self.updates, self.accumulate * self.world, -1)

    def batches(self, epoch: int, start: int = 0) -> "Batches":
        """This process's batches of an epoch, from an update on; `accumulate` batches belong to an update."""
        mine = self.indices(epoch)[start:, self.rank * self.accumulate : (self.rank + 1) * self.accumulate]
        return Batches(mine.flatten(0, 1), epoch)


@dataclass(frozen=True)
class Batches:
    """Batches as lists of keys, made as they are asked for."""

    rows: Tensor | list[Tensor]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[list[Key]]:
        for row in self.rows:
            yield [(self.epoch, index) for index in row.tolist()]


def share(images: int, rank: int, world: int) -> tuple[Tensor, int]:
    """One process's share of an evaluation, and how many of it count.

    All shares have the same length, so that processes which must run together do; the image that fills up is the last
    one again and does not count.
    """
    padded = -(-images // world)
    return (rank + world * torch.arange(padded)).clamp_max(images - 1), len(range(rank, images, world))


def _as_is(batch: Any) -> Any:
    return batch


def load(dataset: Images, batches: Batches, workers: int = 0, pin: bool = False) -> DataLoader:
    """The batches of a data set, in order, prepared by `workers` processes (0: by this one)."""
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=_as_is, pin_memory=pin)

"""Evaluation of a model on a part of a data set: every image counted once, over any number of processes."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.utils import accuracy
from torch import Tensor

from ..data import Batches, Images, load, share
from .processes import Processes
from .step import Precision

WRONG = 64  # wrong predictions kept for the page of them


@dataclass(frozen=True)
class Scores:
    """What an evaluation found.

    Attributes:
        images: number of images.
        loss: mean cross-entropy.
        top1, top5: share of images whose class is the likeliest, or among the five likeliest (or all, if fewer).
        confusion: [classes, classes] int64 on the CPU; a row for each class, a column for each prediction.
        wrong: (index, class, prediction, its probability) of the first wrong predictions.
        images_per_second: speed, without the first batch if there are several.
    """

    images: int
    loss: float
    top1: float
    top5: float
    confusion: Tensor
    wrong: list[tuple[int, int, int, float]]
    images_per_second: float

    @property
    def per_class(self) -> list[float | None]:
        """Share of each class's images that are predicted right; None for a class without images."""
        counts = self.confusion.sum(1)
        return [int(self.confusion[i, i]) / int(n) if n else None for i, n in enumerate(counts.tolist())]

    def row(self, prefix: str) -> dict[str, float]:
        """For loggers."""
        return {f"{prefix}_loss": self.loss, f"{prefix}_top1": self.top1, f"{prefix}_top5": self.top5}


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: Images, num_classes: int, batch_size: int, here: Processes, precision: Precision,
    workers: int = 0, layout: torch.memory_format = torch.contiguous_format,
) -> Scores:  # fmt: skip
    """Evaluate a model (in eval mode, put back to its mode after) on a data set, with plain cross-entropy."""
    was_training = model.training
    model.eval()
    mine, counted = share(len(dataset), here.rank, here.world)
    rows = list(mine.split(batch_size))
    sums = dict(loss=0.0, top1=0.0, top5=0.0, images=0)
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long)
    wrong: list[tuple[int, int, int, float]] = []
    began, timed = time.perf_counter(), 0
    for number, (x, y) in enumerate(load(dataset, Batches(rows), workers)):
        with precision.autocast():
            logits = model(x.to(here.device, memory_format=layout)).float()
        valid = min(len(y), counted - number * batch_size)
        if valid > 0:
            _count(logits[:valid].cpu(), y[:valid], rows[number][:valid], num_classes, sums, confusion, wrong)
        if number == 0 and len(rows) > 1:
            began = time.perf_counter()
        else:
            timed += max(valid, 0)
    speed = timed / max(time.perf_counter() - began, 1e-9)
    model.train(was_training)
    return _merge(here.gather((sums, confusion, wrong, speed)))


def _count(
    logits: Tensor, y: Tensor, indices: Tensor, num_classes: int, sums: dict[str, Any], confusion: Tensor, wrong: list
) -> None:
    from torchmetrics.functional.classification import multiclass_confusion_matrix  # of the extra `train`

    top1, top5 = accuracy(logits, y, topk=(1, min(5, num_classes)))  # in percent
    sums["loss"] += F.cross_entropy(logits, y, reduction="sum").item()
    sums["top1"] += top1.item() * len(y) / 100
    sums["top5"] += top5.item() * len(y) / 100
    sums["images"] += len(y)
    sure, predicted = logits.softmax(-1).max(-1)
    confusion += multiclass_confusion_matrix(predicted, y, num_classes)
    for i in (predicted != y).nonzero().flatten().tolist():
        if len(wrong) < WRONG:
            wrong.append((int(indices[i]), int(y[i]), int(predicted[i]), float(sure[i])))


def _merge(shares: list[tuple[dict[str, Any], Tensor, list, float]]) -> Scores:
    total = {key: sum(sums[key] for sums, *_ in shares) for key in shares[0][0]}
    images = total["images"]
    confusion = torch.stack([confusion for _, confusion, _, _ in shares]).sum(0)
    wrong = sorted(item for _, _, items, _ in shares for item in items)[:WRONG]
    return Scores(
        images, total["loss"] / images, round(total["top1"]) / images, round(total["top5"]) / images, confusion, wrong,
        sum(speed for *_, speed in shares),
    )  # fmt: skip

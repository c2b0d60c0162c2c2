"""One update: forward and backward of each part of the batch, mixed precision, clipping, and what must be finite."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from timm.data import Mixup
from timm.loss import create_classification_loss
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .options import Trainer
from .processes import Processes, keep_gradients_local, plain

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NonFinite(RuntimeError):
    """A loss or a gradient that is NaN or infinite; the weights are those before the update."""


@dataclass(frozen=True)
class Outcome:
    """What an update did, over all processes."""

    loss: float
    correct: float
    images: int
    grad_norm: float
    stop: bool


class Precision:
    """Autocast and gradient scaling of a precision on a device.

    Raises:
        ValueError: the device does not compute in this precision.
    """

    def __init__(self, name: str, device: torch.device, sharded: bool = False) -> None:
        kind = device.type
        module = getattr(torch, kind)
        if name == "bf16" and kind != "cpu" and not module.is_bf16_supported():
            raise ValueError(f"trainer.precision: this {kind} device has no bfloat16; choose fp16 or fp32")
        self.kind, self.dtype = kind, LOW.get(name)
        self.autocasts = self.dtype is not None and not sharded  # a sharded model casts its own parameters and inputs
        self.scaler = torch.amp.GradScaler(kind, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        """Context of a forward."""
        return torch.autocast(self.kind, self.dtype or torch.bfloat16, enabled=self.autocasts)


def mixer(trainer: Trainer, num_classes: int) -> Mixup | None:
    """What mixes images and targets, or None."""
    if not trainer.mixes:
        return None
    return Mixup(trainer.mixup, trainer.cutmix, label_smoothing=trainer.smoothing, num_classes=num_classes)


class Stepper:
    """Makes updates of a model."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, trainer: Trainer, num_classes: int, here: Processes,
        average: ModelEmaV3 | None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.trainer, self.here, self.average = model, optimizer, trainer, here, average
        self.sharded = trainer.strategy == "fsdp" and here.world > 1
        self.precision = Precision(trainer.precision, here.device, self.sharded)
        self.mix = mixer(trainer, num_classes)
        soft = self.mix is not None
        self.loss = create_classification_loss(smoothing=trainer.smoothing, soft_targets=soft).to(here.device)

    def to_device(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A batch on the device, in the memory layout of the run."""
        layout = torch.channels_last if self.trainer.channels_last else torch.contiguous_format
        device = self.here.device
        return x.to(device, memory_format=layout, non_blocking=True), y.to(device, non_blocking=True)

    def update(self, parts: Iterator[tuple[Tensor, Tensor]], number: int, stop: bool) -> Outcome:
        """One update from `trainer.accumulate` parts; `number` counts from 1, `stop` asks all processes to stop.

        Raises:
            NonFinite: the loss or the gradient is; nothing is updated.
        """
        accumulate = self.trainer.accumulate
        loss_sum = correct = torch.zeros((), device=self.here.device)
        images = 0
        for part in range(accumulate):
            x, y = self.to_device(*next(parts))
            images += len(y)
            loss, right = self._part(x, y, part == accumulate - 1)
            loss_sum, correct = loss_sum + loss.detach() / accumulate, correct + right
        totals = torch.stack([loss_sum, correct, torch.tensor(float(stop), device=self.here.device)])
        loss_sum, correct, stops = self.here.sum(totals).tolist()
        loss = loss_sum / self.here.world
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            raise NonFinite(f"the loss is {loss}")
        norm = self._step()
        if self.average is not None:
            self.average.update(plain(self.model), step=number)
        return Outcome(loss, correct, images * self.here.world, norm, stops > 0)

    def _part(self, x: Tensor, y: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        target = y
        if self.mix is not None:
            x, target = self.mix(x, y)
        with keep_gradients_local(self.model, last):
            with self.precision.autocast():
                logits = self.model(x)
            loss = self.loss(logits.float(), target)
            self.precision.scaler.scale(loss / self.trainer.accumulate).backward()
        return loss, (logits.detach().argmax(-1) == y).sum()

    def _step(self) -> float:
        scaler, weights = self.precision.scaler, [p for p in self.model.parameters() if p.grad is not None]
        scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value = norm.item()
        if not math.isfinite(value) and not scaler.is_enabled():  # with a scaler, it skips the update by itself
            self.optimizer.zero_grad()
            raise NonFinite(f"the loss is finite, the norm of the gradient is {value}")
        if self.trainer.clip_grad is not None and math.isfinite(value):
            nn.utils.clip_grads_with_norm_(weights, self.trainer.clip_grad, norm)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return value

"""Optimizer and learning rate: arguments of timm's factories."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer

from .refusals import one_of

SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant")
_OURS = {
    "optimizer", "sched", "num_epochs", "min_lr", "warmup_lr", "warmup_epochs", "step_on_epochs", "updates_per_epoch",
}  # fmt: skip


@dataclass(frozen=True)
class Optim:
    """The values of the optim group.

    Attributes:
        opt: name of an optimizer of timm.
        lr: largest learning rate.
        weight_decay: not applied to biases, norms and what the model's `no_weight_decay` names.
        layer_decay: factor of the learning rate from each layer to the one before it; None for equal rates.
        opt_kwargs: further arguments of the optimizer: betas, momentum, eps.
        sched: name of a schedule of timm, stepped at every update.
        warmup: share of the training in which the rate grows linearly from `warmup_lr`.
        warmup_lr, min_lr: learning rate at the start and at the end.
        sched_kwargs: further arguments of timm's create_scheduler_v2.
    """

    opt: str
    lr: float
    weight_decay: float = 0.0
    layer_decay: float | None = None
    opt_kwargs: dict[str, Any] = field(default_factory=dict)
    sched: str = "cosine"
    warmup: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    sched_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("optim.opt", self.opt, [str(name) for name in list_optimizers()])
        one_of("optim.sched", self.sched, SCHEDULES)
        if self.lr <= 0:
            raise ValueError(f"optim.lr: expected a positive learning rate, got {self.lr}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optim.warmup: expected a share of the training, from 0 to under 1, got {self.warmup}")
        known = [name for name in inspect.signature(create_scheduler_v2).parameters if name not in _OURS]
        for name in self.sched_kwargs:
            one_of("optim.sched_kwargs", name, known, show=len(known))

    def build(self, model: nn.Module, epochs: int, updates_per_epoch: int) -> tuple[Optimizer, Scheduler]:
        """Optimizer and schedule of a model.

        Raises:
            TypeError: an entry of `opt_kwargs` is not known.
        """
        optimizer = create_optimizer_v2(
            model, opt=self.opt, lr=self.lr, weight_decay=self.weight_decay, layer_decay=self.layer_decay,
            **self.opt_kwargs,
        )  # fmt: skip
        warmup: Any = self.warmup * epochs  # timm's hint says int; a part of an epoch is as good
        schedule, _ = create_scheduler_v2(
            optimizer, sched=self.sched, num_epochs=epochs, warmup_epochs=warmup,
            warmup_lr=self.warmup_lr, min_lr=self.min_lr, step_on_epochs=False, updates_per_epoch=updates_per_epoch,
            **self.sched_kwargs,
        )  # fmt: skip
        return optimizer, schedule

"""A run in progress: its model, optimizer and position, and the training state that they are saved as."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..data import ImageData, TrainOrder
from .checkpoints import BEST, STATE, check_same_run, find_state, load_state, save_state, save_weights
from .optim import Optim
from .options import Trainer
from .processes import Processes, distribute, plain, shard
from .step import Stepper

log = logging.getLogger(__name__)

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Position:
    """Where a run is, and the numbers that its reports need.

    Attributes:
        epoch: epochs behind.
        done: updates behind in the current epoch.
        update: updates behind in all.
        loss, correct, images: sums over the current epoch so far (loss weighted by images).
        elapsed: seconds of training so far, in all processes that worked on the run one after the other.
        best: the best epoch on the validation part.
        history: a row of numbers for each epoch behind.
    """

    epoch: int = 0
    done: int = 0
    update: int = 0
    loss: float = 0.0
    correct: float = 0.0
    images: int = 0
    elapsed: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Run:
    """Everything that the training loop works on."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Scheduler
    stepper: Stepper
    average: ModelEmaV3 | None
    order: TrainOrder
    data: ImageData
    trainer: Trainer
    here: Processes
    output: Path
    seed: int
    config: Mapping[str, Any]
    position: Position = field(default_factory=Position)

    @property
    def final(self) -> nn.Module:
        """The model that counts at the end: the moving average if there is one, else the trained one."""
        return plain(self.model) if self.average is None else self.average.module

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole weights of a model; with shards, a call that all processes must make."""
        if self.stepper.sharded:
            return dict(get_model_state_dict(model, options=WHOLE))  # type: ignore[arg-type]
        return model.state_dict()

    def state(self) -> dict[str, Any]:
        """The training state. Seeds are a function of (seed, update, process), so no generator has to be kept."""
        sharded = self.stepper.sharded
        trained = plain(self.model)
        return {
            "config": dict(self.config),
            "position": asdict(self.position),
            "model": self.weights(trained),
            "average": None if self.average is None else self.weights(self.average.module),
            "optimizer": get_optimizer_state_dict(trained, self.optimizer, options=WHOLE)
            if sharded
            else self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.stepper.precision.scaler.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a training state.

        Raises:
            CannotResume: it was saved by a run with other values.
        """
        check_same_run(state["config"], self.config)
        trained = plain(self.model)
        self._load_weights(trained, state["model"])
        if self.average is not None:
            self._load_weights(self.average.module, state["average"])
        if self.stepper.sharded:
            set_optimizer_state_dict(trained, self.optimizer, state["optimizer"], options=WHOLE)
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.stepper.precision.scaler.load_state_dict(state["scaler"])
        self.position = Position(**state["position"])

    def _load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        if self.stepper.sharded:
            set_model_state_dict(model, dict(weights), options=WHOLE)
        else:
            model.load_state_dict(weights)

    def checkpoint(self) -> None:
        """Save the training state; a call that all processes make."""
        state = self.state()
        if self.here.first:
            save_state(self.output / STATE, state)
        self.here.wait()

    def save_best(self) -> None:
        """Save the weights that count as those of the best epoch."""
        weights = self.weights(self.final)
        if self.here.first:
            save_weights(self.output / BEST, weights)


def start(
    model: nn.Module, data: ImageData, optim: Optim, trainer: Trainer, here: Processes, output: Path, seed: int,
    config: Mapping[str, Any],
) -> Run:  # fmt: skip
    """A run of a model on its device, at its first update, or where the training state says that it was.

    Raises:
        CannotResume: the training state is missing, of another run, or in the way.
    """
    path = find_state(trainer.resume, output)
    layout = torch.channels_last if trainer.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    average = None
    if trainer.ema_decay is not None:
        average = ModelEmaV3(model, decay=trainer.ema_decay, use_warmup=True)
        if trainer.strategy == "fsdp" and here.world > 1:
            shard(average.module, trainer.precision, here)
    if trainer.compile:
        model.compile()
    order = TrainOrder(
        len(data.train), trainer.batch_size, trainer.accumulate, here.rank, here.world, seed, trainer.limit_updates
    )
    distributed = distribute(model, trainer.strategy, trainer.precision, here)
    optimizer, schedule = optim.build(plain(distributed), trainer.epochs, order.updates)
    stepper = Stepper(distributed, optimizer, trainer, len(data.classes), here, average)
    run = Run(
        distributed, optimizer, schedule, stepper, average, order, data, trainer, here, output, seed, config
    )  # fmt: skip
    if path is not None:
        run.load(load_state(path))
        log.info("resumed from %s: epoch %d, update %d", path, run.position.epoch + 1, run.position.update)
    return run

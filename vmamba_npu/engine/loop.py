"""The training loop: updates, validation after each epoch, checkpoints, and an orderly stop."""

import logging
import time
from collections.abc import Sequence

import torch
from timm.utils import distribute_bn

from ..data import load
from ..data.randomness import mix, seed_all
from .checkpoints import STATE
from .interrupts import Interrupted, Interrupts
from .loggers import Logger
from .metrics import Scores, evaluate
from .processes import plain
from .progress import Display
from .run import Run
from .step import NonFinite, Outcome

log = logging.getLogger(__name__)

SAID = 12  # losses and image indices that the report of a non-finite loss shows


def fit(run: Run, loggers: Sequence[Logger], interrupts: Interrupts) -> Display:
    """Train to the last epoch.

    Raises:
        NonFinite: the loss or the gradient was; the last checkpoint is of finite weights.
        Interrupted: a signal asked for the end; there is a checkpoint of the last update.
    """
    position, trainer = run.position, run.trainer
    for logger in loggers:
        logger.begin(position.update, position.history)
    accuracy = run.data.reports_accuracy
    with Display(trainer.epochs, run.order.updates, position.update, run.here.first, accuracy) as display:
        while position.epoch < trainer.epochs:
            _train_epoch(run, loggers, display, interrupts)
            _end_epoch(run, loggers, display)
            display.skip()
    return display


def _train_epoch(run: Run, loggers: Sequence[Logger], display: Display, interrupts: Interrupts) -> None:
    position, order, trainer = run.position, run.order, run.trainer
    run.model.train()
    pin = run.here.device.type == "cuda"
    batches = iter(load(run.data.train, order.batches(position.epoch, position.done), trainer.num_workers, pin))
    recent: list[float] = []
    began = time.perf_counter()
    for _ in range(position.done, order.updates):
        lr = max(group["lr"] for group in run.optimizer.param_groups)
        seed_all(mix(run.seed, position.update, run.here.rank))
        try:
            outcome = run.stepper.update(batches, position.update + 1, bool(interrupts.number))
        except NonFinite as error:
            raise NonFinite(_explain(run, str(error), lr, recent)) from None
        recent = [*recent[1 - SAID :], outcome.loss]
        now = time.perf_counter()
        position.elapsed, began = position.elapsed + now - began, now
        _advance(run, outcome)
        _show(run, outcome, lr, loggers, display)
        if outcome.stop or (trainer.checkpoint_every and position.update % trainer.checkpoint_every == 0):
            run.checkpoint()
            display.skip()
        if outcome.stop:
            _stop(run, interrupts)


def _advance(run: Run, outcome: Outcome) -> None:
    position = run.position
    position.done += 1
    position.update += 1
    position.loss += outcome.loss * outcome.images
    position.correct += outcome.correct
    position.images += outcome.images
    run.schedule.step_update(position.update)


def _show(run: Run, outcome: Outcome, lr: float, loggers: Sequence[Logger], display: Display) -> None:
    position = run.position
    loss, top1 = position.loss / position.images, position.correct / position.images
    display.update(position.epoch, outcome.images, loss, top1, lr)
    if position.update % run.trainer.log_every == 0:
        row = {
            "update": position.update, "epoch": position.epoch + 1, "loss": outcome.loss, "lr": lr,
            "grad_norm": outcome.grad_norm, "images_per_second": round(display.speed, 1),
        }  # fmt: skip
        for logger in loggers:
            logger.update(row)


def _stop(run: Run, interrupts: Interrupts) -> None:
    position = run.position
    log.warning(
        "stopped by a signal after update %d of epoch %d; trainer.resume=%s goes on from there",
        position.done, position.epoch + 1, run.output,
    )  # fmt: skip
    raise Interrupted(interrupts.number or 15)  # a signal may have reached another process alone


def _explain(run: Run, what: str, lr: float, recent: list[float]) -> str:
    position, order = run.position, run.order
    indices = order.indices(position.epoch)[position.done].flatten().tolist()
    more = f" and {len(indices) - SAID} more" if len(indices) > SAID else ""
    state = run.output / STATE
    kept = f"the last checkpoint is {state}" if state.exists() else "there is no checkpoint yet"
    where = f"epoch {position.epoch + 1}, update {position.done + 1} of {order.updates}"
    return (
        f"{what} at update {position.update + 1} ({where})\n"
        f"  learning rate: {lr:.4g}\n"
        f"  losses before: {', '.join(f'{loss:.4g}' for loss in recent) or 'none in this process'}\n"
        f"  images of the batch: {', '.join(map(str, indices[:SAID]))}{more}\n"
        f"  the weights were not updated; {kept}"
    )


def _end_epoch(run: Run, loggers: Sequence[Logger], display: Display) -> None:
    position = run.position
    if run.here.world > 1 and not run.stepper.sharded:  # running statistics of batch norms differ between processes
        for model in (plain(run.model), run.final):
            distribute_bn(model, run.here.world)
    row: dict[str, float] = {
        "epoch": position.epoch + 1, "update": position.update, "train_loss": position.loss / position.images,
    }  # fmt: skip
    if run.data.reports_accuracy:
        row["train_top1"] = position.correct / position.images
        row |= _validate(run)
    row["lr"] = max(group["lr"] for group in run.optimizer.param_groups)
    row["images_per_second"] = round(display.speed, 1)
    row["seconds"] = round(position.elapsed, 3)
    position.history.append(row)
    position.epoch, position.done, position.loss, position.correct, position.images = position.epoch + 1, 0, 0.0, 0.0, 0
    counted = "ema_top1" if run.average is not None else "val_top1"
    if counted in row and row[counted] > position.best.get("top1", -1.0):
        position.best = {"top1": row[counted], "epoch": position.epoch}
        run.save_best()
    run.checkpoint()
    for logger in loggers:
        logger.epoch(position.history)
    if run.here.first:
        shown = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if key.endswith(("loss", "top1")))
        log.info("epoch %d/%d  %s  %.0f img/s", position.epoch, run.trainer.epochs, shown, display.speed)


def _validate(run: Run) -> dict[str, float]:
    if run.data.val is None:
        return {}
    row = score(run, run.model, "val").row("val")
    if run.average is not None:
        row |= score(run, run.average.module, "val").row("ema")
    return row


def score(run: Run, model: torch.nn.Module, part: str) -> Scores:
    """Evaluate a model of the run on a part of its data."""
    trainer = run.trainer
    layout = torch.channels_last if trainer.channels_last else torch.contiguous_format
    return evaluate(
        plain(model), getattr(run.data, part), len(run.data.classes), trainer.eval_batch_size, run.here,
        run.stepper.precision, trainer.num_workers, layout,
    )  # fmt: skip

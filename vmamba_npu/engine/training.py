"""Training from the first update to the report: what `train.py` calls with the objects that Hydra built."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data import ImageData
from ..data.randomness import mix, seed_all
from . import report
from .checkpoints import save_config
from .interrupts import Interrupts
from .loggers import Logger
from .loop import fit, score
from .model import Model, explain_backend, macs, parameters
from .optim import Optim
from .options import Trainer
from .processes import Processes, processes
from .refusals import refusing
from .run import Run, start

log = logging.getLogger(__name__)


def train(
    backend: str,
    model: Model,
    data: ImageData,
    optim: Optim,
    trainer: Trainer,
    logger: Mapping[str, Callable[[Path], Logger]],
    seed: int,
    output: Path,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Train a model, evaluate it once on the test part, and write everything to the output directory.

    The weights that count are the moving average at the last update if `trainer.ema_decay` is set, else the last ones;
    no choice is made by the test part. In the output directory: `model/` (what `eval.py checkpoint=` reads),
    `checkpoints/` (training state; best weights on the validation part), `metrics.json`, `report.md`, `figures/`,
    `config.yaml`, and what the loggers write.

    Args:
        backend: who computes our operators: "auto" or a name of the registry.
        model, data, optim, trainer: what is trained, on what, how.
        logger: by name, what makes a logger when called with the output directory.
        seed: of the initial weights, the order of the images, their augmentation, and dropout.
        output: the output directory, the same in all processes.
        config: the values that all this was made from, plain; kept beside the weights.

    Returns:
        The results, as in the last line that `train.py` prints.

    Raises:
        Refused: the arguments do not fit each other or this machine.
        BackendUnavailable: the backend asked for by name cannot serve the model here.
        NonFinite: the loss or the gradient was not finite.
        Interrupted: a signal ended the run, after a checkpoint.
    """
    began = time.perf_counter()
    with ExitStack() as stack:
        with refusing():
            here = stack.enter_context(processes(trainer.device))
        stack.enter_context(_deterministic(trainer.deterministic))
        interrupts = stack.enter_context(Interrupts())
        with refusing():
            _check(trainer, here, seed)
            seed_all(mix(seed))
            built = model.build(len(data.classes), data.prepare, backend).to(here.device)
            count = macs(built, data.prepare, here.device)
            run = start(built, data, optim, trainer, here, output, seed, config)
            if here.first:
                save_config(output / "config.yaml", config)
                _introduce(run, model, backend, count)
        loggers = [make(output) for make in logger.values()] if here.first else []
        for made in loggers:
            stack.callback(made.close)
        before = run.position.elapsed
        display = fit(run, loggers, interrupts)
        return _finish(run, model, backend, before + time.perf_counter() - began, display.speed)


def _finish(run: Run, model: Model, backend: str, seconds: float, speed: float) -> dict[str, Any]:
    scores = score(run, run.final, "test") if run.data.test is not None else None
    weights = run.weights(run.final)
    tells = run.data.reports_accuracy
    results = {
        "test_accuracy": scores.top1 if scores and tells else None,
        "test_loss": scores.loss if scores and tells else None,
        "test_images": scores.images if scores else 0,
        "val_accuracy": run.position.history[-1].get("ema_top1", run.position.history[-1].get("val_top1")),
        "parameters": parameters(run.final),
        "epochs": run.position.epoch,
        "seconds": round(seconds, 1),
        "images_per_second": round(speed, 1),
        "model": model.name,
        "data": run.data.name,
        "backend": backend,
        "device": run.here.device.type,
        "precision": run.trainer.precision,
        "processes": run.here.world,
        "seed": run.seed,
        "version": __version__,
        "output": str(run.output),
    }
    if run.here.first:
        report.write_run(run, results, scores, weights)
        if not tells:
            log.info("accuracy on %s data means nothing and is not reported", run.data.name)
        if run.position.best:
            log.info("best on the validation part: %.4f, epoch %d", *run.position.best.values())
        log.info("model: %s", run.output / "model")
    run.here.wait()
    return results


def _introduce(run: Run, model: Model, backend: str, count: int) -> None:
    device, final = run.here.device, run.final
    name = f" ({getattr(torch, device.type).get_device_name(device)})" if device.type != "cpu" else ""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    log.info(
        "device %s%s%s, %d process%s, %s; backend %s: %s",
        device.type, name, threads, run.here.world, "es" if run.here.world > 1 else "", run.trainer.precision,
        backend, explain_backend(final, backend, device),
    )  # fmt: skip
    size = f"{parameters(final):,} parameters, {count / 1e6:.1f} M multiply-adds an image besides scans"
    log.info("model %s, %s", model.name, size)
    parts = {part: len(getattr(run.data, part) or ()) for part in ("train", "val", "test")}
    log.info("data %s, %d classes, %s; output %s", run.data.name, len(run.data.classes), parts, run.output)
    for note in run.data.notes:
        log.warning("%s", note)


def _check(trainer: Trainer, here: Processes, seed: int) -> None:
    if seed < 0:
        raise ValueError(f"seed: expected at least 0, got {seed}")
    if trainer.channels_last and here.device.type == "npu":
        raise ValueError("trainer.channels_last: NPUs have no use for it; leave it false")


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms alone inside the block; the setting before it returns after it."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

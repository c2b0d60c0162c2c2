"""What `eval.py` does with a trained model: metrics and figures, classes of image files, or speed."""

import csv
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..data import ImageData
from . import report
from .benchmark import time_forward
from .checkpoints import write_text
from .classify import classify, image_files
from .metrics import Scores, evaluate
from .model import explain_backend, parameters
from .processes import Processes
from .refusals import one_of
from .saved import Saved
from .step import Precision

log = logging.getLogger(__name__)

SHOWN = 20  # classes up to which the confusion matrix is printed


def introduce(saved: Saved, model: nn.Module, backend: str, here: Processes, precision: str) -> None:
    """Say what is evaluated, where, and by what."""
    log.info("model %s, %d parameters, weights %s", saved.name, parameters(model), saved.weights)
    why = explain_backend(model, backend, here.device)
    log.info("device %s, %s; backend %s: %s", here.device, precision, backend, why)


def measure(
    saved: Saved, model: nn.Module, data: ImageData, part: str, batch_size: int, here: Processes, precision: Precision,
    workers: int, output: Path,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate a model on a part of a data set; figures and `metrics.json` go to the output directory.

    Raises:
        ValueError: the part is missing, or its classes are not those of the model.
    """
    dataset = getattr(data, one_of("part", part, ("train", "val", "test")))
    if dataset is None:
        raise ValueError(f"part: {data.name} has no {part} part here")
    if not data.reports_accuracy:
        raise ValueError(f"data: accuracy on {data.name} data means nothing; benchmark=true tells the speed")
    if data.classes != saved.classes:
        raise ValueError(
            f"data: {data.name} has the classes {_few(data.classes)}, the model knows {_few(saved.classes)} "
            f"(it was trained on {saved.about.get('data', 'other data')})"
        )
    scores = evaluate(model, dataset, len(data.classes), batch_size, here, precision, workers)
    results = {
        f"{part}_accuracy": scores.top1, "top5": scores.top5, "loss": scores.loss, f"{part}_images": scores.images,
        "images_per_second": round(scores.images_per_second, 1), "model": saved.name, "data": data.name,
    }  # fmt: skip
    if here.first:
        per_class = dict(zip(data.classes, scores.per_class, strict=True))
        write_text(output / "metrics.json", json.dumps({**results, "per_class": per_class}, indent=2) + "\n")
        _write_confusion(output / "confusion_matrix.csv", scores, data.classes)
        report.draw_scores(output / "figures", scores, dataset, data.classes, data.prepare)
        _tell(scores, data, part, output)
    return results


def _tell(scores: Scores, data: ImageData, part: str, output: Path) -> None:
    log.info("%s, %s part: %d images", data.name, part, scores.images)
    told = scores.top1, scores.top5, scores.loss, scores.images_per_second
    log.info("top-1 %.4f  top-5 %.4f  loss %.4f  %.0f images/s", *told)
    if len(data.classes) <= SHOWN:
        width = max(5, *(len(name) for name in data.classes)) + 1
        log.info("%s", " " * width + "".join(f"{name:>{width}}" for name in data.classes) + f"{'right':>{width + 2}}")
        for name, row, share in zip(data.classes, scores.confusion.tolist(), scores.per_class, strict=True):
            right = "-" if share is None else f"{share:.3f}"
            log.info("%s", f"{name:>{width}}" + "".join(f"{n or '.':>{width}}" for n in row) + f"{right:>{width + 2}}")
    log.info("rows: classes, columns: predictions; figures and tables: %s", output)


def _write_confusion(path: Path, scores: Scores, classes: list[str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *classes, "accuracy"])
    for name, row, share in zip(classes, scores.confusion.tolist(), scores.per_class, strict=True):
        writer.writerow([name, *row, "" if share is None else share])
    write_text(path, text.getvalue())


def name_images(
    saved: Saved, model: nn.Module, images: str | list[str], here: Processes, precision: Precision, invert: bool,
    output: Path,
) -> dict[str, Any]:  # fmt: skip
    """Classify image files; a line for each, and `images.json` in the output directory."""
    found = classify(model, saved, image_files(images), here.device, precision, invert)
    for item in found:
        log.info("%s: %s", item["image"], "  ".join(f"{name} {share:.1%}" for name, share in item["classes"]))
    write_text(output / "images.json", json.dumps(found, indent=2) + "\n")
    return {"model": saved.name, "images": found}


def speed(
    saved: Saved, model: nn.Module, backend: str, batch_size: int, here: Processes, precision: Precision, warmup: int,
    repeat: int,
) -> dict[str, Any]:  # fmt: skip
    """Time the forward of a model on a batch."""
    shape = (batch_size, saved.prepare.in_chans, *saved.prepare.img_size)
    times = time_forward(model, shape, here.device, precision, warmup, repeat)
    device = here.device
    name = getattr(torch, device.type).get_device_name(device) if device.type != "cpu" else "cpu"
    about: Mapping[str, Any] = {
        "model": saved.name, "backend": backend, "device": name, "threads": torch.get_num_threads(),
        "dtype": str(precision.dtype or torch.float32).removeprefix("torch."), "batch": batch_size,
        "size": list(saved.prepare.img_size), "warmup": warmup, "repeat": repeat, "torch": torch.__version__,
    }  # fmt: skip
    return {**about, **times}


def _few(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Figures of a run as PNG: curves, confusion matrix, wrong predictions.

`python -m vmamba_npu.engine.figures outputs/DATE/TIME` draws the curves again from the CSV files of a run.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from .checkpoints import write
from .loggers import Row, read_csv

COLUMNS = 8  # images in a row of the page of wrong predictions
LABELLED = 30  # classes up to which a confusion matrix shows names, and numbers in its cells


def curves(path: Path, history: Sequence[Row], updates: Sequence[Row] = ()) -> None:
    """Loss and accuracy over the epochs, of training, validation and averaged weights; behind, the loss of updates."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, top1 = figure.subplots(1, 2)
    if updates and history:
        per_epoch = history[-1]["update"] / history[-1]["epoch"]
        loss.plot([row["update"] / per_epoch for row in updates], [row["loss"] for row in updates], lw=0.7, alpha=0.4)
    for axes, kind in ((loss, "loss"), (top1, "top1")):
        for part, label in (("train", "training"), ("val", "validation"), ("ema", "validation, averaged weights")):
            rows = [row for row in history if f"{part}_{kind}" in row]
            if rows:
                values = [row[f"{part}_{kind}"] for row in rows]
                axes.plot([row["epoch"] for row in rows], values, marker=".", label=label)
        axes.set(xlabel="epoch", ylabel="accuracy" if kind == "top1" else kind)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    _save(figure, path)


def confusion(path: Path, matrix: Tensor, classes: Sequence[str]) -> None:
    """Confusion matrix: a row for each class, a column for each prediction; shades are shares of the row."""
    counts = matrix.numpy()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    few = len(classes) <= LABELLED
    side = max(4.0, min(0.5 * len(classes) + 1.5, 12.0))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), ax=axes, label="share of the class")
    axes.set(xlabel="prediction", ylabel="class")
    if few:
        axes.set_xticks(range(len(classes)), classes, rotation=45 if max(map(len, classes)) > 3 else 0)
        axes.set_yticks(range(len(classes)), classes)
        for i, j in zip(*counts.nonzero(), strict=True):
            color = "w" if shares[i, j] > 0.5 else "k"
            axes.text(j, i, counts[i, j], ha="center", va="center", fontsize=7, color=color)
    _save(figure, path)


def wrong_predictions(path: Path, images: Sequence[Tensor], titles: Sequence[str], total: int) -> None:
    """A page of images ([C, H, W] in 0..1) that the model took for something else."""
    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{total} wrong predictions" + (f", the first {len(images)}" if len(images) < total else ""))
    axes.axis("off")
    if images:
        channels, height, width = images[0].shape
        line = max(2, height // 4)  # above each image, for its title
        rows = -(-len(images) // COLUMNS)
        page = np.ones((rows * (height + line), COLUMNS * (width + 2), channels))
        for i, (image, title) in enumerate(zip(images, titles, strict=True)):
            top, left = i // COLUMNS * (height + line) + line, i % COLUMNS * (width + 2)
            page[top : top + height, left : left + width] = image.clamp(0, 1).permute(1, 2, 0).numpy()
            axes.text(left + width / 2, top - line / 2 - 0.5, title, ha="center", va="center", fontsize=6)
        axes.imshow(page, cmap="gray" if channels == 1 else None, vmin=0, vmax=1)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    write(path, lambda file: file.write(png.getvalue()))


def main(folders: Sequence[str]) -> None:
    """Draw the curves of each run again."""
    for folder in map(Path, folders):
        history = read_csv(folder / "summary.csv")
        if not history:
            raise SystemExit(f"{folder}: no summary.csv with epochs")
        curves(folder / "figures" / "curves.png", history, read_csv(folder / "updates.csv"))
        print(folder / "figures" / "curves.png")


if __name__ == "__main__":
    main(sys.argv[1:])

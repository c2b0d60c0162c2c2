"""Where the numbers of a run go: CSV files and TensorBoard. A logger is made with the output directory."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .checkpoints import write_text
from .refusals import need

Row = Mapping[str, Any]


class Logger(Protocol):
    """What the training loop calls."""

    def begin(self, update: int, history: Sequence[Row]) -> None:
        """Forget everything after an update: the run goes on from there, with these epochs behind it."""

    def update(self, row: Row) -> None:
        """Numbers of one update; it has `update` and `epoch`."""

    def epoch(self, history: Sequence[Row]) -> None:
        """Numbers of all epochs so far, the last one new."""

    def close(self) -> None: ...


class CsvLogger:
    """`summary.csv` with a row for each epoch, `updates.csv` with the loss curve."""

    def __init__(self, output: Path) -> None:
        self.summary, self.curve = output / "summary.csv", output / "updates.csv"

    def begin(self, update: int, history: Sequence[Row]) -> None:
        kept = [row for row in read_csv(self.curve) if row["update"] <= update]
        write_text(self.curve, _table(kept))
        write_text(self.summary, _table(history))

    def update(self, row: Row) -> None:
        new = not self.curve.stat().st_size
        with self.curve.open("a") as file:  # a line that a kill cuts is after the last checkpoint: `begin` drops it
            file.write(_table([row]) if new else _table([row]).split("\n", 1)[1])

    def epoch(self, history: Sequence[Row]) -> None:
        write_text(self.summary, _table(history))

    def close(self) -> None:
        pass


class TensorBoardLogger:
    """Event files for TensorBoard, in the folder `tensorboard`."""

    def __init__(self, output: Path) -> None:
        need("train", "tensorboard")
        self.folder = output / "tensorboard"

    def begin(self, update: int, history: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=update + 1 if update else None)

    def update(self, row: Row) -> None:
        self._add({f"train/{key}": value for key, value in row.items()}, row["update"])

    def epoch(self, history: Sequence[Row]) -> None:
        row = history[-1]
        self._add({f"epoch/{key}": value for key, value in row.items()}, row["update"])
        self.writer.flush()

    def _add(self, row: Row, update: int) -> None:
        for key, value in row.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, update)

    def close(self) -> None:
        self.writer.close()


def read_csv(path: Path) -> list[dict[str, float]]:
    """Rows of a CSV file of numbers; a last line that is cut short is left out."""
    if not path.exists():
        return []
    rows = []
    for row in csv.DictReader(io.StringIO(path.read_text())):
        try:
            rows.append({key: _number(value) for key, value in row.items() if value != ""})
        except (TypeError, ValueError):
            break
    return [row for row in rows if row.keys() >= {"update", "epoch"}]


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

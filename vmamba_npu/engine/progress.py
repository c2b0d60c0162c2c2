"""What a run shows while it trains: a bar on a terminal, a line now and then elsewhere."""

import logging
import sys
import time
from contextlib import ExitStack

from tqdm import tqdm  # type: ignore[import-untyped]
from tqdm.contrib.logging import logging_redirect_tqdm  # type: ignore[import-untyped]

log = logging.getLogger(__name__)

UNTIMED = 3  # first updates of a process, not part of its speed: memory is allocated and kernels are built in them
EVERY = 15.0  # seconds between two lines where there is no terminal


class Display:
    """Context that shows updates: loss, accuracy, learning rate, images a second, time left."""

    def __init__(self, epochs: int, updates_per_epoch: int, done: int, show: bool, accuracy: bool) -> None:
        self.epochs, self.total, self.done, self.accuracy = epochs, epochs * updates_per_epoch, done, accuracy
        self.show, self.bar = show, show and sys.stdout.isatty()
        self.seen = self.images = 0
        self.seconds = 0.0
        self.last = self.spoke = time.perf_counter()
        self.stack = ExitStack()

    def __enter__(self) -> "Display":
        if self.bar:
            self.stack.enter_context(logging_redirect_tqdm())
            bar = tqdm(total=self.total, initial=self.done, unit="update", dynamic_ncols=True, file=sys.stdout)
            self.tqdm = self.stack.enter_context(bar)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @property
    def speed(self) -> float:
        """Images a second of training, without the first updates of this process; 0 before them."""
        return self.images / self.seconds if self.images else 0.0

    def update(self, epoch: int, images: int, loss: float, top1: float, lr: float) -> None:
        """Show one more update; `loss` and `top1` are means of the epoch so far."""
        self.seen, self.done = self.seen + 1, self.done + 1
        now = time.perf_counter()
        if self.seen > UNTIMED:
            self.images, self.seconds = self.images + images, self.seconds + now - self.last
        self.last = now
        shown = {"loss": f"{loss:.4f}", "top1": f"{top1:.2%}", "lr": f"{lr:.2e}", "img/s": f"{self.speed:.0f}"}
        if not self.accuracy:
            del shown["top1"]
        if self.bar:
            self.tqdm.set_description(f"epoch {epoch + 1}/{self.epochs}", refresh=False)
            self.tqdm.set_postfix(shown, refresh=False)
            self.tqdm.update()
        elif self.show and now - self.spoke > EVERY:
            self.spoke = now
            left = (self.total - self.done) * self.seconds / max(self.seen - UNTIMED, 1)
            words = "  ".join(f"{key} {value}" for key, value in shown.items())
            where = f"epoch {epoch + 1}/{self.epochs}  update {self.done}/{self.total}"
            log.info("%s  %s  left %.0f s", where, words, left)

    def skip(self) -> None:
        """Leave the time since the last update (an evaluation, a checkpoint) out of the speed."""
        self.last = time.perf_counter()

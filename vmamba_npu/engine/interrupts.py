"""SIGTERM and Ctrl-C end a run after the update in hand, with a checkpoint; a second one ends it at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(SystemExit):
    """A run that a signal ended after its checkpoint; the exit code is the usual one of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interrupts:
    """Context in which SIGTERM and SIGINT are noted instead of ending the process; the old handlers return after it."""

    def __init__(self) -> None:
        self.number = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

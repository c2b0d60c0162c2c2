"""Refusing what cannot be: unknown names with their choices, and one error type that is told without a trace."""

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec

from ..backends import BackendUnavailable


class Refused(ValueError):
    """What was asked for cannot be, for a reason that its message tells; nothing is wrong with the program."""


@contextmanager
def refusing() -> Iterator[None]:
    """Block of preparations, whose errors are the user's: they become `Refused` with their first cause's message."""
    try:
        yield
    except (Refused, BackendUnavailable):
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        text = str(first)
        if not text or not isinstance(first, ValueError | OSError | ImportError | BackendUnavailable):
            text = "".join(traceback.format_exception_only(first)).strip()
        raise Refused(text) from error


def need(extra: str, *packages: str) -> None:
    """Packages of an extra that a program is going to import.

    Raises:
        ModuleNotFoundError: one is not installed; the message has the command that installs it.
    """
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        raise ModuleNotFoundError(f"not installed: {', '.join(absent)}; pip install 'vmamba-npu[{extra}]'")


def one_of(argument: str, value: str, choices: Collection[str], show: int = 12) -> str:
    """The value, if it is one of the choices.

    Raises:
        ValueError: it is not; the message lists the choices, or the nearest where there are more than `show`.
    """
    if value in choices:
        return value
    if len(choices) <= show:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, got {value!r}")
    near = get_close_matches(value, choices, n=5, cutoff=0.4)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(f"{argument}: {value!r} is none of the {len(choices)} known names{hint}")

"""The one table from (operator, backend) to an implementation, and the one predicate that decides who serves a call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

# What `auto` tries, in this order, by the tensors' device; elsewhere, and when none of these serves, "torch".
AUTO: dict[str, tuple[str, ...]] = {"npu": ("ascendc", "triton"), "cuda": ("triton",)}
FALLBACK = "torch"


class BackendUnavailable(RuntimeError):
    """A backend asked for by name cannot serve this call."""


def _serves_all(*call: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One backend of one operator.

    Attributes:
        op: operator name, "ssd".
        backend: backend name, "torch".
        module: module with the plain functions of tensors that do the work; imported on first use.
        devices: device types served; None means every one.
        dtypes: dtypes of the first tensor argument that are served.
        missing: None, or what is absent on this machine and the remedy. It tries the technology.
        refuses: of the call's arguments: None, or the limit that this call breaks, in words.
    """

    op: str
    backend: str
    module: str
    devices: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]
    missing: Callable[[], str | None]
    refuses: Callable[..., str | None] = _serves_all

    def why_not(self, x: torch.Tensor, *call: Any) -> str | None:
        """None if this implementation serves the call, else the reason that it does not."""
        if self.devices is not None and x.device.type not in self.devices:
            return f"it serves {', '.join(self.devices)} tensors, got {x.device.type}"
        if x.dtype not in self.dtypes:
            return f"it serves {', '.join(map(str, self.dtypes))}, got {x.dtype}"
        return self.missing() or self.refuses(x, *call)


_TABLE: dict[str, dict[str, Implementation]] = {}
_AUTO_MEANS: ContextVar[str] = ContextVar("vmamba_npu_auto_means", default="auto")


def register(*implementations: Implementation) -> None:
    """Enter implementations in the table (the `library.py` of each operator does)."""
    for impl in implementations:
        _TABLE.setdefault(impl.op, {})[impl.backend] = impl


def operators() -> dict[str, dict[str, Implementation]]:
    """The table: operator name to its implementations by backend name."""
    return {op: dict(table) for op, table in _TABLE.items()}


def known() -> tuple[str, ...]:
    """Every accepted value of a `backend` argument."""
    return ("auto", *dict.fromkeys(name for table in _TABLE.values() for name in table))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Set what `backend="auto"` means inside the block; a backend named in a call keeps its name.

    Raises:
        ValueError: the name is not known.
    """
    if name not in known():
        raise ValueError(f"backend: expected one of {', '.join(known())}, got {name!r}")
    token = _AUTO_MEANS.set(name)
    try:
        yield
    finally:
        _AUTO_MEANS.reset(token)


def explain(op: str, x: torch.Tensor, *call: Any) -> dict[str, str | None]:
    """For each backend of an operator: None if it serves a call with these arguments, else why it does not.

    Args:
        op: operator name, as in `operators()`.
        x: the operator's first tensor argument; `call` its further arguments (may be omitted).
    """
    if op not in _TABLE:
        raise ValueError(f"op: expected one of {', '.join(_TABLE)}, got {op!r}")
    return {name: impl.why_not(x, *call) for name, impl in _TABLE[op].items()}


def choose(op: str, backend: str, x: torch.Tensor, *call: Any) -> str:
    """Name of the backend that serves the call: the one asked for, or the one that `auto` picks.

    Raises:
        ValueError: the backend is not known.
        BackendUnavailable: the backend asked for by name cannot serve the call.
    """
    table = _TABLE[op]
    if backend == "auto":
        backend = _AUTO_MEANS.get()
    if backend == "auto":
        order = (name for name in AUTO.get(x.device.type, ()) if name in table)
        return next((name for name in order if table[name].why_not(x, *call) is None), FALLBACK)
    if backend not in table:
        raise ValueError(f"backend: {op} has auto, {', '.join(table)}; got {backend!r}")
    if reason := table[backend].why_not(x, *call):
        serving = [name for name, why in explain(op, x, *call).items() if why is None]
        raise BackendUnavailable(
            f"{op}: backend {backend!r} cannot serve this call: {reason}. "
            f"Serving it here: {', '.join(serving) or 'none'}."
        )
    return backend


def resolve(op: str, backend: str, x: torch.Tensor, *call: Any) -> ModuleType:
    """Module of the implementation that serves the call; errors as `choose`."""
    return import_module(_TABLE[op][choose(op, backend, x, *call)].module)

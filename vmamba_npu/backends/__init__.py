"""Which implementation serves a call: the registry, what it looks for on this machine, and helpers for tensors."""

from .registry import (
    BackendUnavailable,
    Implementation,
    choose,
    explain,
    known,
    operators,
    register,
    resolve,
    use_backend,
)

__all__ = [
    "BackendUnavailable",
    "Implementation",
    "choose",
    "explain",
    "known",
    "operators",
    "register",
    "resolve",
    "use_backend",
]

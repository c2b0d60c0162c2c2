"""Operators: public functions of tensors; importing this module registers them."""

from ..backends.registry import known as known_backends
from .ssd import ssd

__all__ = ["known_backends", "ssd"]

"""Checks of one argument that several operators make; each message names the argument, what was expected and got."""

import torch
from torch import Tensor


def expect_shape(name: str, t: Tensor | None, *wanted: tuple[int, ...]) -> None:
    if t is not None and tuple(t.shape) not in wanted:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, wanted))}, got {tuple(t.shape)}")


def expect_ndim(name: str, t: Tensor, layout: str) -> None:
    if t.ndim != layout.count(",") + 1:
        raise ValueError(f"{name}: expected {layout}, got shape {tuple(t.shape)}")


def expect_device(first: Tensor, /, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and t.device != first.device:
            raise ValueError(f"{name}: expected device {first.device}, got {t.device}")


def expect_float(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and not t.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {t.dtype}")


def expect_same_dtype(values: Tensor, /, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and t.dtype != values.dtype:
            raise TypeError(f"{name}: expected the dtype of the values, {values.dtype}, got {t.dtype}")


def expect_integer(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected an int32 or int64 tensor, got {t.dtype}")


def expect_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected a size of at least 1, got {size}")


def check_rows(name: str, indices: Tensor | None, rows: int) -> None:
    """Values of an index tensor; only on a CPU, where reading them stops no device."""
    if indices is not None and indices.device.type == "cpu" and bool((indices >= rows).any()):
        raise ValueError(f"{name}: expected rows below {rows}, got {int(indices.max())}")

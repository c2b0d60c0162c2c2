"""mamba_ssm.ops.triton.selective_state_update: one token, with every argument of any accepted rank."""

from math import inf
from typing import TypeVar

from torch import Tensor

from ..ops import selective_state_update as update

__all__ = ["selective_state_update", "selective_state_update_ref"]

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def _with_heads(name: str, t: MaybeTensor, ndim: int, axis: int) -> MaybeTensor:
    """The tensor with an axis of one head (or group), unless it has that axis."""
    if t is None or t.ndim == ndim:
        return t
    if t.ndim != ndim - 1:
        raise ValueError(f"{name}: expected {ndim - 1} or {ndim} axes, got shape {tuple(t.shape)}")
    return t.unsqueeze(axis)


def _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, backend) -> Tensor:
    y = update(
        _with_heads("state", state, 4, 1),
        _with_heads("x", x, 3, 1),
        _with_heads("dt", dt, 3, 1),
        _with_heads("A", A, 3, 0),
        _with_heads("B", B, 3, 1),
        _with_heads("C", C, 3, 1),
        _with_heads("D", D, 2, 0),
        _with_heads("z", z, 3, 1),
        _with_heads("dt_bias", dt_bias, 2, 0),
        dt_softplus,
        state_batch_indices,
        dt_limit=(-inf, inf),  # mamba_ssm clamps no step here
        backend=backend,
    )
    return y if state.ndim == 4 else y.squeeze(1)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """`vmamba_npu.ops.selective_state_update` of one token; `state` is updated in place, no gradient.

    Each tensor may lack the axis of heads (of groups: B, C), on its own: it then stands for one head. D, z and dt_bias
    may be absent, alone or together. No step is clamped, as in mamba_ssm.

    Returns:
        out [B, H, P], or [B, P] if `state` has no axis of heads, in the dtype of x.
    """
    return _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, "auto")


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """`selective_state_update` by its definition, one head after another."""
    return _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, "reference")

"""The one-token state update of all rows and heads at once, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32, put_rows


def _narrow(t: Tensor, acc: torch.dtype) -> Tensor:
    """The same values with every expanded axis (stride 0) of size 1: one step and one decay a head, as in Mamba-2."""
    return t[tuple(slice(1) if stride == 0 else slice(None) for stride in t.stride())].to(acc)


def update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_min, dt_max) -> Tensor:
    acc = torch.promote_types(at_least_float32(x.dtype), state.dtype)
    raw = _narrow(dt, acc) if dt_bias is None else _narrow(dt, acc) + _narrow(dt_bias, acc)
    step = (torch.logaddexp(raw, raw.new_zeros(())) if dt_softplus else raw).clamp(dt_min, dt_max)  # [batch, H, P]
    xs = x.to(acc)
    rows = state_batch_indices
    S = (state if rows is None else state[rows.clamp_min(0)]).to(acc)  # the state itself if no row or dtype differs
    S.mul_((step[..., None] * _narrow(A, acc)).exp())
    groups = (B.shape[1], -1)
    added = (step * xs).unflatten(1, groups)[..., None]  # [batch, G, heads of a group, P, 1]
    S.unflatten(1, groups).addcmul_(added, B.to(acc)[:, :, None, None])
    y = (S.unflatten(1, groups).flatten(2, 3) @ C.to(acc)[..., None]).view(x.shape)
    if D is not None:
        y.addcmul_(D.to(acc), xs)
    if z is not None:
        y.mul_(F.silu(z.to(acc)))
    if rows is not None:
        put_rows(state, rows, S)
        y.masked_fill_((rows < 0)[:, None, None], 0)
    elif S is not state:
        state.copy_(S)
    return y.to(x.dtype)

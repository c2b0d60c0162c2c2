"""The one-token state update of all rows and heads at once, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32


def _same_over(t: Tensor, *axes: int) -> bool:
    return all(t.stride(axis) == 0 or t.shape[axis] == 1 for axis in axes)


def update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_min, dt_max) -> Tensor:
    acc = torch.promote_types(at_least_float32(x.dtype), state.dtype)
    if _same_over(dt, 2) and _same_over(A, 1, 2) and (dt_bias is None or _same_over(dt_bias, 1)):
        dt, A = dt[..., :1], A[:, :1, :1]  # one step and one decay a head, as in Mamba-2
        dt_bias = None if dt_bias is None else dt_bias[:, :1]
    raw = dt.to(acc) if dt_bias is None else dt.to(acc) + dt_bias.to(acc)
    delta = (torch.logaddexp(raw, raw.new_zeros(())) if dt_softplus else raw).clamp(dt_min, dt_max)  # [batch, H, P]
    heads = x.shape[1] // B.shape[1]
    B, C = (t.to(acc).repeat_interleave(heads, 1) for t in (B, C))  # [batch, H, N]
    xs = x.to(acc)
    kept = None if state_batch_indices is None else state_batch_indices >= 0
    before = state if kept is None else state[state_batch_indices.clamp_min(0)]
    new = (delta[..., None] * A.to(acc)).exp() * before.to(acc)
    new = new + (delta * xs)[..., None] * B[:, :, None, :]  # [batch, H, P, N]
    y = (new @ C[..., None])[..., 0]
    if D is not None:
        y = y + D.to(acc) * xs
    if z is not None:
        y = y * F.silu(z.to(acc))
    if kept is None:
        state.copy_(new)
    else:
        state[state_batch_indices[kept]] = new[kept].to(state.dtype)
        y = y.masked_fill(~kept[:, None, None], 0)
    return y.to(x.dtype).contiguous()

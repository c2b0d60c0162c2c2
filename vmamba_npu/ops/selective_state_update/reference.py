"""The one-token state update by its definition, one head of one row after another."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32


def step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_min, dt_max) -> tuple[Tensor, Tensor]:
    """(y [P], new state [P, N]) of one head: state, A [P, N]; x, dt, D, z, dt_bias [P]; B, C [N]. Differentiable."""
    raw = dt if dt_bias is None else dt + dt_bias
    delta = (torch.logaddexp(raw, raw.new_zeros(())) if dt_softplus else raw).clamp(dt_min, dt_max)
    new = (delta[:, None] * A).exp() * state + (delta * x)[:, None] * B
    y = new @ C if D is None else new @ C + D * x
    return y if z is None else y * F.silu(z), new


def update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_min, dt_max) -> Tensor:
    acc = torch.promote_types(at_least_float32(x.dtype), state.dtype)
    heads = x.shape[1] // B.shape[1]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows = range(x.shape[0]) if state_batch_indices is None else state_batch_indices.tolist()
    for b, row in enumerate(rows):
        if row < 0:
            continue
        for h in range(x.shape[1]):
            token = (state[row, h], x[b, h], dt[b, h], A[h], B[b, h // heads], C[b, h // heads])
            skip, gate, bias = (None if t is None else t[h].to(acc) for t in (D, None if z is None else z[b], dt_bias))
            wide = [t.to(acc) for t in token]
            y_head, new = step(
                wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], skip, gate, bias, dt_softplus, dt_min, dt_max
            )
            y[b, h], state[row, h] = y_head.to(x.dtype), new.to(state.dtype)
    return y

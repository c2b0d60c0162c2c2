"""SSD by its definition, token after token, in any float dtype (float64 stays float64)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32


def _steps(dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Effective steps and their derivative by the raw dt: [B, L, H] each."""
    raw = dt if dt_bias is None else dt + dt_bias
    positive = torch.logaddexp(raw, raw.new_zeros(())) if softplus else raw
    slope = torch.sigmoid(raw) if softplus else torch.ones_like(raw)
    inside = (positive >= low) & (positive <= high)
    return positive.clamp(low, high), torch.where(inside | positive.isnan(), slope, 0)


def _restarts(x: Tensor, seq_idx: Tensor | None) -> list[list[bool]]:
    """restart[b][t]: whether the state is set to zero just before token t."""
    if seq_idx is None:
        return [[False] * x.shape[1] for _ in range(x.shape[0])]
    before = F.pad(seq_idx[:, :-1], (1, 0))
    return (seq_idx != before).tolist()


class _Row:
    """One sequence: tokens t0 .. t1 of batch row b, all heads, in the accumulation dtype."""

    def __init__(self, b, t0, t1, x, steps, A, B, C, restart):
        heads = x.shape[2] // B.shape[2]
        self.x, self.steps, self.A = x[b, t0:t1], steps[b, t0:t1], A
        self.B = B[b, t0:t1].repeat_interleave(heads, 1)  # [L, H, N]
        self.C = C[b, t0:t1].repeat_interleave(heads, 1)
        self.restart = restart[b][t0:t1]

    def advance(self, S: Tensor, t: int) -> Tensor:
        S = torch.zeros_like(S) if self.restart[t] else S
        decay = (self.steps[t] * self.A).exp()[:, None, None]
        return decay * S + (self.steps[t, :, None] * self.x[t])[:, :, None] * self.B[t, :, None]  # [H, P, N]


def _rows(x, dt, A, B, C, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max):
    """The sequences (batch row, first token, end) with their rows and initial states; the derivative of the steps."""
    acc = at_least_float32(x.dtype)
    x, dt, A, B, C = (t.to(acc) for t in (x, dt, A, B, C))
    steps, slope = _steps(dt, None if dt_bias is None else dt_bias.to(acc), dt_softplus, dt_min, dt_max)
    batch, L, H, P = x.shape
    if cu_seqlens is None:
        where = [(b, 0, L) for b in range(batch)]
    else:
        borders = cu_seqlens.tolist()
        where = [(0, a, b) for a, b in pairwise(borders)]
    restart = _restarts(x, seq_idx)
    rows = [_Row(*w, x, steps, A, B, C, restart) for w in where]
    initial = x.new_zeros(len(where), H, P, B.shape[3]) if initial_states is None else initial_states.to(acc)
    return where, rows, initial, steps, slope


def forward(
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max
) -> tuple[Tensor, Tensor]:
    where, rows, initial, steps, _ = _rows(
        x, dt, A, B, C, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max
    )
    y = torch.empty(x.shape, dtype=steps.dtype, device=x.device)
    final_states = torch.empty_like(initial)
    for i, ((b, t0, _), row) in enumerate(zip(where, rows, strict=True)):
        S = initial[i]
        for t in range(len(row.x)):
            S = row.advance(S, t)
            y[b, t0 + t] = (S @ row.C[t, :, :, None])[..., 0]
        final_states[i] = S
    if D is not None:
        y = y + D.to(y.dtype).reshape(x.shape[2], -1) * x.to(y.dtype)
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    return y.to(x.dtype), final_states


def backward(
    dy, dfinal_states,
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The adjoint recurrence, from the last token to the first."""
    where, rows, initial, steps, slope = _rows(
        x, dt, A, B, C, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max
    )
    acc = steps.dtype
    G, heads = B.shape[2], x.shape[2] // B.shape[2]
    do = dy.to(acc)
    if z is not None:
        gate = torch.sigmoid(z.to(acc))
        do = do * z.to(acc) * gate
    o = torch.zeros_like(do)
    dx, d_steps, d_decay = torch.zeros_like(do), torch.zeros_like(steps), torch.zeros_like(steps)
    dB = torch.zeros(*B.shape[:2], x.shape[2], B.shape[3], dtype=acc, device=x.device)  # [B, L, H, N]
    dC, dinitial = torch.zeros_like(dB), torch.empty_like(initial)
    for i, ((b, t0, _), row) in enumerate(zip(where, rows, strict=True)):
        dS = dfinal_states[i].to(acc)
        for t, S_before, S in _states_backwards(row, initial[i]):
            at = (b, t0 + t)
            o[at] = (S @ row.C[t, :, :, None])[..., 0]
            dC[at] = (do[at][:, None] @ S)[:, 0]
            dS = dS + do[at][:, :, None] * row.C[t, :, None]
            d_stepped = (dS @ row.B[t, :, :, None])[..., 0]  # gradient of step * x: [H, P]
            dB[at] = ((row.steps[t, :, None] * row.x[t])[:, None] @ dS)[:, 0]
            dx[at] = row.steps[t, :, None] * d_stepped
            d_steps[at] = (row.x[t] * d_stepped).sum(-1)
            if row.restart[t]:
                dS = torch.zeros_like(dS)
                continue
            decay = (row.steps[t] * row.A).exp()
            d_decay[at] = decay * (dS * S_before).sum((1, 2))
            dS = decay[:, None, None] * dS
        dinitial[i] = dS
    return _finish(
        do, o, dx, d_steps, d_decay, dB.unflatten(2, (G, heads)).sum(3), dC.unflatten(2, (G, heads)).sum(3), dinitial,
        steps, slope, dy, x, dt, A, B, C, D, z, dt_bias, initial_states,
    )  # fmt: skip


def _states_backwards(row: _Row, S: Tensor):
    """(t, state before t, state after t) from the last token to the first, holding about 2 sqrt(L) states."""
    L = len(row.x)
    segment = max(1, int(L**0.5))
    kept = []
    for t in range(L):
        if t % segment == 0:
            kept.append(S)
        S = row.advance(S, t)
    for k in range(len(kept) - 1, -1, -1):
        states = [kept[k]]
        for t in range(k * segment, min(L, (k + 1) * segment)):
            states.append(row.advance(states[-1], t))
        for j in range(len(states) - 2, -1, -1):
            yield k * segment + j, states[j], states[j + 1]


def _finish(
    do, o, dx, d_steps, d_decay, dB, dC, dinitial, steps, slope, dy, x, dt, A, B, C, D, z, dt_bias, initial_states
):
    """Skip, gate and step size: what is elementwise in the tokens."""
    acc = do.dtype
    dD = dz = None
    if D is not None:
        skip = D.to(acc).reshape(x.shape[2], -1)
        o = o + skip * x.to(acc)
        dx = dx + skip * do
        dD = (do * x.to(acc)).sum((0, 1))
        dD = (dD if D.ndim == 2 else dD.sum(-1)).to(D.dtype)
    if z is not None:
        gate = torch.sigmoid(z.to(acc))
        dz = (dy.to(acc) * o * gate * (1 + z.to(acc) * (1 - gate))).to(z.dtype)
    d_A = (steps * d_decay).sum((0, 1)).to(A.dtype)
    d_raw = (d_steps + A.to(acc) * d_decay) * slope
    ddt_bias = None if dt_bias is None else d_raw.sum((0, 1)).to(dt_bias.dtype)
    dinitial = None if initial_states is None else dinitial.to(initial_states.dtype)
    return (
        dx.to(x.dtype), d_raw.to(dt.dtype), d_A, dB.to(B.dtype), dC.to(C.dtype), dD, dz, ddt_bias, dinitial,
    )  # fmt: skip

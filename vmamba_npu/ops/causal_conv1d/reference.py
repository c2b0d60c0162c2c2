"""The causal convolution by its definition, tap after tap of each token, in any float dtype (float64 stays float64)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32


def _taps(L: int, width: int, seq_idx: Tensor | None, b: int) -> list[list[int]]:
    """For each token of row b the columns j whose token counts; none at padding."""
    if seq_idx is None:
        return [list(range(width))] * L
    row = seq_idx[b].tolist()
    first = width - 1
    return [
        [j for j in range(width) if row[t] >= 0 and t - first + j >= 0 and row[t - first + j] == row[t]]
        for t in range(L)
    ]


def _extended(x: Tensor, width: int, initial_states: Tensor | None) -> Tensor:
    """Tokens with the W - 1 before them: [B, channels, W - 1 + L]."""
    if initial_states is None:
        return F.pad(x, (width - 1, 0))
    return torch.cat([initial_states.to(x.dtype), x], -1)


def _before_activation(X: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    width = weight.shape[1]
    batch, channels, L = X.shape[0], X.shape[1], X.shape[2] - (width - 1)
    p = X.new_zeros(batch, channels, L)
    for b in range(batch):
        for t, taps in enumerate(_taps(L, width, seq_idx, b)):
            if seq_idx is not None and seq_idx[b, t] < 0:
                continue
            if bias is not None:
                p[b, :, t] += bias
            for j in taps:
                p[b, :, t] += weight[:, j] * X[b, :, t + j]
    return p


def _in_last_sequence(L: int, width: int, seq_idx: Tensor, b: int) -> list[bool]:
    """For each column of the final state whether its token belongs to the sequence of the row's last token."""
    row = seq_idx[b].tolist()
    tokens = range(L - (width - 1), L)
    return [u >= 0 and row[-1] >= 0 and row[u] == row[-1] for u in tokens]


def _final_states(X: Tensor, L: int, width: int, seq_idx: Tensor | None) -> Tensor:
    final_states = X[:, :, L:].clone()
    if seq_idx is not None and L:
        for b in range(X.shape[0]):
            for j, kept in enumerate(_in_last_sequence(L, width, seq_idx, b)):
                if not kept:
                    final_states[b, :, j] = 0
    return final_states


def forward(x, weight, bias, seq_idx, initial_states, activation) -> tuple[Tensor, Tensor]:
    acc = at_least_float32(x.dtype)
    L, width = x.shape[2], weight.shape[1]
    X = _extended(x.to(acc), width, initial_states)
    p = _before_activation(X, weight.to(acc), None if bias is None else bias.to(acc), seq_idx)
    out = p if activation is None else F.silu(p)
    return out.to(x.dtype), _final_states(X, L, width, seq_idx).to(x.dtype)


def backward(dout, dfinal_states, x, weight, bias, seq_idx, initial_states, activation) -> tuple[Tensor | None, ...]:
    acc = at_least_float32(x.dtype)
    L, width = x.shape[2], weight.shape[1]
    X, w = _extended(x.to(acc), width, initial_states), weight.to(acc)
    dp = dout.to(acc)
    if activation is not None:
        p = _before_activation(X, w, None if bias is None else bias.to(acc), seq_idx)
        sigmoid = torch.sigmoid(p)
        dp = dp * sigmoid * (1 + p * (1 - sigmoid))
    if seq_idx is not None:
        dp = dp.masked_fill((seq_idx < 0)[:, None], 0)
    dX, dweight = torch.zeros_like(X), torch.zeros_like(w)
    for b in range(x.shape[0]):
        for t, taps in enumerate(_taps(L, width, seq_idx, b)):
            for j in taps:
                dX[b, :, t + j] += w[:, j] * dp[b, :, t]
                dweight[:, j] += dp[b, :, t] * X[b, :, t + j]
        kept = [True] * (width - 1) if seq_idx is None or not L else _in_last_sequence(L, width, seq_idx, b)
        for j in range(width - 1):
            if kept[j]:
                dX[b, :, L + j] += dfinal_states[b, :, j].to(acc)
    return (
        dX[:, :, width - 1 :].to(x.dtype),
        dweight.to(weight.dtype),
        None if bias is None else dp.sum((0, 2)).to(bias.dtype),
        None if initial_states is None else dX[:, :, : width - 1].to(initial_states.dtype).clone(),
    )


def update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices) -> Tensor:
    acc = at_least_float32(x.dtype)
    width, kept = weight.shape[1], conv_state.shape[2]
    w = weight.to(acc)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for b in range(x.shape[0]):
        row = b if conv_state_indices is None else int(conv_state_indices[b])
        if row < 0:
            continue
        state = conv_state[row]
        for t in range(x.shape[2]):
            position = kept if cache_seqlens is None else int(cache_seqlens[b]) + t
            p = w[:, -1] * x[b, :, t].to(acc)
            for j in range(width - 1):
                p = p + w[:, j] * state[:, (position - (width - 1) + j) % max(kept, 1)].to(acc)
            if bias is not None:
                p = p + bias.to(acc)
            out[b, :, t] = (p if activation is None else F.silu(p)).to(x.dtype)
            if kept and cache_seqlens is None:
                state[:, :-1] = state[:, 1:].clone()
                state[:, -1] = x[b, :, t].to(state.dtype)
            elif kept:
                state[:, position % kept] = x[b, :, t].to(state.dtype)
    return out

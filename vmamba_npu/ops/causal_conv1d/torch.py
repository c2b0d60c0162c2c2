"""The causal convolution as W shifted products over all tokens, in the layout of the input, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32


class _Signal:
    """Tokens with the W - 1 before them in float32 (float64) and in the layout of x; `axis` is that of the tokens."""

    def __init__(self, x: Tensor, width: int, initial_states: Tensor | None, seq_idx: Tensor | None):
        self.width, self.L, self.seq_idx = width, x.shape[2], seq_idx
        self.acc = at_least_float32(x.dtype)
        self.axis = 1 if x.stride(1) == 1 and x.stride(2) != 1 else 2
        before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states
        self.tokens = torch.cat([self.arrange(before), self.arrange(x)], self.axis)

    def arrange(self, t: Tensor) -> Tensor:
        """[B, channels, L] -> [B, L, channels] if the channels of x come last; or back."""
        return (t.mT if self.axis == 1 else t).to(self.acc)

    def channels(self, t: Tensor) -> Tensor:
        """[channels] -> shape that multiplies tokens."""
        return t.to(self.acc) if self.axis == 1 else t.to(self.acc)[:, None]

    def tap(self, t: Tensor, j: int) -> Tensor:
        """The part of an extended signal that column j of the weight meets."""
        return t.narrow(self.axis, j, self.L)

    def per_token(self, mask: Tensor) -> Tensor:
        return mask[:, :, None] if self.axis == 1 else mask[:, None]

    def counts(self, j: int) -> Tensor | None:
        """Whether the token that column j meets is of the same sequence, or None if all are."""
        distance = self.width - 1 - j
        if self.seq_idx is None:
            return None
        if distance >= self.L:
            return self.per_token(torch.zeros_like(self.seq_idx, dtype=torch.bool))
        same = self.seq_idx[:, distance:] == self.seq_idx[:, : self.L - distance]
        return self.per_token(F.pad(same, (distance, 0)) & (self.seq_idx >= 0))

    def final_counts(self) -> Tensor | None:
        """[B, 1, W - 1]: whether a column of the final states is of the last token's sequence, or None if all are."""
        if self.seq_idx is None or self.L == 0:
            return None
        last = self.seq_idx[:, -1:]
        same = F.pad((self.seq_idx == last) & (last >= 0), (self.width - 1, 0))
        return same[:, None, self.L :]

    def convolve(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        p = torch.zeros_like(self.tap(self.tokens, 0), memory_format=torch.contiguous_format)
        for j in range(self.width):
            X, counts = self.tap(self.tokens, j), self.counts(j)
            if counts is not None:
                X = X.masked_fill(~counts, 0)
            p.addcmul_(X, self.channels(weight[:, j]))
        if bias is not None:
            p = p.add_(self.channels(bias))
        if self.seq_idx is not None:
            p = p.masked_fill_(self.per_token(self.seq_idx < 0), 0)
        return p


def forward(x, weight, bias, seq_idx, initial_states, activation) -> tuple[Tensor, Tensor]:
    signal = _Signal(x, weight.shape[1], initial_states, seq_idx)
    p = signal.convolve(weight, bias)
    out = p if activation is None else F.silu(p, inplace=True)
    tail = signal.tokens.narrow(signal.axis, signal.L, signal.width - 1)
    final_states = tail.mT if signal.axis == 1 else tail
    counts = signal.final_counts()
    if counts is not None:
        final_states = final_states.masked_fill(~counts, 0)
    out = out.to(x.dtype)
    return out.mT if signal.axis == 1 else out, final_states.to(x.dtype, copy=True).contiguous()


def backward(dout, dfinal_states, x, weight, bias, seq_idx, initial_states, activation) -> tuple[Tensor | None, ...]:
    signal = _Signal(x, weight.shape[1], initial_states, seq_idx)
    axis, width, L = signal.axis, signal.width, signal.L
    dp = signal.arrange(dout)
    if activation is not None:
        p = signal.convolve(weight, bias)
        sigmoid = p.sigmoid()
        dp = dp * sigmoid.mul_(p.sub_(p * sigmoid).add_(1))  # silu' = s (1 + p (1 - s))
    if seq_idx is not None:
        dp = dp.masked_fill(signal.per_token(seq_idx < 0), 0)
    dX = torch.zeros_like(signal.tokens)
    dweight = []
    over_tokens = (0, 1) if axis == 1 else (0, 2)
    for j in range(width):
        counts = signal.counts(j)
        dp_j = dp if counts is None else dp.masked_fill(~counts, 0)
        signal.tap(dX, j).addcmul_(dp_j, signal.channels(weight[:, j]))
        dweight.append((dp_j * signal.tap(signal.tokens, j)).sum(over_tokens))
    counts = signal.final_counts()
    d_tail = dfinal_states if counts is None else dfinal_states.masked_fill(~counts, 0)
    dX.narrow(axis, L, width - 1).add_(signal.arrange(d_tail))
    dX = dX.mT if axis == 1 else dX
    return (
        dX[:, :, width - 1 :].to(x.dtype),
        torch.stack(dweight, 1).to(weight.dtype),
        None if bias is None else dp.sum(over_tokens).to(bias.dtype),
        None if initial_states is None else dX[:, :, : width - 1].to(initial_states.dtype, copy=True).contiguous(),
    )


def update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices) -> Tensor:
    acc = at_least_float32(x.dtype)
    width, kept, T = weight.shape[1], conv_state.shape[2], x.shape[2]
    used = None if conv_state_indices is None else conv_state_indices >= 0
    rows = slice(None) if used is None else conv_state_indices.clamp_min(0)
    state = conv_state[rows]
    if cache_seqlens is not None and kept:  # turn the ring so that its last column is the latest token
        columns = (cache_seqlens[:, None] + torch.arange(kept, device=x.device)) % kept
        state = state.gather(2, columns[:, None].expand_as(state).long())
    line = torch.cat([state, x.to(state.dtype)], 2)  # [B, channels, K + T]
    w = weight.to(acc)
    p = x.to(acc) * w[:, -1, None]
    for j in range(width - 1):
        p = p.addcmul_(line[:, :, kept - (width - 1) + j :][:, :, :T].to(acc), w[:, j, None])
    if bias is not None:
        p = p + bias.to(acc)[:, None]
    out = p if activation is None else F.silu(p)
    new = line[:, :, T:]
    if cache_seqlens is not None and kept:
        columns = (cache_seqlens[:, None] + T + torch.arange(kept, device=x.device)) % kept
        new = torch.empty_like(new).scatter_(2, columns[:, None].expand_as(new).long(), new)
    if used is None:
        conv_state.copy_(new)
    else:
        conv_state[conv_state_indices[used]] = new[used]
        out = out.masked_fill(~used[:, None, None], 0)
    return out.to(x.dtype).contiguous()

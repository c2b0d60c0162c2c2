"""The causal convolution in blocks of tokens that stay in cache, on any device."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32, put_rows

# Elements of a block by device type: what a CPU core's cache holds; elsewhere as few launches as memory allows.
BLOCK_ELEMENTS = {"cpu": 1 << 19}
BLOCK_ELEMENTS_ELSEWHERE = 1 << 28


class _Signal:
    """The tokens of x [B, channels, L] with the W - 1 before them, read as [rows, tokens, channels] in wide floats."""

    def __init__(self, x: Tensor, width: int, initial_states: Tensor | None, seq_idx: Tensor | None):
        self.x, self.seq_idx, self.reach = x.mT, seq_idx, width - 1
        self.before = None if initial_states is None else initial_states.mT
        self.acc = at_least_float32(x.dtype)

    def blocks(self) -> Iterator[tuple[slice, int, int]]:
        """(rows, first token, end); blocks of the same rows follow each other."""
        batch, L, channels = self.x.shape
        tokens = max(1, BLOCK_ELEMENTS.get(self.x.device.type, BLOCK_ELEMENTS_ELSEWHERE) // channels)
        rows = max(1, tokens // max(L, 1))
        for r in range(0, batch, rows):
            for t in range(0, L, tokens):
                yield slice(r, min(r + rows, batch)), t, min(t + tokens, L)

    def window(self, rows: slice, t0: int, t1: int) -> Tensor:
        """Tokens t0 - (W - 1) .. t1: [rows, W - 1 + t1 - t0, channels]."""
        x = self.x[rows, max(t0 - self.reach, 0) : t1].to(self.acc)
        if t0 >= self.reach:
            return x
        if self.before is None:
            return F.pad(x, (0, 0, self.reach - t0, 0))
        return torch.cat([self.before[rows, t0:].to(self.acc), x], 1)

    def counts(self, rows: slice, t0: int, t1: int) -> list[Tensor | None]:
        """For each column of the weight [rows, t1 - t0, 1]: does it meet a token of the same sequence? None: always."""
        if self.seq_idx is None:
            return [None] * (self.reach + 1)
        seq = F.pad(self.seq_idx[rows, :t1], (self.reach, 0), value=-1)[:, t0:, None]
        now = seq[:, self.reach :]
        return [(seq[:, j : j + t1 - t0] == now) & (now >= 0) for j in range(self.reach + 1)]

    def only_last_sequence(self, states: Tensor) -> Tensor:
        """[B, W - 1, channels] at the end of the signal; zeros for tokens of another sequence than the last token's."""
        if self.seq_idx is None or self.seq_idx.shape[1] == 0:
            return states
        last = self.seq_idx[:, -1:]
        kept = F.pad((self.seq_idx == last) & (last >= 0), (self.reach, 0))[:, self.seq_idx.shape[1] :]
        return torch.where(kept[:, :, None], states, 0)


def _empty_like(x: Tensor) -> Tensor:
    """[B, channels, L] with its channels or its tokens last in memory, as x has them."""
    _, channels, L = x.shape
    last = x.stride(1) == 1 and x.stride(2) != 1
    return x.new_empty_strided(x.shape, (channels * L, 1, channels) if last else (channels * L, L, 1))


def _convolve(window: Tensor, weight: Tensor, bias: Tensor | None, counts: list[Tensor | None]) -> Tensor:
    """bias + sum over j of weight[:, j] times the window from token j on: [rows, tokens - (W - 1), channels]."""
    width, channels = len(counts), window.shape[2]
    if counts[0] is None and _library_serves(window):
        kernel = weight[:, None, None].contiguous()
        return F.conv2d(window.mT.unsqueeze(2), kernel, bias, groups=channels).squeeze(2).mT
    tokens = window.shape[1] - (width - 1)
    total = window.new_zeros(window.shape[0], tokens, channels)
    for j, same in enumerate(counts):
        total.addcmul_(_where(same, window[:, j : j + tokens]), weight[:, j])
    return total if bias is None else total.add_(bias)


def _library_serves(t: Tensor) -> bool:
    """Where PyTorch's own depthwise convolution is fast; elsewhere it is slow (float64) or may round (TF32, HF32)."""
    return t.device.type == "cpu" and t.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _where(same: Tensor | None, t: Tensor) -> Tensor:
    return t if same is None else torch.where(same, t, 0)


def _before_activation(window: Tensor, weight: Tensor, bias: Tensor | None, counts: list[Tensor | None]) -> Tensor:
    p = _convolve(window, weight, bias, counts)
    return _where(counts[-1], p)  # the last column meets the token itself: it counts unless it is padding


def forward(x, weight, bias, seq_idx, initial_states, activation) -> tuple[Tensor, Tensor]:
    L, width = x.shape[2], weight.shape[1]
    signal = _Signal(x, width, initial_states, seq_idx)
    weight, bias = weight.to(signal.acc), None if bias is None else bias.to(signal.acc)
    result = _empty_like(x)
    out = result.mT  # [B, L, channels]
    for rows, t0, t1 in signal.blocks():
        p = _before_activation(signal.window(rows, t0, t1), weight, bias, signal.counts(rows, t0, t1))
        if activation is not None and p.dtype == out.dtype:
            torch.ops.aten.silu.out(p, out=out[rows, t0:t1])
        else:
            out[rows, t0:t1] = p if activation is None else F.silu(p, inplace=True)
    final_states = signal.only_last_sequence(signal.window(slice(None), L, L))
    return result, final_states.mT.to(x.dtype, copy=True).contiguous()


def backward(dout, dfinal_states, x, weight, bias, seq_idx, initial_states, activation) -> tuple[Tensor | None, ...]:
    """From the last block of a row to the first: each hands the gradient of the W - 1 tokens before it to the next."""
    width = weight.shape[1]
    reach = width - 1
    signal = _Signal(x, width, initial_states, seq_idx)
    acc = signal.acc
    w, b = weight.to(acc), None if bias is None else bias.to(acc)
    dx, dweight, dbias = _empty_like(x).mT, w.new_zeros(width, w.shape[0]), w.new_zeros(w.shape[0])
    carry = signal.only_last_sequence(dfinal_states.mT.to(acc)).clone()  # [B, W - 1, channels]
    for rows, t0, t1 in reversed(list(signal.blocks())):
        window, counts = signal.window(rows, t0, t1), signal.counts(rows, t0, t1)
        dp = dout.mT[rows, t0:t1].to(acc)
        if activation is not None:
            p = _before_activation(window, w, b, counts)
            dp = torch.ops.aten.silu_backward(dp, p)
        dp = _where(counts[-1], dp)
        dX = _spread(dp, w, counts)  # of the window's tokens
        dX[:, t1 - t0 :] += carry[rows]
        dx[rows, t0:t1] = dX[:, reach:]
        carry[rows] = dX[:, :reach]
        for j, same in enumerate(counts):
            dweight[j] += (_where(same, dp) * window[:, j : j + t1 - t0]).sum((0, 1))
        if bias is not None:
            dbias += dp.sum((0, 1))
    return (
        dx.mT,
        dweight.mT.to(weight.dtype).contiguous(),
        None if bias is None else dbias.to(bias.dtype),
        None if initial_states is None else carry.mT.to(initial_states.dtype).contiguous(),
    )


def _spread(dp: Tensor, weight: Tensor, counts: list[Tensor | None]) -> Tensor:
    """The adjoint of `_convolve`: [rows, tokens, channels] -> [rows, W - 1 + tokens, channels]."""
    reach, tokens = len(counts) - 1, dp.shape[1]
    if counts[0] is None:
        return _convolve(F.pad(dp, (0, 0, reach, reach)), weight.flip(1), None, counts)
    total = dp.new_zeros(dp.shape[0], tokens + reach, dp.shape[2])
    for j, same in enumerate(counts):
        total[:, j : j + tokens].addcmul_(_where(same, dp), weight[:, j])
    return total


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
        put_rows(conv_state, conv_state_indices, new)
        out = out.masked_fill(~used[:, None, None], 0)
    return out.to(x.dtype).contiguous()

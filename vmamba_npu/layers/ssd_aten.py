"""SSD as one expression of plain ATen operators, for graphs that leave PyTorch (ONNX); training uses the operator."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _decay(a: Tensor) -> Tensor:
    """exp of the sum of a over (j, i], 0 for j > i: [..., n] -> [..., n, n]."""
    total = a.cumsum(-1)
    above = torch.ones_like(total.unsqueeze(-1) + total.unsqueeze(-2)).triu(1) > 0
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()  # masked before exp


def ssd_aten(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor, chunk_size: int) -> Tensor:
    """The chunked form of SSD from zero states, with softplus of dt + dt_bias; no loop, so that L may be dynamic.

    Args:
        x: [B, L, H, P]; dt: [B, L, H]; A: [H], float32 or float64, the dtype of all that is computed here.
        B, C: [B, L, G, N]; dt_bias: [H].
        chunk_size: tokens of a block.

    Returns:
        [B, L, H, P] in the dtype of x.
    """
    seqlen, nheads, ngroups = x.shape[1], x.shape[2], B.shape[2]
    steps = F.softplus(dt.to(A.dtype) + dt_bias.to(A.dtype))  # [B, L, H]
    tail = (chunk_size - seqlen % chunk_size) % chunk_size  # padded with steps of 0: they neither decay nor add
    a = _chunks(steps * A, tail, chunk_size).permute(0, 3, 1, 2)  # [B, H, c, Q]
    v = _chunks(x.to(A.dtype) * steps.unsqueeze(-1), tail, chunk_size).permute(0, 3, 1, 2, 4)  # [B, H, c, Q, P]
    B = _chunks(B.to(A.dtype), tail, chunk_size).permute(0, 3, 1, 2, 4)  # [B, G, c, Q, N]
    C = _chunks(C.to(A.dtype), tail, chunk_size).permute(0, 3, 1, 2, 4)
    scores = (C @ B.transpose(-1, -2)).repeat_interleave(nheads // ngroups, 1)  # [B, H, c, Q, Q]
    y = (scores * _decay(a)) @ v

    total = a.cumsum(-1)
    B, C = B.repeat_interleave(nheads // ngroups, 1), C.repeat_interleave(nheads // ngroups, 1)
    last = total[..., -1:]
    states = (v * (last - total).exp().unsqueeze(-1)).transpose(-1, -2) @ B  # [B, H, c, P, N]: added by each chunk
    # state at the start of chunk i: sum over chunks j < i of states[j], decayed over the chunks between
    between = F.pad(_decay(last.squeeze(-1)), (0, 0, 1, 0))[:, :, :-1]  # [B, H, c, c]
    start = (between @ states.flatten(3)).unflatten(3, (x.shape[3], B.shape[4]))
    y = y + (C @ start.transpose(-1, -2)) * total.exp().unsqueeze(-1)
    return y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :seqlen].to(x.dtype)


def _chunks(t: Tensor, tail: int, chunk_size: int) -> Tensor:
    """[B, L, h, ...] -> [B, c, Q, h, ...], with `tail` zeros after the last token."""
    return F.pad(t, [0, 0] * (t.dim() - 2) + [0, tail]).unflatten(1, (-1, chunk_size))

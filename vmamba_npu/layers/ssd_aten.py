"""SSD as one expression of plain ATen operators, for graphs that leave PyTorch (ONNX); training uses the operator."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _decay(a: Tensor) -> Tensor:
    """exp of the sum of a over (j, i], 0 for j > i: [m, n] -> [m, n, n]."""
    total = a.cumsum(-1)
    gap = total.unsqueeze(-1) - total.unsqueeze(-2)
    return gap.masked_fill(torch.ones_like(gap).triu(1) > 0, float("-inf")).exp()  # masked before exp


def _blocks(t: Tensor, chunks: int, chunk_size: int, repeats: int) -> Tensor:
    """[B, L, h, ...] -> [B * h * repeats * chunks, chunk_size, ...], with zeros after the last token."""
    tail = chunks * chunk_size - t.shape[1]
    t = F.pad(t, [0, 0] * (t.dim() - 2) + [0, tail]).unflatten(1, (chunks, chunk_size))
    return t.movedim(3, 1).repeat_interleave(repeats, 1).flatten(0, 2)


def ssd_aten(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor, chunk_size: int) -> Tensor:
    """The chunked form of SSD from zero states, with softplus of dt + dt_bias.

    No loop, and no axis whose size may be 1 in the exported graph's example takes part in broadcasting: an exporter
    would keep that 1, and the graph would fail on larger maps.

    Args:
        x: [B, L, H, P]; dt: [B, L, H]; A: [H], float32 or float64, the dtype of all that is computed here.
        B, C: [B, L, G, N]; dt_bias: [H].
        chunk_size: tokens of a block.

    Returns:
        [B, L, H, P] in the dtype of x.
    """
    batch, seqlen, nheads, headdim = x.shape
    chunks = (seqlen + chunk_size - 1) // chunk_size
    repeats = nheads // B.shape[2]
    steps = F.softplus(dt.to(A.dtype) + dt_bias.to(A.dtype))  # [B, L, H]; 0 in the tail, which neither decays nor adds
    a = _blocks(steps * A, chunks, chunk_size, 1)  # [BHc, Q]
    v = _blocks(x.to(A.dtype) * steps.unsqueeze(-1), chunks, chunk_size, 1)  # [BHc, Q, P]
    B = _blocks(B.to(A.dtype), chunks, chunk_size, repeats)  # [BHc, Q, N]
    C = _blocks(C.to(A.dtype), chunks, chunk_size, repeats)
    y = torch.bmm(torch.bmm(C, B.mT) * _decay(a), v)  # inside of each chunk

    total = a.cumsum(-1)
    last = total[:, -1:]
    states = torch.bmm((v * (last - total).exp().unsqueeze(-1)).mT, B)  # [BHc, P, N]: added by each chunk
    # state before chunk i: the sum over chunks j < i of states[j], decayed over the chunks between; row 0 is no chunk
    between = _decay(F.pad(last.view(batch * nheads, chunks), [1, 0]))[:, :-1, 1:]  # [BH, c, c]
    before = torch.bmm(between, states.view(batch * nheads, chunks, -1)).view(-1, headdim, B.shape[2])
    y = y + torch.bmm(C, before.mT) * total.exp().unsqueeze(-1)
    y = y.view(batch, nheads, chunks * chunk_size, headdim)[:, :, :seqlen]
    return y.transpose(1, 2).to(x.dtype)

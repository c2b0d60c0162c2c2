"""Forward of SSD in chunks (docs/ssd.md): what happens inside a chunk, and what its starting state brings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ....backends.tensors import at_least_float32
from .blocks import Block
from .chunks import Decays, Workspace, from_group_states, gather, initial_group_states, plan, scatter, steps, to_skip


def forward(
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max
) -> tuple[Tensor, Tensor]:
    acc = at_least_float32(x.dtype)
    p = plan(x, seq_idx, cu_seqlens)
    initial = initial_group_states(x, B, initial_states, cu_seqlens)
    final = initial.clone()
    decays = Decays(steps(dt, dt_bias, dt_softplus, dt_min, dt_max, acc), A, B.shape[2], p)
    skip = to_skip(D, B.shape[2], acc)
    xs, Bs, Cs, zs = (t if t is None else gather(t, p.index) for t in (x, B, C, z))
    y = torch.empty(xs.shape, dtype=x.dtype, device=x.device)
    ws = Workspace(x.device, acc)
    for rows, spans in p.blocks(x.shape[2], x.device):
        states = torch.zeros(rows.stop - rows.start, *initial.shape[1:], dtype=acc, device=x.device)
        for c0, c1 in spans:
            block = Block(xs, Bs, Cs, decays, p, rows, c0, c1, ws)
            scores, decay = block.inside()
            weighted = block.by_group("weighted", block.x, block.of(decays.step * decays.out))
            carried = block.per_chunk(ws("carried", *weighted.shape))
            for i, state in block.walk(states, weighted, initial, final):
                torch.bmm(block.per_chunk(block.C)[i], state, out=carried[i])
            o = output(block, decay.mul_(scores), carried.flatten(0, 1), skip)
            if zs is not None:
                o.mul_(F.silu(block.tokens(zs).to(acc)))
            block.store(y, o)
    return scatter(y, p.index, x), from_group_states(final, x.shape[3])


def output(block: Block, mixing: Tensor, carried: Tensor, skip: Tensor | None) -> Tensor:
    """Output before the gate, [chunks, rows, G, h, size, P]; mixing is [b, h, size, size]."""
    stepped = torch.mul(block.x, block.of(block.decays.step), out=block.empty_by_head("stepped"))
    o = block.empty_by_head("o")
    torch.bmm(mixing.flatten(0, 1), stepped.flatten(0, 3), out=o.flatten(0, 3))
    o.addcmul_(block.heads_of(carried), block.of(block.decays.into))
    return o if skip is None else o.addcmul_(block.x, skip)

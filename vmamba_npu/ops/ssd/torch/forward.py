"""Forward of SSD in chunks (docs/ssd.md): what happens inside a chunk, and what its starting state brings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ....backends.tensors import at_least_float32
from .blocks import Block
from .chunks import Decays, from_group_states, gather, initial_group_states, plan, scatter, steps, to_skip, workspace


def forward(
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max
) -> tuple[Tensor, Tensor]:
    acc = at_least_float32(x.dtype)
    p = plan(x, seq_idx, cu_seqlens)
    initial = initial_group_states(x, B, initial_states, cu_seqlens)
    final = initial.clone()
    decays = Decays(steps(dt, dt_bias, dt_softplus, dt_min, dt_max, acc), A, B.shape[2], x.shape[3], p)
    skip = to_skip(D, B.shape[2], acc)
    xs, Bs, Cs = (gather(t, p.index) for t in (x, B, C))
    zs = None if z is None else gather(z, p.index)
    y = torch.empty(xs.shape, dtype=x.dtype, device=x.device)
    with workspace(x.device, acc) as ws:
        for rows, spans in p.blocks(x.shape[2], x.device):
            state = torch.zeros(rows.stop - rows.start, *initial.shape[1:], dtype=acc, device=x.device)
            for c0, c1 in spans:
                block = Block(xs, Bs, Cs, decays, p, rows, c0, c1, ws)
                states, state = block.walk(chunk_adds(block, weighted_values(block, "values")), state, initial, final)
                scores, decay = block.inside()
                o = output(block, decay.mul_(scores), carried(block, states), skip, block.target("o", y))
                if zs is not None:
                    o.mul_(F.silu(block.tokens(zs).to(acc)))
                block.store(y, o)
    return scatter(y, p.index, x), from_group_states(final, x.shape[3])


def weighted_values(block: Block, buffer: str) -> Tensor:
    """x times what of its step is left at the end of the chunk, [b, size, h * P]."""
    return block.by_group(buffer, block.x, block.of(block.decays.weight))


def chunk_adds(block: Block, weighted: Tensor) -> Tensor:
    """What each chunk adds to the state [b, N, h * P]."""
    return torch.bmm(block.B.mT, weighted, out=block.ws("columns", block.b, block.N, weighted.shape[2]))


def carried(block: Block, states: Tensor) -> Tensor:
    """C times the state before the chunk, [b, size, h * P]."""
    return torch.bmm(block.C, states, out=block.ws("columns", block.b, block.size, states.shape[2]))


def output(block: Block, mixing: Tensor, carried: Tensor, skip: Tensor | None, out: Tensor) -> Tensor:
    """Output before the gate, [chunks, rows, G, h, size, P], into `out`; mixing is [b, h, size, size]."""
    stepped = torch.mul(block.x, block.of(block.decays.step), out=block.empty_by_head("values"))
    inner = block.empty_by_head("inner")
    torch.bmm(mixing.flatten(0, 1), stepped.flatten(0, 3), out=inner.flatten(0, 3))
    torch.addcmul(inner, block.heads_of(carried), block.of(block.decays.into), out=out)
    return out if skip is None else out.addcmul_(block.x, skip)

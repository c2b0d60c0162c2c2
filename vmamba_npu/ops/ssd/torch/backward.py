"""Backward of SSD in chunks (docs/ssd.md): blocks from the last to the first, each with its states computed again."""

import torch
from torch import Tensor

from ....backends.tensors import at_least_float32
from .blocks import Block
from .chunks import (
    Decays,
    Plan,
    Workspace,
    from_group_states,
    gather,
    initial_group_states,
    plan,
    scatter,
    step_slope,
    steps,
    to_group_states,
    to_skip,
    unchunk,
    workspace,
)
from .forward import carried, chunk_adds, output, weighted_values

# Elements of the states of all chunks that are kept rather than computed twice.
KEPT_STATES = 1 << 22


class Gradients:
    """What the blocks fill in: per token in the layout of the plan, and sums over tokens."""

    def __init__(self, x: Tensor, B: Tensor, z: Tensor | None, decays: Decays, skip: Tensor | None, initial: Tensor):
        self.x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.z = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        self.B = torch.empty(B.shape, dtype=B.dtype, device=B.device)
        self.C = torch.empty_like(self.B)
        self.D = None if skip is None else skip.new_zeros(*skip.shape[:2], x.shape[3])
        self.step = torch.empty_like(decays.step)  # by the steps where they scale x, [chunks, rows, G, h, size]
        self.log_decay = torch.empty_like(decays.step)  # by step * A
        self.initial = torch.zeros_like(initial)


def backward(
    dy, dfinal_states,
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    acc = at_least_float32(x.dtype)
    groups = B.shape[2]
    p = plan(x, seq_idx, cu_seqlens)
    initial = initial_group_states(x, B, initial_states, cu_seqlens)
    d_final = to_group_states(dfinal_states, groups, acc)
    step_arguments = (dt, dt_bias, dt_softplus, dt_min, dt_max, acc)
    decays = Decays(steps(*step_arguments), A, groups, x.shape[3], p)
    skip = to_skip(D, groups, acc)
    xs, Bs, Cs, dys = (gather(t, p.index) for t in (x, B, C, dy))
    zs = None if z is None else gather(z, p.index)
    grads = Gradients(xs, Bs, zs, decays, skip, initial)
    with workspace(x.device, acc) as ws:
        for rows, spans in p.blocks(x.shape[2], x.device):
            walked = _walk_rows(xs, Bs, Cs, decays, p, rows, spans, initial, ws)
            d_state = torch.zeros(rows.stop - rows.start, *initial.shape[1:], dtype=acc, device=x.device)
            for (c0, c1), (state, states) in reversed(list(zip(spans, walked, strict=True))):
                block = Block(xs, Bs, Cs, decays, p, rows, c0, c1, ws)
                do = _before_gate(block, dys, zs)
                weighted = weighted_values(block, "weighted")
                if states is None:
                    states, _ = block.walk(chunk_adds(block, weighted), state, initial, None)
                weighted_do = block.by_group("weighted_do", do, block.of(decays.into))
                d_adds = torch.bmm(block.C.mT, weighted_do, out=ws("columns", *states.shape))
                d_states, d_state = block.walk_back(d_adds, d_state, d_final, grads.initial)
                through_state = None if block.heads == 1 and zs is None else carried(block, states)
                mixing, d_stepped = _inside(block, do, grads)
                if zs is not None and grads.z is not None and through_state is not None:
                    o = output(block, mixing, through_state, skip, block.empty_by_head("o"))
                    block.store(grads.z, _gate_gradient(block.tokens(zs).to(acc), block.tokens(dys), o))
                _through_states(
                    block, do, weighted, weighted_do, through_state, states, d_states, d_stepped, skip, grads
                )
    untouched = p.untouched(len(initial) - 1)
    grads.initial[untouched] = d_final[untouched]
    d_raw, d_A = _finish_steps(grads, decays, p, A, step_arguments)
    return (
        scatter(grads.x, p.index, x),
        d_raw.to(dt.dtype),
        d_A.to(A.dtype),
        scatter(grads.B, p.index, x),
        scatter(grads.C, p.index, x),
        None if D is None or grads.D is None else _skip_gradient(grads.D, D),
        None if grads.z is None else scatter(grads.z, p.index, x),
        None if dt_bias is None else d_raw.sum((0, 1)).to(dt_bias.dtype),
        None if initial_states is None else from_group_states(grads.initial, x.shape[3]).to(initial_states.dtype),
    )


def _walk_rows(x, B, C, decays: Decays, p: Plan, rows: slice, spans, initial: Tensor, ws: Workspace):
    """For each block of these rows the state at its start [rows, G, N, h * P] and those of its chunks [b, N, h * P], or
    None for these if they are too many to keep: then they are computed again when the block's turn comes."""
    state = torch.zeros(rows.stop - rows.start, *initial.shape[1:], dtype=initial.dtype, device=x.device)
    keep = p.count * state.numel() <= KEPT_STATES
    walked = []
    for number, (c0, c1) in enumerate(spans):
        before, states = state.clone(), None
        if c1 < p.count:  # the last block walks itself
            block = Block(x, B, C, decays, p, rows, c0, c1, ws)
            adds = chunk_adds(block, weighted_values(block, "values"))
            states, state = block.walk(adds, before, initial, None, f"states{number if keep else ''}")
        walked.append((before, states if keep else None))
    return walked


def _skip_gradient(d_skip: Tensor, D: Tensor) -> Tensor:
    """[G, h, P] -> the shape of D, [H] or [H, P]."""
    return (d_skip if D.ndim == 2 else d_skip.sum(-1)).reshape(D.shape).to(D.dtype)


def _before_gate(block: Block, dy: Tensor, z: Tensor | None) -> Tensor:
    """Gradient of the output before the gate, [chunks, rows, G, h, size, P]."""
    do = block.empty_by_head("do").copy_(block.tokens(dy))
    if z is None:
        return do
    gate = block.tokens(z).to(do.dtype)
    return do.mul_(gate.sigmoid().mul_(gate))


def _gate_gradient(z: Tensor, dy: Tensor, o: Tensor) -> Tensor:
    sigmoid = z.sigmoid()
    return o.mul_(dy).mul_(sigmoid * (1 + z * (1 - sigmoid)))


def _inside(block: Block, do: Tensor, grads: Gradients) -> tuple[Tensor, Tensor]:
    """What tokens of one chunk do to each other; starts dB, dC and the decays' gradient of this block.

    Returns the mixing matrix C B^T * decay [b, h, size, size] and the gradient of step * x [b * h, size, P].
    """
    ws, size, here = block.ws, block.size, (slice(block.c0, block.c1), block.rows)
    scores, mixing = block.inside()
    stepped = torch.mul(block.x, block.of(block.decays.step), out=block.empty_by_head("values")).flatten(0, 3)
    do = do.flatten(0, 3)
    d_mixing = torch.bmm(do, stepped.mT, out=ws("d_mixing", do.shape[0], size, size)).view(mixing.shape).mul_(mixing)
    if block.heads == 1:  # above the diagonal `scores` are 0, so `through` below does not miss what is dropped here
        d_scores = d_mixing[:, 0].tril_()
    else:
        d_scores = torch.sum(d_mixing, 1, out=ws("d_scores", block.b, size, size)).tril_()
    torch.bmm(d_scores, block.B, out=ws("dC", *block.C.shape))
    torch.bmm(d_scores.mT, block.C, out=ws("dB", *block.B.shape))
    mixing.mul_(scores)
    d_stepped = torch.bmm(mixing.flatten(0, 1).mT, do, out=ws("d_stepped", *do.shape))
    through = d_mixing.mul_(scores)  # [l, j]: what passes from token j to token l
    grads.log_decay[here] = (through.sum(-1) - through.sum(-2)).view(*block.grid, block.heads, size)
    return mixing, d_stepped


def _through_states(block: Block, do, weighted, weighted_do, carried, states, d_states, d_stepped, skip, grads) -> None:
    """What comes through the state before the chunk and goes out through the one after it; completes the block."""
    ws, here = block.ws, (slice(block.c0, block.c1), block.rows)
    dC, dB = ws("dC", *block.C.shape), ws("dB", *block.B.shape)
    if block.heads == 1:  # these gradients are of one head each, so their products with C and B are the sums wanted
        through_C = torch.bmm(weighted_do, states.mT, out=ws("through_C", *block.C.shape))
        through_B = torch.bmm(weighted, d_states.mT, out=ws("through_B", *block.B.shape))
        dC.add_(through_C)
        dB.add_(through_B)
        from_state = through_C.mul_(block.C).sum(-1).view(*block.grid, 1, block.size)
        to_state = through_B.mul_(block.B).sum(-1).view(*block.grid, 1, block.size)
    else:
        dC.baddbmm_(weighted_do, states.mT)
        dB.baddbmm_(weighted, d_states.mT)
        from_state = block.heads_of(carried.mul_(weighted_do)).sum(-1)
    block.store(grads.C, dC.unflatten(0, block.grid))
    block.store(grads.B, dB.unflatten(0, block.grid))
    d_weighted = torch.bmm(block.B, d_states, out=ws("columns", *weighted.shape))
    d_stepped = d_stepped.view(do.shape).addcmul_(block.heads_of(d_weighted), block.of(block.decays.out))
    if block.heads > 1:
        to_state = block.heads_of(d_weighted.mul_(weighted)).sum(-1)
    kept = states.mul_(d_states).view(*block.grid, block.N, block.heads, block.P).sum((3, 5))
    kept = kept * block.decays.into[here][..., -1]
    # A decay at token u acts on all that passes over the border before u: tokens j < u <= l, and the states.
    over = grads.log_decay[here] + from_state - to_state
    grads.log_decay[here] = over.flip(-1).cumsum(-1).flip(-1) + (to_state.sum(-1) + kept)[..., None]
    grads.step[here] = torch.mul(d_stepped, block.x, out=block.empty_by_head("values")).sum(-1)
    if grads.D is not None:
        grads.D += torch.mul(do, block.x, out=block.empty_by_head("values")).sum((0, 1, 4))
    dx = torch.mul(d_stepped, block.of(block.decays.step), out=block.target("values", grads.x))
    block.store(grads.x, dx if skip is None else dx.addcmul_(do, skip))


def _finish_steps(grads: Gradients, decays: Decays, p: Plan, A: Tensor, step_arguments: tuple) -> tuple[Tensor, Tensor]:
    """Gradients of the raw steps [B, L, H] and of A [H]."""
    dt = step_arguments[0]
    d_step, d_log_decay, step = (unchunk(t, p, dt) for t in (grads.step, grads.log_decay, decays.step))
    d_A = (step * d_log_decay).sum((0, 1))
    return (d_step + A.to(step.dtype) * d_log_decay) * step_slope(*step_arguments), d_A

"""SSD as torch.library operators: who implements it, its schema, shapes, and one gradient for every backend."""

import torch
from torch import Tensor

from ...backends import Implementation, choose, probes, register, resolve
from ...backends.tensors import FLOATS, at_least_float32
from .checks import check_borders, check_ssd

OP = "ssd"
HERE = __package__

register(
    Implementation(OP, "reference", f"{HERE}.reference", None, FLOATS, probes.always),
    Implementation(OP, "torch", f"{HERE}.torch", None, FLOATS, probes.always),
)


@torch.library.custom_op("vmamba_npu::ssd_fwd", mutates_args=())
def ssd_fwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    call = (x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max)
    check_ssd(*call)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        check_borders(cu_seqlens, x.shape[1])
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        return resolve(OP, backend, *call).forward(*call)


@ssd_fwd.register_fake
def _(
    x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max, backend
):
    check_ssd(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max
    )
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final_states = x.new_empty(sequences, *x.shape[2:], B.shape[3], dtype=at_least_float32(x.dtype))
    return x.new_empty(x.shape), final_states


@torch.library.custom_op("vmamba_npu::ssd_bwd", mutates_args=())
def ssd_bwd(
    dy: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = (x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_min, dt_max)
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        gradients = resolve(OP, backend, *call).backward(dy, dfinal_states, *call)
    return tuple(x.new_empty(0) if g is None else g.contiguous() for g in gradients)  # type: ignore[return-value]


@ssd_bwd.register_fake
def _(dy, dfinal_states, x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, *options):
    return tuple(
        x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, dt, A, B, C, D, z, dt_bias, initial_states)
    )


# What the gradient needs is the inputs alone: a backend recomputes its chunk states in its own blocks, so saved tensors
# are the same for all backends and no backend is held to write states to memory in the forward.
def _setup_context(ctx, inputs, output):
    *call, backend = inputs
    tensors, options = (*call[:5], *call[6:12]), (call[5], *call[12:])
    ctx.save_for_backward(*tensors)
    ctx.options = options
    ctx.backend = choose(OP, backend, *call)  # the backward may run in another thread, outside of `use_backend`


def _backward(ctx, dy, dfinal_states):
    x, dt, A, B, C, *optional = ctx.saved_tensors
    chunk_size, *options = ctx.options
    dx, ddt, d_A, d_B, d_C, *d_optional = ssd_bwd(
        dy, dfinal_states, x, dt, A, B, C, chunk_size, *optional, *options, ctx.backend
    )
    d_optional = [None if t is None else d for t, d in zip(optional, d_optional, strict=False)]
    return dx, ddt, d_A, d_B, d_C, None, *d_optional, None, None, None, None, None, None


ssd_fwd.register_autograd(_backward, setup_context=_setup_context)

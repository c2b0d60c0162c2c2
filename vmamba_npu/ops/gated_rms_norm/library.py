"""The gated RMS norm as torch.library operators: who implements it, its schema, shapes, and one gradient for all."""

import torch
from torch import Tensor

from ...backends import Implementation, choose, probes, register, resolve
from ...backends.tensors import FLOATS
from .checks import check_gated_rms_norm

OP = "gated_rms_norm"
HERE = __package__

register(
    Implementation(OP, "reference", f"{HERE}.reference", None, FLOATS, probes.always),
    Implementation(OP, "torch", f"{HERE}.torch", None, FLOATS, probes.always),
)


@torch.library.custom_op("vmamba_npu::gated_rms_norm_fwd", mutates_args=())
def gated_rms_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    backend: str,
) -> Tensor:
    call = (x, weight, bias, z, eps, group_size, norm_before_gate)
    check_gated_rms_norm(*call)
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        return resolve(OP, backend, *call).forward(*call)


@gated_rms_norm_fwd.register_fake
def _(x, weight, bias, z, eps, group_size, norm_before_gate, backend):
    check_gated_rms_norm(x, weight, bias, z, eps, group_size, norm_before_gate)
    return x.new_empty(x.shape)


@torch.library.custom_op("vmamba_npu::gated_rms_norm_bwd", mutates_args=())
def gated_rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = (x, weight, bias, z, eps, group_size, norm_before_gate)
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        gradients = resolve(OP, backend, *call).backward(dy, *call)
    return tuple(x.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


@gated_rms_norm_bwd.register_fake
def _(dy, x, weight, bias, z, *options):
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, weight, bias, z))


def _setup_context(ctx, inputs, output):
    *call, backend = inputs
    ctx.save_for_backward(*call[:4])
    ctx.options = call[4:]
    ctx.backend = choose(OP, backend, *call)  # the backward may run in another thread, outside of `use_backend`


def _backward(ctx, dy):
    tensors = ctx.saved_tensors
    gradients = gated_rms_norm_bwd(dy, *tensors, *ctx.options, ctx.backend)
    return *(None if t is None else d for t, d in zip(tensors, gradients, strict=True)), None, None, None, None


gated_rms_norm_fwd.register_autograd(_backward, setup_context=_setup_context)

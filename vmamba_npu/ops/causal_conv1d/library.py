"""The causal convolution as torch.library operators: who implements them, schemas, shapes, and one gradient for all."""

import torch
from torch import Tensor

from ...backends import Implementation, choose, probes, register, resolve
from ...backends.checks import check_rows
from ...backends.tensors import FLOATS
from .checks import check_causal_conv1d, check_causal_conv1d_update

OP = "causal_conv1d"
UPDATE = "causal_conv1d_update"
HERE = __package__

register(
    Implementation(OP, "reference", f"{HERE}.reference", None, FLOATS, probes.always),
    Implementation(OP, "torch", f"{HERE}.torch", None, FLOATS, probes.always),
    Implementation(UPDATE, "reference", f"{HERE}.reference", None, FLOATS, probes.always),
    Implementation(UPDATE, "torch", f"{HERE}.torch", None, FLOATS, probes.always),
)


def _is_channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) != 1


def _empty_like(x: Tensor) -> Tensor:
    """[B, channels, L] in the layout of x; not a view, as PyTorch forbids to change views among results in place."""
    _, channels, L = x.shape
    return x.new_empty_strided(x.shape, (channels * L, 1, channels) if _is_channels_last(x) else (channels * L, L, 1))


def _in_layout_of(x: Tensor, t: Tensor) -> Tensor:
    """t [B, channels, L] as `_empty_like(x)` is laid out, itself if it is so already."""
    dense = (t.mT if _is_channels_last(x) else t).is_contiguous()
    return t if dense and not t._is_view() else _empty_like(x).copy_(t)


@torch.library.custom_op("vmamba_npu::causal_conv1d_fwd", mutates_args=())
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    activation: str | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    call = (x, weight, bias, seq_idx, initial_states, activation)
    check_causal_conv1d(*call)
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        out, final_states = resolve(OP, backend, *call).forward(*call)
    return _in_layout_of(x, out), final_states


@causal_conv1d_fwd.register_fake
def _(x, weight, bias, seq_idx, initial_states, activation, backend):
    check_causal_conv1d(x, weight, bias, seq_idx, initial_states, activation)
    return _empty_like(x), x.new_empty(*x.shape[:2], weight.shape[1] - 1)


@torch.library.custom_op("vmamba_npu::causal_conv1d_bwd", mutates_args=())
def causal_conv1d_bwd(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    activation: str | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = (x, weight, bias, seq_idx, initial_states, activation)
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        dx, dweight, dbias, dinitial = resolve(OP, backend, *call).backward(dout, dfinal_states, *call)
    dbias, dinitial = (x.new_empty(0) if g is None else g for g in (dbias, dinitial))
    return _in_layout_of(x, dx), dweight, dbias, dinitial


@causal_conv1d_bwd.register_fake
def _(dout, dfinal_states, x, weight, bias, seq_idx, initial_states, *options):
    others = (weight, bias, initial_states)
    return _empty_like(x), *(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in others)


def _setup_context(ctx, inputs, output):
    *call, backend = inputs
    ctx.save_for_backward(*call[:5])
    ctx.activation = call[5]
    ctx.backend = choose(OP, backend, *call)  # the backward may run in another thread, outside of `use_backend`


def _backward(ctx, dout, dfinal_states):
    x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
    dx, dweight, dbias, dinitial = causal_conv1d_bwd(
        dout, dfinal_states, x, weight, bias, seq_idx, initial_states, ctx.activation, ctx.backend
    )
    dbias = None if bias is None else dbias
    return dx, dweight, dbias, None, None if initial_states is None else dinitial, None, None


causal_conv1d_fwd.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("vmamba_npu::causal_conv1d_update", mutates_args=("conv_state",))
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    backend: str,
) -> Tensor:
    check_causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    check_rows("conv_state_indices", conv_state_indices, conv_state.shape[0])
    call = (conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    tokens = x if x.ndim == 3 else x.unsqueeze(-1)  # backends see a token axis always
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        out = resolve(UPDATE, backend, tokens, *call).update(tokens, *call)
    out = out.reshape(x.shape)
    return out.clone() if out._is_view() else out  # no view, as in `_empty_like`


@causal_conv1d_update.register_fake
def _(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices, backend):
    check_causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    return x.new_empty(x.shape)

"""The one-token state update as a torch.library operator that declares the state that it mutates."""

import torch
from torch import Tensor

from ...backends import Implementation, probes, register, resolve
from ...backends.checks import check_rows
from ...backends.tensors import FLOATS
from .checks import check_selective_state_update

OP = "selective_state_update"
HERE = __package__

register(
    Implementation(OP, "reference", f"{HERE}.reference", None, FLOATS, probes.always),
    Implementation(OP, "torch", f"{HERE}.torch", None, FLOATS, probes.always),
)


@torch.library.custom_op("vmamba_npu::selective_state_update", mutates_args=("state",))
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    dt_min: float,
    dt_max: float,
    backend: str,
) -> Tensor:
    options = (dt_softplus, state_batch_indices, dt_min, dt_max)
    check_selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, *options)
    check_rows("state_batch_indices", state_batch_indices, state.shape[0])
    has_heads = state.ndim == 4
    if not has_heads:  # backends see one head and one group
        state, x, dt, B, C = (t.unsqueeze(1) for t in (state, x, dt, B, C))
        A = A.unsqueeze(0)
        D, dt_bias = (None if t is None else t.unsqueeze(0) for t in (D, dt_bias))
        z = None if z is None else z.unsqueeze(1)
    call = (state, x, dt, A, B, C, D, z, dt_bias, *options)
    with torch.autocast(x.device.type, enabled=False):  # a backend computes in the dtypes that the operator promises
        y = resolve(OP, backend, *call).update(*call)
    y = y if has_heads else y.squeeze(1)
    return y.clone() if y._is_view() else y  # callers may change the result in place, which PyTorch forbids for views


@selective_state_update.register_fake
def _(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_min, dt_max, backend):
    check_selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_min, dt_max)
    return x.new_empty(x.shape)

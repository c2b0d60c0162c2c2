"""mamba_ssm.ops.triton.layernorm_gated: norms with a SiLU gate, as modules and as functions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.norm import LayerNorm, RMSNorm
from ..ops import gated_rms_norm

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rms_norm_ref", "rmsnorm_fn"]


def _check_group(x: Tensor, group_size: int | None) -> int:
    size = x.shape[-1] if group_size is None else group_size
    if size < 1 or x.shape[-1] % size:
        raise ValueError(f"group_size: expected a divisor of the {x.shape[-1]} channels of x, got {group_size}")
    return size


def _plain(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, acc) -> Tensor:
    """The norm in plain PyTorch, computed in `acc`."""
    u = x.to(acc)
    gate = None if z is None else F.silu(z.to(acc))
    if gate is not None and not norm_before_gate:
        u = u * gate
    u = u.unflatten(-1, (-1, _check_group(x, group_size)))  # [..., groups, group_size]
    if not is_rms_norm:
        u = u - u.mean(-1, keepdim=True)
    v = (u * (u.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight.to(acc)
    v = v if bias is None else v + bias.to(acc)
    return (v if gate is None or not norm_before_gate else v * gate).to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`vmamba_npu.ops.gated_rms_norm`, with mamba_ssm's default eps (1e-6; the module's is 1e-5)."""
    return gated_rms_norm(x, weight, bias, z, eps, group_size, norm_before_gate)


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Layer norm over groups of channels with the gate of `rmsnorm_fn`, or that one; plain PyTorch otherwise."""
    if is_rms_norm:
        return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)
    acc = torch.promote_types(x.dtype, torch.float32)
    return _plain(x, weight, bias, z, eps, group_size, norm_before_gate, False, acc)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """`rmsnorm_fn` in plain PyTorch, computed in the dtype of x unless `upcast` (float32 at least)."""
    acc = torch.promote_types(x.dtype, torch.float32) if upcast else x.dtype
    return _plain(x, weight, bias, z, eps, group_size, norm_before_gate, True, acc)

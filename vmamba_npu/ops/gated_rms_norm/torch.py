"""The gated RMS norm over all groups at once, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32


def _grouped(x: Tensor, group_size: int | None, acc: torch.dtype) -> Tensor:
    """[..., D] -> [rows, groups, group size]."""
    size = x.shape[-1] if group_size is None else group_size
    return x.reshape(-1, x.shape[-1] // size, size).to(acc)


def forward(x, weight, bias, z, eps, group_size, norm_before_gate) -> Tensor:
    acc = at_least_float32(x.dtype)
    gate = None if z is None else F.silu(z.to(acc))
    u = x.to(acc) if norm_before_gate or gate is None else x * gate
    size = x.shape[-1] if group_size is None else group_size
    y = F.rms_norm(u.unflatten(-1, (-1, size)), (size,), eps=eps).flatten(-2) * weight.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return (y * gate if norm_before_gate and gate is not None else y).to(x.dtype).contiguous()


def backward(dy, x, weight, bias, z, eps, group_size, norm_before_gate) -> tuple[Tensor | None, ...]:
    acc = at_least_float32(x.dtype)
    xs, dys = _grouped(x, group_size, acc), _grouped(dy, group_size, acc)
    w = weight.to(acc).view(xs.shape[1:])
    if z is None:
        du, dv, normed = _norm_gradient(xs, dys, w, eps)
        dx, dz = du, None
    else:
        zs = _grouped(z, group_size, acc)
        sigmoid = zs.sigmoid()
        gate, slope = zs * sigmoid, sigmoid * (1 + zs * (1 - sigmoid))
        if norm_before_gate:
            du, dv, normed = _norm_gradient(xs, dys * gate, w, eps)
            v = normed * w if bias is None else normed * w + bias.to(acc).view(xs.shape[1:])
            dx, dz = du, dys * v * slope
        else:
            du, dv, normed = _norm_gradient(xs * gate, dys, w, eps)
            dx, dz = du * gate, du * xs * slope
    return (
        dx.view(x.shape).to(x.dtype),
        (dv * normed).sum(0).flatten().to(weight.dtype),
        None if bias is None else dv.sum(0).flatten().to(bias.dtype),
        None if z is None or dz is None else dz.view(x.shape).to(z.dtype),
    )


def _norm_gradient(u: Tensor, dv: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of u, dv, normed u) of v = normed u * weight, [rows, groups, group size] each."""
    r = (u.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, g = u * r, dv * weight
    return r * (g - normed * (g * normed).mean(-1, keepdim=True)), dv, normed

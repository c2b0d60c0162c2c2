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
    xs, dys, zs = (None if t is None else _grouped(t, group_size, acc) for t in (x, dy, z))
    w = weight.to(acc).view(xs.shape[1:])
    sigmoid = None if zs is None else zs.sigmoid()
    gate = None if zs is None else zs * sigmoid
    gated_after = norm_before_gate and gate is not None
    gated_before = not norm_before_gate and gate is not None
    u = xs * gate if gated_before else xs
    dv = dys * gate if gated_after else dys
    r = (u.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = u * r
    g = dv * w
    du = r * (g - normed * (g * normed).mean(-1, keepdim=True))
    dz = None
    if gate is not None:
        slope = sigmoid * (1 + zs * (1 - sigmoid))
        v = normed * w if bias is None else normed * w + bias.to(acc).view(xs.shape[1:])
        dz = ((dys * v if gated_after else du * xs) * slope).view(x.shape).to(z.dtype)
    return (
        (du * gate if gated_before else du).view(x.shape).to(x.dtype),
        (dv * normed).sum(0).flatten().to(weight.dtype),
        None if bias is None else dv.sum(0).flatten().to(bias.dtype),
        dz,
    )

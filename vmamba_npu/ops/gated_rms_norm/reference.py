"""The gated RMS norm by its definition, group after group, in any float dtype (float64 stays float64)."""

import torch
from torch import Tensor

from ...backends.tensors import at_least_float32


def _wide(x, weight, bias, z) -> list[Tensor | None]:
    acc = at_least_float32(x.dtype)
    return [None if t is None else t.to(acc) for t in (x, weight, bias, z)]


def _groups(D: int, group_size: int | None) -> list[slice]:
    size = D if group_size is None else group_size
    return [slice(start, start + size) for start in range(0, D, size)]


def forward(x, weight, bias, z, eps, group_size, norm_before_gate) -> Tensor:
    dtype = x.dtype
    x, weight, bias, z = _wide(x, weight, bias, z)
    gate = 1 if z is None else z * torch.sigmoid(z)
    u = x if norm_before_gate else x * gate
    y = torch.empty_like(u)
    for g in _groups(x.shape[-1], group_size):
        y[..., g] = u[..., g] / (u[..., g].square().mean(-1, keepdim=True) + eps).sqrt() * weight[g]
    y = y if bias is None else y + bias
    return (y * gate if norm_before_gate else y).to(dtype)


def backward(dy, x, weight, bias, z, eps, group_size, norm_before_gate) -> tuple[Tensor | None, ...]:
    inputs = (x, weight, bias, z)
    x, weight, bias, z = _wide(*inputs)
    dy = dy.to(x.dtype)
    gate, slope = torch.ones_like(x), torch.zeros_like(x)  # of silu at z
    if z is not None:
        sigmoid = torch.sigmoid(z)
        gate, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    u = x if norm_before_gate else x * gate
    dv = dy * gate if norm_before_gate else dy
    du, normed = torch.empty_like(u), torch.empty_like(u)
    for g in _groups(x.shape[-1], group_size):
        r = (u[..., g].square().mean(-1, keepdim=True) + eps).rsqrt()
        normed[..., g] = r * u[..., g]
        through = dv[..., g] * weight[g]
        du[..., g] = r * (through - normed[..., g] * (through * normed[..., g]).mean(-1, keepdim=True))
    dweight = (dv * normed).flatten(0, -2).sum(0) if x.ndim > 1 else dv * normed
    dbias = None if bias is None else (dv.flatten(0, -2).sum(0) if x.ndim > 1 else dv)
    v = normed * weight if bias is None else normed * weight + bias
    dz = (dy * v if norm_before_gate else du * x) * slope
    dx = du if norm_before_gate else du * gate
    return tuple(
        None if t is None else d.to(dtype=t.dtype, memory_format=torch.contiguous_format, copy=True)
        for t, d in zip(inputs, (dx, dweight, dbias, dz), strict=True)
    )

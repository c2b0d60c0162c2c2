"""The gated RMS norm over all groups at once, in blocks of rows that stay in cache, on any device."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends.tensors import at_least_float32

# Elements of a block by device type: what a CPU core's cache holds; elsewhere as few launches as memory allows.
BLOCK_ELEMENTS = {"cpu": 1 << 17}
BLOCK_ELEMENTS_ELSEWHERE = 1 << 28


def _blocks(x: Tensor) -> Iterator[slice]:
    """Blocks of the rows of x [rows, D]."""
    rows = max(1, BLOCK_ELEMENTS.get(x.device.type, BLOCK_ELEMENTS_ELSEWHERE) // x.shape[1])
    for r in range(0, x.shape[0], rows):
        yield slice(r, r + rows)


def _as_rows(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1, t.shape[-1])


def _inverse_rms(u: Tensor, size: int, eps: float) -> Tensor:
    """[rows, D] -> [rows, groups, 1]"""
    return u.unflatten(1, (-1, size)).square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _by_group(u: Tensor, r: Tensor) -> Tensor:
    return (u.unflatten(1, (r.shape[1], -1)) * r).flatten(1)


def forward(x, weight, bias, z, eps, group_size, norm_before_gate) -> Tensor:
    acc = at_least_float32(x.dtype)
    size = x.shape[-1] if group_size is None else group_size
    weight, bias = weight.to(acc), None if bias is None else bias.to(acc)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    xs, zs, ys = x.reshape(-1, x.shape[-1]), _as_rows(z), y.view(-1, x.shape[-1])
    for rows in _blocks(xs):
        u = xs[rows].to(acc)
        gate = None if zs is None else F.silu(zs[rows].to(acc))
        if gate is not None and not norm_before_gate:
            u = u * gate
        v = _by_group(u, _inverse_rms(u, size, eps)).mul_(weight)
        if bias is not None:
            v.add_(bias)
        if gate is not None and norm_before_gate:
            v.mul_(gate)
        ys[rows] = v
    return y


def backward(dy, x, weight, bias, z, eps, group_size, norm_before_gate) -> tuple[Tensor | None, ...]:
    acc = at_least_float32(x.dtype)
    D = x.shape[-1]
    size = D if group_size is None else group_size
    w, b = weight.to(acc), None if bias is None else bias.to(acc)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dz = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
    dweight, dbias = torch.zeros_like(w), torch.zeros_like(w)
    xs, dys, zs = x.reshape(-1, D), dy.reshape(-1, D), _as_rows(z)
    for rows in _blocks(xs):
        u, dv = xs[rows].to(acc), dys[rows].to(acc)
        if zs is None or dz is None:
            dx.view(-1, D)[rows] = _block_backward(u, dv, w, size, eps, dweight, dbias)[0]
            continue
        gate_input = zs[rows].to(acc)
        gate = F.silu(gate_input)
        if norm_before_gate:
            du, normed = _block_backward(u, dv * gate, w, size, eps, dweight, dbias)
            v = normed.mul_(w) if b is None else normed.mul_(w).add_(b)
            d_gate = v.mul_(dv)
        else:
            du, _ = _block_backward(u * gate, dv, w, size, eps, dweight, dbias)
            d_gate = du * u
            du.mul_(gate)
        dx.view(-1, D)[rows] = du
        dz.view(-1, D)[rows] = torch.ops.aten.silu_backward(d_gate, gate_input)
    return (
        dx,
        dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
        dz,
    )


def _block_backward(
    u: Tensor, dv: Tensor, weight: Tensor, size: int, eps: float, dweight: Tensor, dbias: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of u, normed u) of v = normed u * weight + bias, [rows, D] each; adds to dweight and dbias."""
    r = _inverse_rms(u, size, eps)
    normed = _by_group(u, r)
    dbias += dv.sum(0)
    dweight += (dv * normed).sum(0)
    g = dv * weight
    mean = (g * normed).unflatten(1, (-1, size)).mean(-1, keepdim=True)
    return _by_group(g.sub_(_by_group(normed, mean)), r), normed

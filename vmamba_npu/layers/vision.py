"""Mamba-2 on maps: the mixer of VisionMamba2, with its 2-D depthwise convolution and its directional scans."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..ops import known_backends, ssd
from .scan_orders import mean_of_scans, to_scans
from .ssd_aten import ssd_aten


class DepthwiseConv2d(nn.Conv2d):
    """Depthwise 3 x 3 convolution with bias of a channel-last map, padded to keep its size."""

    def __init__(self, channels: int, device=None, dtype=None) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # [B, H, W, C] -> [B, H, W, C]
        x = x.contiguous().permute(0, 3, 1, 2)  # a dense channels_last tensor, whose convolution returns the same
        return F.conv2d(x, self.weight, self.bias, padding=1, groups=self.groups).permute(0, 2, 3, 1)


class VisionMamba2Mixer(nn.Module):
    """State space mixer of a map: every token reads the map along 1, 2 or 4 scan directions that share all parameters.

    The directions are heads and groups of one SSD call (direction-major), on values that were computed
    once. Skip and gate belong to the token, so they are applied once too, to the mean of the directions.

    Source: VMamba's cross scan (arXiv:2401.10166) with the SSD of Mamba-2 (arXiv:2405.21060); docs/models.md.

    Args:
        d_model: channels C of the map.
        d_state: N, size of the state of a channel.
        expand: inner width E as a multiple of C.
        headdim: P, channels of a head; divides E.
        ngroups: G, groups of heads that share B and C; divides E / P.
        chunk_size: tokens that the scan processes as one block; never part of the result.
        directions: 1 (row), 2 (and row reversed) or 4 (and column, column reversed).
        exportable: compute the scan with plain ATen operators, which every exporter knows, instead of an operator call.
        backend: who computes the scan, "auto" or a name of the registry; `set_backend` changes it.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size does not divide as above, or the backend is unknown; the message names the argument.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        chunk_size: int = 128,
        directions: int = 4,
        exportable: bool = False,
        backend: str = "auto",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.d_inner = expand * d_model
        if self.d_inner % headdim:
            raise ValueError(f"headdim: expected a divisor of the inner width {expand} * {d_model}, got {headdim}")
        self.nheads = self.d_inner // headdim
        if self.nheads % ngroups:
            raise ValueError(f"ngroups: expected a divisor of the {self.nheads} heads, got {ngroups}")
        if directions not in (1, 2, 4):
            raise ValueError(f"directions: expected 1, 2 or 4, got {directions}")
        self.headdim, self.ngroups, self.d_bc = headdim, ngroups, ngroups * d_state
        self.directions, self.exportable = directions, exportable
        self.set_chunk_size(chunk_size)
        self.set_backend(backend)

        conv_dim = self.d_inner + 2 * self.d_bc
        self.in_proj = nn.Linear(d_model, self.d_inner + conv_dim + self.nheads, bias=False, **dd)
        self.dwconv = DepthwiseConv2d(conv_dim, **dd)
        self.A_log = nn.Parameter(torch.empty(self.nheads, **dd))
        self.dt_bias = nn.Parameter(torch.empty(self.nheads, **dd))
        self.D = nn.Parameter(torch.empty(self.nheads, headdim, **dd))
        self.out_norm = nn.LayerNorm(self.d_inner, **dd)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False, **dd)
        self.reset_scan_parameters()

    @torch.jit.ignore
    @torch.no_grad()
    def reset_scan_parameters(self) -> None:
        """Initial A_log, dt_bias and D, in place: decay rates up to 16, steps from 0.001 to 0.1, skip 1."""
        wide = torch.promote_types(self.dt_bias.dtype, torch.float32)
        step = torch.empty_like(self.dt_bias, dtype=wide).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # inverse of softplus
        self.A_log.uniform_(0.0, math.log(16.0))
        self.D.fill_(1.0)

    @torch.jit.ignore
    def set_backend(self, name: str) -> None:
        """Choose who computes the scan from now on; ValueError if the name is not known."""
        if name not in known_backends():
            raise ValueError(f"backend: expected one of {', '.join(known_backends())}, got {name!r}")
        if self.exportable and name != "auto":
            raise ValueError(f"backend: expected 'auto', as an exportable mixer calls no operator, got {name!r}")
        self.backend = name

    @torch.jit.ignore
    def set_chunk_size(self, chunk_size: int) -> None:
        """Choose the number of tokens that the scan processes as one block; the result stays the same."""
        if chunk_size < 1:
            raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
        self.chunk_size = chunk_size

    def forward(self, u: Tensor) -> Tensor:  # [B, H, W, C] -> [B, H, W, C]
        z, xBC, dt = self.in_proj(u).split([self.d_inner, self.d_inner + 2 * self.d_bc, self.nheads], -1)
        x, B, C = F.silu(self.dwconv(xBC)).split([self.d_inner, self.d_bc, self.d_bc], -1)
        y = self.scan(x, dt, B, C) + self.D.flatten() * x  # [B, H, W, E]
        return self.out_proj(self.out_norm(y * F.silu(z)))

    def scan(self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Mean over the directions of the scans of a map: [B, H, W, E] in place of x."""
        # the sum with float32 zeros is in float32 at least, whatever the parameter; a test of its dtype does not trace
        A = -(self.A_log + self.A_log.new_zeros(1, dtype=torch.float32)).exp()  # [H]
        per_head = self.directions * self.nheads
        per_group = self.directions * self.ngroups
        height, width = x.shape[1], x.shape[2]
        y = self._ssd(
            to_scans(x, self.directions).flatten(2).unflatten(2, (per_head, self.headdim)),  # [B, L, 4H, P]
            to_scans(dt, self.directions).flatten(2),  # [B, L, 4H]
            A.repeat(self.directions),
            to_scans(B, self.directions).flatten(2).unflatten(2, (per_group, -1)),  # [B, L, 4G, N]
            to_scans(C, self.directions).flatten(2).unflatten(2, (per_group, -1)),
            self.dt_bias.repeat(self.directions),
        )
        y = y.flatten(2).unflatten(2, (self.directions, self.d_inner))
        return mean_of_scans(y, self.directions, height, width)

    def _ssd(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor) -> Tensor:
        if self.exportable:
            return ssd_aten(x, dt, A, B, C, dt_bias, self.chunk_size)
        return ssd(x, dt, A, B, C, self.chunk_size, dt_bias=dt_bias, dt_softplus=True, backend=self.backend)[0]


class ScanCount:
    """Scans computed so far: `launches` operator calls, `scans` directions in all of them; prints as a sentence."""

    def __init__(self) -> None:
        self.launches = 0
        self.scans = 0

    def __str__(self) -> str:
        each = self.scans / max(self.launches, 1)
        return f"{self.scans} directional scans ({self.launches} launches x {each:g} directions)"


@contextmanager
def count_scans(model: nn.Module) -> Iterator[ScanCount]:
    """Count the directional scans of every forward of a model inside the block (by hooks on its mixers)."""
    count = ScanCount()

    def after(mixer: VisionMamba2Mixer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        count.launches += 1
        count.scans += mixer.directions

    hooks = [m.register_forward_hook(after) for m in model.modules() if isinstance(m, VisionMamba2Mixer)]
    try:
        yield count
    finally:
        for hook in hooks:
            hook.remove()

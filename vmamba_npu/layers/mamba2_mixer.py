"""The Mamba-2 block: parameters, sizes and stages, and the forward of whole sequences."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..ops import causal_conv1d, ssd
from .norm import RMSNorm, check_backend

INFINITY = float("inf")
NO_DECAY = ("dt_bias", "A_log", "D", "init_states")


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")


def _inner_width(expand: float, d_model: int) -> int:
    width = expand * d_model
    if width < 1 or abs(width - round(width)) > 1e-6:
        raise ValueError(
            f"expand: expected a value whose product with d_model = {d_model} is a positive integer, "
            f"got {expand} (product {width:g})"
        )
    return round(width)


def _check_heads(d_inner: int, d_ssm: int, headdim: int, ngroups: int) -> None:
    if not 1 <= d_ssm <= d_inner:
        raise ValueError(f"d_ssm: expected 1 to expand * d_model = {d_inner}, got {d_ssm}")
    if d_ssm % headdim:
        fits = [n for n in range(1, min(d_ssm, 256) + 1) if d_ssm % n == 0]
        raise ValueError(
            f"headdim: expected a divisor of d_ssm = {d_ssm} (default expand * d_model), got headdim = {headdim}; "
            f"choose headdim from {fits}, or a d_model, expand or d_ssm that makes d_ssm a multiple of {headdim}"
        )
    if d_ssm // headdim % ngroups:
        raise ValueError(
            f"ngroups: expected a divisor of the {d_ssm // headdim} heads (d_ssm {d_ssm} / headdim {headdim}), "
            f"got {ngroups}"
        )


def _check_ranges(A_init_range, dt_min: float, dt_max: float, dt_init_floor: float, dt_limit, conv_init) -> None:
    if not 0 < A_init_range[0] <= A_init_range[1]:
        raise ValueError(f"A_init_range: expected 0 < smallest <= largest, got {tuple(A_init_range)}")
    if not 0 < dt_min <= dt_max:
        raise ValueError(f"dt_min: expected 0 < dt_min <= dt_max = {dt_max}, got {dt_min}")
    if not dt_init_floor > 0:
        raise ValueError(f"dt_init_floor: expected a positive number, got {dt_init_floor}")
    if len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit: expected (smallest, largest), got {tuple(dt_limit)}")
    if conv_init is not None and not conv_init >= 0:
        raise ValueError(f"conv_init: expected None or the bound of a uniform distribution, got {conv_init}")


class Mamba2Mixer(nn.Module):
    """Mamba-2 mixer of sequences, [B, L, d_model] to [B, L, d_model]; scripts, traces, exports and compiles.

    With E = d_ssm and one decay a head::

        z0, x0, z, xBC, dt = split(in_proj(u))
        x, B, C = split(silu(causal_conv1d(xBC)))
        y = norm(ssd(x, dt, -exp(A_log), B, C, D), gate z)
        out = out_proj(concat(silu(z0) * x0, y))        # z0, x0 have expand * d_model - d_ssm channels, by default none

    `in_proj`, `norm` and `out_proj` are called as modules, so wrappers and hooks on them count. The output has the
    dtype that `out_proj` gives: that of the parameters, or of autocast. `Mamba2` is the same block with packed
    sequences and caches, and loads the same state dict.

    Source: Mamba-2 (arXiv:2405.21060); docs/layers.md.

    Args:
        d_model: channels of input and output.
        d_state: N, size of the state of a channel.
        d_conv: W, taps of the causal convolution.
        conv_init: draw the convolution's weight from (-conv_init, conv_init); PyTorch's default if None.
        expand: inner width as a multiple of d_model; the product is an integer.
        headdim: P, channels of a head; divides d_ssm.
        d_ssm: inner channels that the scan sees, the rest is a gated MLP; all if None.
        ngroups: G, groups of heads that share B and C (and the norm's statistics); divides d_ssm / P.
        A_init_range: range from which the decay rates are drawn.
        D_has_hdim: one skip weight a channel instead of one a head.
        rmsnorm: normalise before out_proj; otherwise z gates inside the scan.
        norm_before_gate: whether the gate multiplies the result of the norm or its input.
        dt_min, dt_max: range from which initial steps are drawn, uniform in the logarithm.
        dt_init_floor: smallest initial step.
        dt_limit: smallest and largest step at run time.
        bias: biases of both projections.
        conv_bias: bias of the convolution.
        chunk_size: tokens that the scan processes as one block; never part of the result.
        device, dtype: of the parameters (`D` is made in the default dtype, as mamba_ssm does).
        backend: who computes convolution, scan and norm, "auto" or a name of the registry; `set_backend` changes it.

    Raises:
        ValueError: a size does not fit as above, or the backend is unknown; the message names the argument.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, INFINITY),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        device=None,
        dtype=None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        _check_positive(
            d_model=d_model, d_state=d_state, d_conv=d_conv, headdim=headdim, ngroups=ngroups, chunk_size=chunk_size
        )
        _check_ranges(A_init_range, dt_min, dt_max, dt_init_floor, dt_limit, conv_init)
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = _inner_width(expand, d_model)
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        _check_heads(self.d_inner, self.d_ssm, headdim, ngroups)
        self.headdim, self.ngroups, self.nheads = headdim, ngroups, self.d_ssm // headdim
        self.d_mlp, self.d_bc = self.d_inner - self.d_ssm, ngroups * d_state
        self.conv_dim = self.d_ssm + 2 * self.d_bc
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = D_has_hdim, rmsnorm, norm_before_gate
        self.conv_init, self.A_init_range = conv_init, (float(A_init_range[0]), float(A_init_range[1]))
        self.dt_init = (float(dt_min), float(dt_max), float(dt_init_floor))
        self.dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
        self.activation, self.chunk_size = "silu", chunk_size
        self.backend = check_backend(backend)

        dd = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, 2 * self.d_mlp + self.d_ssm + self.conv_dim + self.nheads, bias=bias, **dd)
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, d_conv, padding=d_conv - 1, groups=self.conv_dim, bias=conv_bias, **dd
        )
        self.act = nn.SiLU()
        self.dt_bias = nn.Parameter(torch.empty(self.nheads, **dd))
        self.A_log = nn.Parameter(torch.empty(self.nheads, **dd))
        self.D = nn.Parameter(torch.empty(self.d_ssm if D_has_hdim else self.nheads, device=device))
        self.reset_scan_parameters()
        self.norm = None
        if rmsnorm:
            group = self.d_ssm // ngroups
            self.norm = RMSNorm(self.d_ssm, 1e-5, group, norm_before_gate, backend=backend, **dd)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **dd)
        self._mark_no_weight_decay()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that optimizers should not decay (they carry `_no_weight_decay` too)."""
        return {name for name in NO_DECAY if getattr(self, name, None) is not None}

    @torch.jit.ignore
    def _mark_no_weight_decay(self) -> None:
        for name in self.no_weight_decay():
            getattr(self, name)._no_weight_decay = True

    # PyTorch makes new parameters, without their attributes, in each of these.
    @torch.jit.ignore
    def __setstate__(self, state) -> None:  # copy.deepcopy
        super().__setstate__(state)
        self._mark_no_weight_decay()

    @torch.jit.ignore
    def _apply(self, fn, recurse=True):  # to_empty
        super()._apply(fn, recurse)
        self._mark_no_weight_decay()
        return self

    @torch.jit.ignore
    def _load_from_state_dict(self, *args, **kwargs) -> None:  # load_state_dict(assign=True)
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_no_weight_decay()

    @torch.jit.ignore
    @torch.no_grad()
    def reset_scan_parameters(self) -> None:
        """Initial dt_bias, A_log and D (and the convolution's weight if `conv_init` is given), in place."""
        if self.conv_init is not None:
            self.conv1d.weight.uniform_(-self.conv_init, self.conv_init)
        dt_min, dt_max, floor = self.dt_init
        wide = torch.promote_types(self.dt_bias.dtype, torch.float32)
        step = torch.rand_like(self.dt_bias, dtype=wide) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)
        step = step.exp().clamp(min=floor)
        self.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # inverse of softplus
        self.A_log.copy_(torch.empty_like(self.A_log, dtype=wide).uniform_(*self.A_init_range).log())
        self.D.fill_(1.0)

    @torch.jit.ignore
    def set_backend(self, name: str) -> None:
        """Choose who computes convolution, scan and norm from now on; ValueError if the name is not known."""
        self.backend = check_backend(name)
        if isinstance(self.norm, RMSNorm):
            self.norm.set_backend(name)

    def forward(self, u: Tensor) -> Tensor:  # [B, L, d_model] -> [B, L, d_model]
        z0, x0, z, xBC, dt = self._project(u)
        y, _ = self._scan(self._convolve(xBC, None), dt, z, None, None, None)
        return self._finish(y, z, z0, x0)

    def _check_input(self, u: Tensor) -> None:
        """For the subclasses: a test of sizes would keep `forward` above from being traced."""
        if u.ndim != 3 or u.shape[-1] != self.d_model:
            raise ValueError(f"u: expected [B, L, d_model = {self.d_model}], got {tuple(u.shape)}")

    def _project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """z0, x0 [..., d_mlp], z [..., d_ssm], xBC [..., conv_dim], dt [..., H]"""
        parts = self.in_proj(u).split([self.d_mlp, self.d_mlp, self.d_ssm, self.conv_dim, self.nheads], -1)
        return parts[0], parts[1], parts[2], parts[3], parts[4]

    def _convolve(self, xBC: Tensor, seq_idx: Tensor | None) -> Tensor:  # [B, L, conv_dim] -> [B, L, conv_dim]
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        return causal_conv1d(xBC.mT, weight, bias, seq_idx, activation="silu", backend=self.backend)[0].mT

    def _decay_rates(self) -> Tensor:
        """A [H], in float32 at least: the sum with float32 zeros promotes, where a test of dtypes would not trace."""
        return -(self.A_log + self.A_log.new_zeros(1, dtype=torch.float32)).exp()

    def _skip(self) -> Tensor:  # [H] or [H, P]
        return self.D.unflatten(0, (self.nheads, self.headdim)) if self.D_has_hdim else self.D

    def _scan(
        self,
        xBC: Tensor,
        dt: Tensor,
        z: Tensor,
        initial_states: Tensor | None,
        seq_idx: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(y [B, L, d_ssm], final_states); z gates here if no norm does."""
        x, B, C = xBC.split([self.d_ssm, self.d_bc, self.d_bc], -1)
        y, final_states = ssd(
            x.unflatten(-1, (self.nheads, self.headdim)),  # [B, L, H, P]
            dt,
            self._decay_rates(),
            B.unflatten(-1, (self.ngroups, self.d_state)),  # [B, L, G, N]
            C.unflatten(-1, (self.ngroups, self.d_state)),
            self.chunk_size,
            D=self._skip(),
            z=None if self.norm is not None else z.unflatten(-1, (self.nheads, self.headdim)),
            dt_bias=self.dt_bias,
            initial_states=initial_states,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            backend=self.backend,
        )
        return y.flatten(2), final_states

    def _finish(self, y: Tensor, z: Tensor, z0: Tensor, x0: Tensor) -> Tensor:
        """Norm, gated MLP part and output projection: [..., d_ssm] -> [..., d_model]"""
        if self.norm is not None:
            y = self.norm(y, z)
        if self.d_mlp > 0:
            y = torch.cat([F.silu(z0) * x0, y], -1)
        return self.out_proj(y)

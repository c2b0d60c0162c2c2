"""Mamba2Simple with the interface of mamba_ssm: fewer options, no cache, optional learned initial states."""

import torch
import torch.nn as nn
from torch import Tensor

from .mamba2_mixer import INFINITY, Mamba2Mixer
from .sequences import check_packing


class Mamba2Simple(Mamba2Mixer):
    """Mamba-2 layer without caches; its norm is over all inner channels, after the gate.

    Source: Mamba-2 (arXiv:2405.21060); docs/layers.md.

    Args:
        d_model, d_state, d_conv, conv_init, expand, headdim, ngroups, A_init_range, dt_min, dt_max, dt_init_floor,
        dt_limit, bias, conv_bias, chunk_size: as `Mamba2Mixer`.
        learnable_init_states: a parameter `init_states` [H, P, N] is the state before the first token of every row
            (with `seq_idx`, before that of a row's sequence 0).
        activation: of the convolution, "swish" or "silu" (the same).
        use_mem_eff_path, layer_idx: accepted for compatibility; there is one path and no cache.
        device, dtype, backend: as `Mamba2Mixer`.

    Raises:
        ValueError: a size does not fit, or the backend is unknown; the message names the argument.
        NotImplementedError: another activation.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, INFINITY),
        learnable_init_states: bool = False,
        activation: str = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device=None,
        dtype=None,
        backend: str = "auto",
    ) -> None:
        if activation not in ("swish", "silu"):
            raise NotImplementedError(f"activation: expected 'swish' or 'silu', got {activation!r}")
        super().__init__(
            d_model, d_state, d_conv, conv_init, expand, headdim, None, ngroups, A_init_range, dt_min=dt_min,
            dt_max=dt_max, dt_init_floor=dt_init_floor, dt_limit=dt_limit, bias=bias, conv_bias=conv_bias,
            chunk_size=chunk_size, device=device, dtype=dtype, backend=backend,
        )  # fmt: skip
        assert self.norm is not None
        self.norm.group_size = None  # over the whole inner width, whatever the groups
        self.activation, self.learnable_init_states = activation, learnable_init_states
        self.use_mem_eff_path, self.layer_idx = use_mem_eff_path, layer_idx
        if learnable_init_states:
            states = torch.zeros(self.nheads, headdim, d_state, device=device, dtype=dtype)
            self.init_states = nn.Parameter(states)
            self._mark_no_weight_decay()

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:  # [B, L, d_model] -> [B, L, d_model]
        self._check_input(u)
        check_packing(u, seq_idx, None)
        z0, x0, z, xBC, dt = self._project(u)
        initial_states = self.init_states.expand(u.shape[0], -1, -1, -1) if self.learnable_init_states else None
        y, _ = self._scan(self._convolve(xBC, seq_idx), dt, z, initial_states, seq_idx, None)
        return self._finish(y, z, z0, x0)

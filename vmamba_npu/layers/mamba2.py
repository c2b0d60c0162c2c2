"""Mamba2 with the interface of mamba_ssm: packed sequences, inference caches, single steps."""

from typing import Any

import torch
from torch import Tensor

from ..ops import causal_conv1d_update, selective_state_update
from .mamba2_mixer import INFINITY, Mamba2Mixer
from .sequences import check_packing, last_columns, prepend, sequence_of_tokens

Cache = tuple[Tensor, Tensor]


class Mamba2(Mamba2Mixer):
    """Mamba-2 layer with mamba_ssm's arguments, parameter names and cache protocol; the mathematics of `Mamba2Mixer`.

    A cache is (conv_state [rows, conv_dim, d_conv], the last inputs of the convolution, oldest first; ssm_state
    [rows, H, P, N]), one row for each batch row or packed sequence, updated in place and without gradient.

    Source: Mamba-2 (arXiv:2405.21060); docs/layers.md.

    Args:
        d_model, d_state, d_conv, conv_init, expand, headdim, d_ssm, ngroups, A_init_range, D_has_hdim, rmsnorm,
        norm_before_gate, dt_min, dt_max, dt_init_floor, dt_limit, bias, conv_bias, chunk_size: as `Mamba2Mixer`.
        use_mem_eff_path: accepted for compatibility; there is one path, whose backward keeps no states of tokens.
        layer_idx: key of this layer's cache in `inference_params`.
        process_group: None; tensor parallelism is not available.
        sequence_parallel: accepted for compatibility; it has a meaning only with a process group.
        device, dtype, backend: as `Mamba2Mixer`.

    Raises:
        ValueError: a size does not fit, or the backend is unknown; the message names the argument.
        NotImplementedError: a process group is given.
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
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device=None,
        dtype=None,
        backend: str = "auto",
    ) -> None:
        if process_group is not None:
            raise NotImplementedError(
                "process_group: tensor parallelism is not available, expected None; use data parallelism (DDP, FSDP2)"
            )
        super().__init__(
            d_model, d_state, d_conv, conv_init, expand, headdim, d_ssm, ngroups, A_init_range, D_has_hdim, rmsnorm,
            norm_before_gate, dt_min, dt_max, dt_init_floor, dt_limit, bias, conv_bias, chunk_size, device, dtype,
            backend,
        )  # fmt: skip
        self.use_mem_eff_path, self.layer_idx = use_mem_eff_path, layer_idx
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.world_size, self.local_rank = 1, 0

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Outputs of all tokens, in the shape of `u`.

        Args:
            u: [B, L, d_model]; [B * L, d_model] with `seqlen`.
            seqlen: L, if u has no batch axis.
            seq_idx: [B, L] integer, the sequence that each token belongs to; a negative index marks padding.
            cu_seqlens: [sequences + 1] integer borders of sequences packed in one row (B = 1). With both descriptions
                given, they must agree.
            inference_params: an object with `seqlen_offset` and `key_value_memory_dict`. At offset 0 the sequences
                start anew and their states are written to the cache of this layer. At a larger offset they go on from
                the cache, by one token or by many, and update it; with `seq_idx` the tokens of index 0 go on.

        Raises:
            ValueError, TypeError: an argument differs from the above, or the cache does not fit; the message names it.
        """
        shape = u.shape
        if seqlen is not None:
            if u.ndim != 2 or seqlen < 1 or shape[0] % seqlen:
                raise ValueError(f"u: expected [B * {seqlen}, d_model] with seqlen = {seqlen}, got {tuple(shape)}")
            u = u.unflatten(0, (-1, seqlen))
        self._check_input(u)
        check_packing(u, seq_idx, cu_seqlens)
        if inference_params is None:
            out = self._sequences(u, seq_idx, cu_seqlens, None, fresh=True)
        else:
            rows = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            cache = self._get_states_from_cache(inference_params, rows)
            fresh = inference_params.seqlen_offset == 0
            if not fresh and u.shape[1] == 1 and seq_idx is None and cu_seqlens is None:
                out = self.step(u, *cache)[0]
            else:
                out = self._sequences(u, seq_idx, cu_seqlens, cache, fresh)
        return out if seqlen is None else out.flatten(0, 1)

    def _sequences(
        self, u: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None, cache: Cache | None, fresh: bool
    ) -> Tensor:
        """Outputs of whole sequences or, unless fresh, of the tokens that continue those of the cache."""
        z0, x0, z, xBC, dt = self._project(u)
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(u.device)
            seq_idx = sequence_of_tokens(cu_seqlens, u.shape[1]).unsqueeze(0)
        if fresh:
            longer, conv_idx, borders, initial_states = xBC, seq_idx, cu_seqlens, None
            conv = self._convolve(xBC, seq_idx)
        else:
            assert cache is not None
            conv_state, ssm_state = cache
            longer, conv_idx, borders, places = prepend(xBC, conv_state, seq_idx, cu_seqlens)
            conv = self._convolve(longer, conv_idx).index_select(1, places)
            initial_states = ssm_state.clone()  # the cache changes below, and a backward may still need this
        y, final_states = self._scan(conv, dt, z, initial_states, seq_idx if cu_seqlens is None else None, cu_seqlens)
        if cache is not None:
            cache[0].copy_(last_columns(longer.detach(), self.d_conv, conv_idx, borders))
            cache[1].copy_(final_states.detach())
        return self._finish(y, z, z0, x0)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more token of every row, [B, 1, d_model]; for inference, the scan's part has no gradient.

        Returns:
            (out [B, 1, d_model], conv_state, ssm_state), both states updated in place.
        """
        self._check_input(hidden_states)
        if hidden_states.shape[1] != 1:
            raise ValueError(f"hidden_states: expected one token, [B, 1, d_model], got {tuple(hidden_states.shape)}")
        self._check_rows(hidden_states.shape[0], conv_state, ssm_state)
        z0, x0, z, xBC, dt = self._project(hidden_states.squeeze(1))
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        xBC = causal_conv1d_update(xBC, conv_state, weight, bias, "silu", backend=self.backend)
        x, B, C = xBC.split([self.d_ssm, self.d_bc, self.d_bc], -1)
        heads = (self.nheads, self.headdim)
        D = self._skip()
        y = selective_state_update(
            ssm_state,
            x.unflatten(-1, heads),  # [B, H, P]
            dt.unsqueeze(-1).expand(-1, *heads),
            self._decay_rates()[:, None, None].expand(*heads, self.d_state),
            B.unflatten(-1, (self.ngroups, self.d_state)),  # [B, G, N]
            C.unflatten(-1, (self.ngroups, self.d_state)),
            D if D.ndim == 2 else D[:, None].expand(heads),
            None if self.norm is not None else z.unflatten(-1, heads),
            self.dt_bias[:, None].expand(heads),
            dt_softplus=True,
            dt_limit=self.dt_limit,
            backend=self.backend,
        )
        return self._finish(y.flatten(1), z, z0, x0).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Cache:
        """A zero cache for `batch_size` rows; its size does not depend on `max_seqlen`.

        Args:
            batch_size: rows, or packed sequences.
            max_seqlen: accepted for compatibility, as are further keywords (other layers have use for them).
            dtype: of both states; that of the convolution's weight if None. float32 keeps long decodes exact.
        """
        weight = self.conv1d.weight
        like = weight.new_empty(0, dtype=dtype or weight.dtype)
        conv_state = like.new_zeros(batch_size, self.d_conv, self.conv_dim).mT  # stride 1 on channels
        return conv_state, like.new_zeros(batch_size, self.nheads, self.headdim, self.d_state)

    def _get_states_from_cache(self, inference_params: Any, batch_size: int, initialize_states: bool = False) -> Cache:
        """This layer's entry of `key_value_memory_dict`, made if absent; zeroed on request."""
        if self.layer_idx is None:
            raise ValueError("layer_idx: expected an integer to find this layer's cache by, got None (constructor)")
        entries = inference_params.key_value_memory_dict
        if self.layer_idx not in entries:
            entries[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        conv_state, ssm_state = entries[self.layer_idx]
        self._check_rows(batch_size, conv_state, ssm_state)
        if initialize_states:
            conv_state.zero_()
            ssm_state.zero_()
        return conv_state, ssm_state

    def _check_rows(self, batch_size: int, conv_state: Tensor, ssm_state: Tensor) -> None:
        wanted = {
            "conv_state": (conv_state, (self.conv_dim, self.d_conv)),
            "ssm_state": (ssm_state, (self.nheads, self.headdim, self.d_state)),
        }
        for name, (state, shape) in wanted.items():
            if state.shape[0] != batch_size:
                raise ValueError(f"{name}: the cache has {state.shape[0]} rows, the input {batch_size}")
            if tuple(state.shape[1:]) != shape:
                raise ValueError(f"{name}: expected {(batch_size, *shape)}, got {tuple(state.shape)}")

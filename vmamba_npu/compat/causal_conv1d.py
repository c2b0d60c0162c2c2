"""The functions of the causal_conv1d package, under its names and signatures."""

import itertools
from typing import Any

from torch import Tensor

from ..ops import causal_conv1d, causal_conv1d_varlen_states
from ..ops import causal_conv1d_update as update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
    "causal_conv1d_varlen_states",
    "causal_conv1d_varlen_states_ref",
]


def refuse_text(seq_idx: Any) -> None:
    """The fourth positional argument of early versions was the activation."""
    if isinstance(seq_idx, str):
        raise TypeError(
            f"seq_idx: expected an integer tensor or None, got {seq_idx!r}; "
            f"pass activation by keyword: activation={seq_idx!r}"
        )


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    final_states_out: Tensor | None,
    activation: str | None,
    backend: str,
) -> Tensor | tuple[Tensor, Tensor]:
    refuse_text(seq_idx)
    if seq_idx is not None and return_final_states:
        raise ValueError("return_final_states: expected False when seq_idx is given; see causal_conv1d_varlen_states")
    if final_states_out is not None and not return_final_states:
        raise ValueError("final_states_out: expected return_final_states=True with it, got False")
    out, final_states = causal_conv1d(x, weight, bias, seq_idx, initial_states, activation, backend)
    if not return_final_states:
        return out
    if final_states_out is None:
        return out, final_states
    if final_states_out.shape != final_states.shape:
        raise ValueError(f"final_states_out: expected {tuple(final_states.shape)}, got {tuple(final_states_out.shape)}")
    return out, final_states_out.copy_(final_states)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`vmamba_npu.ops.causal_conv1d`: out [B, channels, L], or (out, final_states [B, channels, W - 1]) on request.

    `final_states_out` is written and returned as the final states. Any width, number of channels and strides.

    Raises:
        TypeError: text in the place of `seq_idx` (the activation of early versions), or a wrong dtype.
        ValueError: a shape differs, or final states (given or wanted) together with `seq_idx`.
        NotImplementedError: an activation other than None, "silu" and "swish".
    """
    return _convolve(
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation, "auto"
    )


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d_fn` by its definition, token after token, without `seq_idx`."""
    if isinstance(initial_states, str):
        raise TypeError("initial_states: expected a tensor or None, got text; pass activation by keyword")
    return _convolve(
        x, weight, bias, None, initial_states, return_final_states, final_states_out, activation, "reference"
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """`vmamba_npu.ops.causal_conv1d_update`: further tokens; `conv_state` is updated in place."""
    return update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_update` by its definition, token after token."""
    return update(x, conv_state, weight, bias, activation, cache_seqlens, backend="reference")


def causal_conv1d_varlen_states_ref(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """`causal_conv1d_varlen_states`, one sequence after another."""
    borders = cu_seqlens.tolist()
    states = x.new_zeros(len(borders) - 1, x.shape[1], state_len)
    for i, (start, end) in enumerate(itertools.pairwise(borders)):
        kept = min(end - start, state_len)
        states[i, :, state_len - kept :] = x[end - kept : end].mT
    return states

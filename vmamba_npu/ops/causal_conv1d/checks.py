"""What every backend of the causal convolution may take for granted; runs on real and on fake tensors."""

from torch import Tensor

from ...backends.checks import (
    expect_device,
    expect_float,
    expect_integer,
    expect_ndim,
    expect_positive,
    expect_shape,
)


def _check_common(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> tuple[int, int]:
    """(channels, width)"""
    expect_ndim("weight", weight, "[channels, W]")
    channels, width = weight.shape
    expect_positive(batch=x.shape[0], channels=channels, W=width)
    expect_shape("bias", bias, (channels,))
    expect_float(x=x, weight=weight, bias=bias)
    expect_device(x, weight=weight, bias=bias)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation: expected None, 'silu' or 'swish', got {activation!r}")
    return channels, width


def check_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    activation: str | None,
) -> None:
    expect_ndim("x", x, "[B, channels, L]")
    channels, width = _check_common(x, weight, bias, activation)
    batch, _, L = x.shape
    expect_shape("x", x, (batch, channels, L))
    expect_shape("seq_idx", seq_idx, (batch, L))
    expect_shape("initial_states", initial_states, (batch, channels, width - 1))
    expect_integer(seq_idx=seq_idx)
    expect_float(initial_states=initial_states)
    expect_device(x, seq_idx=seq_idx, initial_states=initial_states)
    if seq_idx is not None and initial_states is not None:
        raise ValueError("initial_states: expected to be absent when seq_idx is given, got both")


def check_causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> None:
    if x.ndim not in (2, 3):
        raise ValueError(f"x: expected [B, channels] or [B, channels, T], got shape {tuple(x.shape)}")
    expect_ndim("conv_state", conv_state, "[S, channels, K]")
    channels, width = _check_common(x, weight, bias, activation)
    batch = x.shape[0]
    expect_shape("x", x, (batch, channels, *x.shape[2:]))
    rows, _, kept = conv_state.shape
    expect_shape("conv_state", conv_state, (rows, channels, kept))
    if kept < width - 1:
        raise ValueError(f"conv_state: expected at least W - 1 = {width - 1} columns, got {kept}")
    expect_float(conv_state=conv_state)
    expect_integer(cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    expect_shape("cache_seqlens", cache_seqlens, (batch,))
    expect_shape("conv_state_indices", conv_state_indices, (batch,))
    expect_device(x, conv_state=conv_state, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    if conv_state_indices is None and rows != batch:
        raise ValueError(f"conv_state: expected {batch} rows, one for each row of x, got {rows}")


def check_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> None:
    expect_ndim("x", x, "[tokens, channels]")
    expect_ndim("cu_seqlens", cu_seqlens, "[sequences + 1]")
    expect_integer(cu_seqlens=cu_seqlens)
    expect_positive(cu_seqlens=cu_seqlens.shape[0] - 1, state_len=state_len)

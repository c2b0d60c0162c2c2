"""The public functions of the causal depthwise convolution."""

import torch
from torch import Tensor

from . import library  # noqa: F401  (defines the operators)
from .checks import check_varlen_states


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over the last W tokens, with an optional SiLU.

    With X the tokens of a row, preceded by `initial_states` (zeros if absent)::

        out[t] = act(bias + sum_j weight[:, j] * X[t - (W - 1) + j])

    With `seq_idx`, only tokens of the same sequence count; tokens with a negative index are padding, whose output is 0.

    Source: the convolution in front of the scan of Mamba (arXiv:2312.00752); docs/conv.md.

    Args:
        x: [B, channels, L] any float dtype and strides; a transposed [B, L, channels] is as good and stays one.
        weight: [channels, W] any float dtype, W >= 1; the last column meets the current token.
        bias: [channels] any float dtype.
        seq_idx: [B, L] integer, the sequence that each token belongs to; excludes `initial_states`.
        initial_states: [B, channels, W - 1] the tokens before the first.
        activation: None, "silu" or "swish" (the same).
        backend: "auto", "reference" or "torch".

    Returns:
        out [B, channels, L] in the dtype and layout of x; final_states [B, channels, W - 1] in the dtype of x, the last
        tokens seen, `initial_states` among them if L < W - 1 (with `seq_idx` those of the last token's sequence alone,
        zeros before them). Both are differentiable.

    Raises:
        ValueError: a shape or device differs from the above, or the backend is unknown; the message names it.
        TypeError: a tensor has a dtype that differs from the above.
        NotImplementedError: another activation.
        BackendUnavailable: the named backend cannot serve this call.
    """
    out = torch.ops.vmamba_npu.causal_conv1d_fwd(x, weight, bias, seq_idx, initial_states, activation, backend)
    return out[0], out[1]


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The convolution of further tokens; `conv_state`, the tokens before them, is updated in place. No gradient.

    Without `cache_seqlens` the state is shifted left and its last column is the latest token. With it the state is a
    ring: token t of row b is written to column ``(cache_seqlens[b] + t) % K``.

    Source: docs/conv.md.

    Args:
        x: [B, channels] or [B, channels, T] any float dtype.
        conv_state: [S, channels, K] any float dtype, K >= W - 1. S = B, or free with `conv_state_indices`.
        weight: [channels, W].
        bias: [channels].
        activation: None, "silu" or "swish".
        cache_seqlens: [B] integer, tokens seen before.
        conv_state_indices: [B] integer: row b uses state `conv_state_indices[b]`; a negative one marks padding, whose
            output is 0 and which touches no state. A state used twice is undefined.
        backend: "auto", "reference" or "torch".

    Returns:
        out, shape and dtype of x.

    Raises:
        ValueError, TypeError, NotImplementedError, BackendUnavailable: as `causal_conv1d`.
    """
    return torch.ops.vmamba_npu.causal_conv1d_update(
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices, backend
    )


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` tokens of each packed sequence, zeros before a shorter one's first.

    Args:
        x: [tokens, channels].
        cu_seqlens: [sequences + 1] integer borders from 0 to the number of tokens.
        state_len: tokens to keep, >= 1.

    Returns:
        [sequences, channels, state_len] in the dtype of x.

    Raises:
        ValueError, TypeError: a shape or dtype differs from the above.
    """
    check_varlen_states(x, cu_seqlens, state_len)
    ends = cu_seqlens[1:].to(x.device, torch.int64)
    at = ends[:, None] + torch.arange(-state_len, 0, device=x.device)  # [sequences, state_len]
    inside = at >= cu_seqlens[:-1].to(x.device, torch.int64)[:, None]
    if x.shape[0] == 0:
        return x.new_zeros(ends.shape[0], x.shape[1], state_len)
    return torch.where(inside[..., None], x[at.clamp_min(0)], 0).mT.contiguous()

"""Index arithmetic of packed sequences and of the convolution's cache: plain functions of tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import causal_conv1d_varlen_states


def check_packing(u: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Types and shapes, and on the CPU that both descriptions, when both are given, agree."""
    batch, L = u.shape[0], u.shape[1]
    for name, t in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected an integer tensor, got {type(t).__name__}")
    if seq_idx is not None and tuple(seq_idx.shape) != (batch, L):
        raise ValueError(f"seq_idx: expected {(batch, L)}, got {tuple(seq_idx.shape)}")
    if cu_seqlens is None:
        return
    if batch != 1:
        raise ValueError(f"cu_seqlens: expected one row (B = 1) of packed sequences, got B = {batch}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected [sequences + 1], got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.is_floating_point():
        raise TypeError(f"cu_seqlens: expected an integer tensor, got {cu_seqlens.dtype}")
    if seq_idx is not None and not torch.compiler.is_compiling() and seq_idx.device.type == "cpu":
        same = sequence_of_tokens(cu_seqlens, L).to(seq_idx.device).diff() == 0
        if not torch.equal(seq_idx[0].diff() == 0, same):
            raise ValueError("seq_idx: expected to change at the borders of cu_seqlens and nowhere else")


def sequence_of_tokens(cu_seqlens: Tensor, L: int) -> Tensor:
    """[L] the sequence that each token belongs to."""
    tokens = torch.arange(L, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def last_columns(xBC: Tensor, width: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The last `width` tokens of each row (sequence, with `cu_seqlens`), zeros before a shorter one's first.

    With `seq_idx`, those of the last token's sequence alone (none if it is padding, a negative index).

    Returns:
        [B or sequences, channels, width].
    """
    if cu_seqlens is not None:
        return causal_conv1d_varlen_states(xBC[0], cu_seqlens, width)
    if seq_idx is not None:
        last = seq_idx[:, -1:]
        xBC = xBC.masked_fill(((seq_idx != last) | (last < 0)).unsqueeze(-1), 0)
    return F.pad(xBC.mT, (width - xBC.shape[1], 0))


def prepend(
    xBC: Tensor, conv_state: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Put the cached columns in front of the tokens that continue them.

    Each row (sequence, with `cu_seqlens`) is preceded by its own columns of `conv_state` [rows, channels, W]; with
    `seq_idx` these count as tokens of sequence 0, as the initial state of the scan does.

    Returns:
        The longer xBC, seq_idx and cu_seqlens, and the places [L] of the new tokens in it.
    """
    cached = conv_state.mT.to(xBC.dtype)  # [rows, W, channels]
    rows, width, L = cached.shape[0], cached.shape[1], xBC.shape[1]
    if cu_seqlens is None:
        places = torch.arange(width, width + L, device=xBC.device)
        seq_idx = None if seq_idx is None else F.pad(seq_idx, (width, 0))
        return torch.cat([cached, xBC], 1), seq_idx, None, places
    sequences = torch.arange(rows, device=xBC.device)
    owner = torch.cat([sequences.repeat_interleave(width), sequence_of_tokens(cu_seqlens, L).to(xBC.device)])
    order = owner.argsort(stable=True)  # columns of a sequence, then its tokens
    longer = torch.cat([cached.flatten(0, 1).unsqueeze(0), xBC], 1)[:, order]
    borders = cu_seqlens + width * torch.arange(rows + 1, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return longer, owner[order].unsqueeze(0), borders, order.argsort()[rows * width :]

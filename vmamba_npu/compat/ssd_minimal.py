"""mamba_ssm.modules.ssd_minimal: SSD on steps that are already multiplied in, in plain PyTorch."""

import torch
from torch import Tensor

__all__ = ["segsum", "ssd_minimal_discrete"]


def segsum(x: Tensor) -> Tensor:
    """Sums of segments: [..., T] -> [..., T, T], entry (i, j) is ``x[j+1] + ... + x[i]``, -inf where j > i."""
    T = x.shape[-1]
    lower = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    # each column sums its own terms: no difference of two long sums
    terms = x[..., :, None].expand(*x.shape, T).masked_fill(~lower.tril(-1), 0)
    return terms.cumsum(-2).masked_fill(~lower, -torch.inf)


def ssd_minimal_discrete(
    X: Tensor, A: Tensor, B: Tensor, C: Tensor, block_len: int, initial_states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``S[t] = exp(A[t]) * S[t-1] + outer(X[t], B[t])``, ``Y[t] = S[t] @ C[t]``, block after block.

    Args:
        X: [B, L, H, P] values times their steps.
        A: [B, L, H] log decays, <= 0.
        B, C: [B, L, H, N].
        block_len: >= 1, tokens of a block; L need not be a multiple.
        initial_states: [B, 1, H, P, N] state before the first token (with an axis of blocks); zero if absent.

    Returns:
        Y [B, L, H, P] and the last state [B, H, P, N], in the dtype of X; computed in float32 at least.
    """
    if X.ndim != 4:
        raise ValueError(f"X: expected [B, L, H, P], got shape {tuple(X.shape)}")
    batch, L, H, P = X.shape
    N = B.shape[-1]
    wanted = {"A": (A, (batch, L, H)), "B": (B, (batch, L, H, N)), "C": (C, (batch, L, H, N))}
    if initial_states is not None:
        wanted["initial_states"] = (initial_states, (batch, 1, H, P, N))
    for name, (t, shape) in wanted.items():
        if tuple(t.shape) != shape:
            raise ValueError(f"{name}: expected {shape}, got {tuple(t.shape)}")
    if block_len < 1:
        raise ValueError(f"block_len: expected at least 1, got {block_len}")
    acc = torch.promote_types(X.dtype, torch.float32)
    S = X.new_zeros(batch, H, P, N, dtype=acc) if initial_states is None else initial_states[:, 0].to(acc)
    Y = [X.new_zeros(batch, 0, H, P, dtype=acc)]
    for start in range(0, L, block_len):
        x, a, b, c = (t[:, start : start + block_len].to(acc) for t in (X, A, B, C))
        sums = segsum(a.mT)  # [B, H, l, l]
        since_start = a.mT.cumsum(-1).exp()  # [B, H, l]
        inside = torch.einsum("blhn,bshn,bhls,bshp->blhp", c, b, sums.exp(), x)
        Y.append(inside + torch.einsum("blhn,bhpn,bhl->blhp", c, S, since_start))
        S = since_start[..., -1, None, None] * S + torch.einsum("bshn,bhs,bshp->bhpn", b, sums[..., -1, :].exp(), x)
    return torch.cat(Y, 1).to(X.dtype), S.to(X.dtype)

"""The public function of the SSD operator."""

import torch
from torch import Tensor

from . import library  # noqa: F401  (defines torch.ops.vmamba_npu.ssd_fwd)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """State space duality: the selective scan of Mamba-2 with one scalar decay a head.

    Per batch row and head h, which reads group ``h // (H // G)`` of B and C::

        step   = clamp(softplus?(dt[t] + dt_bias[h]), *dt_limit)
        S[t]   = exp(step * A[h]) * S[t-1] + step * outer(x[t], B[t])          # [P, N]
        y[t]   = (S[t] @ C[t] + D[h] * x[t]) * silu(z[t])

    The state starts from `initial_states` and is set to zero where `seq_idx` changes (before the first token it is
    taken as 0). With `cu_seqlens`, sequence i starts from row i of `initial_states` instead, and has its own final
    state. The result does not depend on `chunk_size`; everything about steps, decays and states is computed in
    float32 at least. A NaN is never hidden: it makes NaN of the outputs of its row and head, from some token of its
    chunk on.

    Source: Mamba-2 (arXiv:2405.21060); docs/ssd.md.

    Args:
        x: [B, L, H, P] values, any float dtype.
        dt: [B, L, H] raw step sizes, any float dtype.
        A: [H] decay rates, <= 0.
        B: [B, L, G, N] input maps, dtype of x; H is a multiple of G.
        C: [B, L, G, N] output maps, dtype of x.
        chunk_size: >= 1; a hint of how many tokens to process as one block, never part of the result.
        D: [H] or [H, P] skip.
        z: [B, L, H, P] gate, dtype of x.
        dt_bias: [H] added to dt.
        initial_states: [B, H, P, N]; with `cu_seqlens` [sequences, H, P, N]. Zero if absent.
        seq_idx: [B, L] integer, the sequence that each token belongs to.
        cu_seqlens: [sequences + 1] integer borders of the sequences packed in one row (B = 1): starts with 0, does not
            decrease, ends with L.
        dt_softplus: apply softplus to the biased steps.
        dt_limit: smallest and largest step; the default sets negative steps to 0.
        backend: "auto", "reference" or "torch".

    Returns:
        y [B, L, H, P] in the dtype of x; final_states [B, H, P, N] (with `cu_seqlens` [sequences, H, P, N]), float32 or
        float64. Both are differentiable.

    Raises:
        ValueError: a shape, device or range differs from the above, or the backend is unknown; the message names it.
        TypeError: a tensor has a dtype that differs from the above.
        BackendUnavailable: the named backend cannot serve this call.
    """
    out = torch.ops.vmamba_npu.ssd_fwd(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
        dt_limit[0], dt_limit[1], backend,
    )  # fmt: skip
    return out[0], out[1]

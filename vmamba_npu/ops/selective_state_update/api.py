"""The public function of the one-token state update."""

import torch
from torch import Tensor

from . import library  # noqa: F401  (defines torch.ops.vmamba_npu.selective_state_update)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> Tensor:
    """One token of a selective scan; `state` is updated in place. For inference: no gradient.

    Per batch row and head h, which reads group ``h // (H // G)`` of B and C::

        step  = clamp(softplus?(dt + dt_bias), *dt_limit)                     # [P]
        state = exp(step[:, None] * A) * state + (step * x)[:, None] * B
        y     = (state @ C + D * x) * silu(z)

    It continues `ssd` exactly if A, dt, dt_bias and D of a head are expanded over P and N (views of stride 0 will do).
    Without heads, every tensor lacks the axes H and G.

    Source: Mamba-2 (arXiv:2405.21060); docs/ssd.md.

    Args:
        state: [S, H, P, N] (or [S, P, N]) any float dtype; the update is computed in float32 at least. S is the batch
            size, or free with `state_batch_indices`.
        x: [batch, H, P] values.
        dt: [batch, H, P] raw steps.
        A: [H, P, N] decay rates.
        B: [batch, G, N] input maps.
        C: [batch, G, N] output maps.
        D: [H, P] skip.
        z: [batch, H, P] gate.
        dt_bias: [H, P] added to dt.
        dt_softplus: apply softplus to the biased steps.
        state_batch_indices: [batch] integer: row b uses state `state_batch_indices[b]`; a negative one marks padding,
            whose output is 0 and which touches no state. A state used twice is undefined.
        dt_limit: smallest and largest step.
        backend: "auto", "reference" or "torch".

    Returns:
        y [batch, H, P] (or [batch, P]) in the dtype of x.

    Raises:
        ValueError: a shape, device or range differs from the above, or the backend is unknown; the message names it.
        TypeError: a tensor has a dtype that differs from the above.
        BackendUnavailable: the named backend cannot serve this call.
    """
    return torch.ops.vmamba_npu.selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, dt_limit[0], dt_limit[1], backend
    )

"""The public function of the gated RMS norm."""

import torch
from torch import Tensor

from . import library  # noqa: F401  (defines torch.ops.vmamba_npu.gated_rms_norm_fwd)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    backend: str = "auto",
) -> Tensor:
    """RMS norm over groups of channels, with a SiLU gate after or before it.

    For every group of `group_size` consecutive channels::

        u = x                             if norm_before_gate or z is absent, else x * silu(z)
        v = u / sqrt(mean(u ** 2) + eps) * weight + bias
        y = v * silu(z)                   if norm_before_gate and z is given, else v

    Source: Mamba-2 (arXiv:2405.21060), the norm before the output projection; docs/norm.md.

    Args:
        x: [..., D] any float dtype; statistics and products are float32 at least.
        weight: [D] any float dtype.
        bias: [D] any float dtype.
        z: [..., D] gate, any float dtype.
        eps: > 0; it keeps a row of zeros finite.
        group_size: divides D; D if None.
        norm_before_gate: whether the gate multiplies the result of the norm or its input.
        backend: "auto", "reference" or "torch".

    Returns:
        y [..., D] in the dtype of x.

    Raises:
        ValueError: a shape, device or range differs from the above, or the backend is unknown; the message names it.
        TypeError: a tensor is not floating-point.
        BackendUnavailable: the named backend cannot serve this call.
    """
    return torch.ops.vmamba_npu.gated_rms_norm_fwd(x, weight, bias, z, eps, group_size, norm_before_gate, backend)

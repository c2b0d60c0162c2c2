"""Gated norms: RMSNorm on the package's operator, and the LayerNorm of the same signature."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..ops import gated_rms_norm, known_backends


def check_backend(name: str) -> str:
    """The name, if it is an accepted `backend`; else ValueError."""
    if name not in known_backends():
        raise ValueError(f"backend: expected one of {', '.join(known_backends())}, got {name!r}")
    return name


def _check_sizes(hidden_size: int, eps: float, group_size: int | None) -> None:
    if hidden_size < 1:
        raise ValueError(f"hidden_size: expected at least 1, got {hidden_size}")
    if not eps > 0:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    if group_size is not None and (group_size < 1 or hidden_size % group_size):
        raise ValueError(f"group_size: expected a divisor of hidden_size = {hidden_size}, got {group_size}")


class RMSNorm(nn.Module):
    """RMS norm over groups of channels, with an optional SiLU gate `z` after or before it.

    Source: the norm before Mamba-2's output projection (arXiv:2405.21060); docs/norm.md.

    Args:
        hidden_size: D, channels.
        eps: > 0; it keeps a row of zeros finite.
        group_size: channels normalised together, a divisor of D; D if None.
        norm_before_gate: whether the gate multiplies the result of the norm or its input.
        device, dtype: of the weight.
        backend: "auto" or a name of the registry; `set_backend` changes it.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device=None,
        dtype=None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, eps, group_size)
        self.hidden_size, self.eps = hidden_size, float(eps)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate
        self.backend = check_backend(backend)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Weight 1."""
        nn.init.ones_(self.weight)

    @torch.jit.ignore
    def set_backend(self, name: str) -> None:
        """Choose who computes the norm from now on; ValueError if the name is not known."""
        self.backend = check_backend(name)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:  # [..., D] -> [..., D]
        return gated_rms_norm(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate, self.backend)

    @torch.jit.ignore
    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, group_size={self.group_size}, backend={self.backend!r}"


class LayerNorm(nn.Module):
    """Layer norm over groups of channels with the gate of `RMSNorm`; plain PyTorch on every device.

    Args:
        hidden_size, eps, group_size, norm_before_gate, device, dtype: as `RMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        _check_sizes(hidden_size, eps, group_size)
        self.hidden_size, self.eps = hidden_size, float(eps)
        self.group_size, self.norm_before_gate = group_size, norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:  # [..., D] -> [..., D]
        wide = torch.promote_types(x.dtype, torch.float32)
        group = self.group_size or self.hidden_size
        u = x.to(wide)
        if z is not None and not self.norm_before_gate:
            u = u * F.silu(z.to(wide))
        v = F.layer_norm(u.unflatten(-1, (-1, group)), (group,), eps=self.eps).flatten(-2)
        v = v * self.weight.to(wide) + self.bias.to(wide)
        if z is not None and self.norm_before_gate:
            v = v * F.silu(z.to(wide))
        return v.to(x.dtype)

"""For tests and benchmarks: which backends run here, drawn inputs, and the one measure of error."""

import torch

from ..backends import operators
from .tolerances import GRADIENTS, OUTPUTS, SUMMED_GRADIENTS, Tolerance, assert_within, error_ratio

__all__ = ["GRADIENTS", "OUTPUTS", "SUMMED_GRADIENTS", "Tolerance", "assert_within", "error_ratio", "serving"]


def serving(op: str, dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """Backends of an operator that serve tensors of this dtype and device on this machine."""
    probe = torch.empty(1, dtype=dtype, device=device)
    return [
        name
        for name, impl in operators()[op].items()
        if (impl.devices is None or probe.device.type in impl.devices)
        and dtype in impl.dtypes
        and impl.missing() is None
    ]

"""For tests and benchmarks: which backends run here, and the one measure of error."""

import torch

from ..backends import operators


def serving(op: str, dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """Backends of an operator that serve tensors of this dtype and device on this machine."""
    probe = torch.empty(1, dtype=dtype, device=device)
    return [
        name
        for name, impl in operators()[op].items()
        if (impl.devices is None or probe.device.type in impl.devices) and dtype in impl.dtypes and impl.missing() is None
    ]


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64, with the expected value rounded to the actual dtype first.

    NaN or infinity in `actual` alone gives NaN or infinity, which fails every `<=` gate. Two zero tensors give 0.
    """
    expected = expected.detach().to(actual.dtype).double()
    distance = (actual.detach().double() - expected).norm()
    return float(distance / expected.norm().clamp_min(1e-12))

"""How far a result may be from its float64 value: one table by dtype, and the check that applies it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest error ratio of the whole tensor, and largest elementwise |a - b| / (atol * max|b| + rtol * |b|) = 1."""

    ratio: float
    rtol: float
    atol: float


OUTPUTS = {
    torch.float64: Tolerance(1e-12, 1e-10, 1e-11),
    torch.float32: Tolerance(2e-5, 1e-4, 1e-4),
    torch.float16: Tolerance(2e-3, 1e-2, 5e-3),
    torch.bfloat16: Tolerance(1e-2, 5e-2, 3e-2),
}
GRADIENTS = {
    torch.float64: Tolerance(1e-11, 1e-9, 1e-10),
    torch.float32: Tolerance(5e-5, 1e-3, 1e-3),
    torch.float16: Tolerance(2e-3, 1e-2, 1e-2),
    torch.bfloat16: Tolerance(1e-2, 5e-2, 5e-2),
}
# Gradients that are sums over all tokens of signed terms: the terms cancel, their rounding does not.
SUMMED_GRADIENTS = {
    torch.float64: Tolerance(5e-11, 1e-9, 1e-10),
    torch.float32: Tolerance(2e-4, 1e-3, 1e-3),
    torch.float16: Tolerance(1e-2, 1e-2, 1e-2),
    torch.bfloat16: Tolerance(5e-2, 5e-2, 5e-2),
}


def error_ratio(actual: Tensor, expected: Tensor, floor: float = 1e-12) -> float:
    """||actual - expected|| / max(||expected||, floor) in float64, with `expected` rounded to the actual dtype first.

    NaN or infinity in `actual` alone gives NaN or infinity, which fails every `<=` gate. Two zero tensors give 0.
    """
    expected = expected.detach().to(actual.dtype).double()
    distance = (actual.detach().double() - expected).norm()
    return float(distance / expected.norm().clamp_min(floor))


def assert_within(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance, floor: float = 1e-12) -> None:
    """Fail, naming the tensor, unless shapes agree and both measures of `tolerance` hold.

    Args:
        floor: size below which the expected value counts as rounding of larger terms, for sums that may cancel to 0.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    ratio = error_ratio(actual, expected, floor)
    assert ratio <= tolerance.ratio, f"{name}: error ratio {ratio:.2e}, allowed {tolerance.ratio:.0e}"
    want = expected.detach().to(actual.dtype).double()
    allowed = tolerance.atol * want.abs().max().clamp_min(floor) + tolerance.rtol * want.abs()
    worst = float(((actual.detach().double() - want).abs() / allowed).max())
    assert worst <= 1, f"{name}: elementwise error {worst:.2f} times what is allowed"

"""What every backend of the gated RMS norm may take for granted; runs on real and on fake tensors."""

from torch import Tensor

from ...backends.checks import expect_device, expect_float, expect_positive, expect_shape


def check_gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
) -> None:
    expect_float(x=x, weight=weight, bias=bias, z=z)
    if x.ndim < 1:
        raise ValueError(f"x: expected [..., D], got shape {tuple(x.shape)}")
    D = x.shape[-1]
    expect_positive(D=D)
    expect_shape("weight", weight, (D,))
    expect_shape("bias", bias, (D,))
    expect_shape("z", z, tuple(x.shape))
    expect_device(x, weight=weight, bias=bias, z=z)
    if not eps > 0:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    if group_size is not None and (group_size < 1 or D % group_size):
        raise ValueError(f"group_size: expected a divisor of the {D} channels of x, got {group_size}")

"""What every backend of SSD may take for granted; runs on real and on fake tensors."""

from itertools import pairwise

from torch import Tensor

from ...backends.checks import (
    expect_device,
    expect_float,
    expect_integer,
    expect_ndim,
    expect_positive,
    expect_same_dtype,
    expect_shape,
)


def check_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> None:
    expect_ndim("x", x, "[B, L, H, P]")
    expect_ndim("B", B, "[B, L, G, N]")
    batch, L, H, P = x.shape
    G, N = B.shape[2:]
    expect_positive(batch=batch, H=H, P=P, G=G, N=N, chunk_size=chunk_size)
    if H % G:
        raise ValueError(f"B: expected a number of groups that divides the {H} heads of x, got {G}")
    expect_shape("dt", dt, (batch, L, H))
    expect_shape("A", A, (H,))
    expect_shape("B", B, (batch, L, G, N))
    expect_shape("C", C, (batch, L, G, N))
    expect_shape("D", D, (H,), (H, P))
    expect_shape("z", z, (batch, L, H, P))
    expect_shape("dt_bias", dt_bias, (H,))
    expect_shape("seq_idx", seq_idx, (batch, L))
    expect_float(x=x, dt=dt, A=A, D=D, dt_bias=dt_bias, initial_states=initial_states)
    expect_same_dtype(x, B=B, C=C, z=z)
    expect_integer(seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    expect_device(x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx)
    if not dt_min <= dt_max:
        raise ValueError(f"dt_limit: expected (smallest, largest), got ({dt_min}, {dt_max})")
    sequences = batch
    if cu_seqlens is not None:
        expect_ndim("cu_seqlens", cu_seqlens, "[sequences + 1]")
        if cu_seqlens.device.type != "cpu":  # borders may stay on the host, where they are read
            expect_device(x, cu_seqlens=cu_seqlens)
        if seq_idx is not None:
            raise ValueError("seq_idx: expected to be absent when cu_seqlens is given, got both")
        if batch != 1:
            raise ValueError(f"cu_seqlens: expected one row (B = 1) of packed sequences, got B = {batch}")
        sequences = cu_seqlens.shape[0] - 1
        expect_positive(cu_seqlens=sequences)
    expect_shape("initial_states", initial_states, (sequences, H, P, N))


def check_borders(cu_seqlens: Tensor, L: int) -> None:
    """Values of cu_seqlens; reads the tensor, so it is called on CPU tensors only."""
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != L or any(a > b for a, b in pairwise(borders)):
        raise ValueError(f"cu_seqlens: expected non-decreasing borders from 0 to L = {L}, got {borders[:8]}")

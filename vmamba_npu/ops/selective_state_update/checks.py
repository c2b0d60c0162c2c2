"""What every backend of the state update may take for granted; runs on real and on fake tensors."""

from torch import Tensor

from ...backends.checks import expect_device, expect_float, expect_integer, expect_positive, expect_shape


def check_selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    dt_min: float,
    dt_max: float,
) -> None:
    if state.ndim not in (3, 4):
        raise ValueError(f"state: expected [S, H, P, N] or [S, P, N], got shape {tuple(state.shape)}")
    heads, P, N = tuple(state.shape[1:-2]), state.shape[-2], state.shape[-1]
    if x.ndim != state.ndim - 1:
        raise ValueError(f"x: expected {'[batch, H, P]' if heads else '[batch, P]'}, got shape {tuple(x.shape)}")
    batch = x.shape[0]
    groups = (B.shape[1],) if heads and B.ndim == 3 else ()
    expect_positive(batch=batch, P=P, N=N, **({"H": heads[0]} if heads else {}))
    expect_shape("x", x, (batch, *heads, P))
    expect_shape("dt", dt, (batch, *heads, P))
    expect_shape("z", z, (batch, *heads, P))
    expect_shape("A", A, (*heads, P, N))
    expect_shape("D", D, (*heads, P))
    expect_shape("dt_bias", dt_bias, (*heads, P))
    if heads and B.ndim != 3:
        raise ValueError(f"B: expected [batch, G, N], got shape {tuple(B.shape)}")
    expect_shape("B", B, (batch, *groups, N))
    expect_shape("C", C, (batch, *groups, N))
    if groups and (groups[0] < 1 or heads[0] % groups[0]):
        raise ValueError(f"B: expected a number of groups that divides the {heads[0]} heads, got {groups[0]}")
    expect_shape("state_batch_indices", state_batch_indices, (batch,))
    if state_batch_indices is None and state.shape[0] != batch:
        raise ValueError(f"state: expected {batch} rows, one for each row of x, got {state.shape[0]}")
    expect_float(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    expect_integer(state_batch_indices=state_batch_indices)
    expect_device(state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state_batch_indices=state_batch_indices)
    if not dt_min <= dt_max:
        raise ValueError(f"dt_limit: expected (smallest, largest), got ({dt_min}, {dt_max})")

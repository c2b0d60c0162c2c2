"""selective_state_update: every backend against its formula in float64, and against the scan that it continues."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmamba_npu.ops import selective_state_update, ssd
from vmamba_npu.testing import error_ratio, serving

BACKENDS = serving("selective_state_update", torch.float64)


def formula(state, x, dt, A, B, C, D, z, dt_bias, softplus, indices, low, high):
    """(y, state) with heads, on a copy of the state."""
    state, y = state.clone(), torch.zeros_like(x)
    for b in range(x.shape[0]):
        row = b if indices is None else int(indices[b])
        if row < 0:
            continue
        for h in range(x.shape[1]):
            g = h // (x.shape[1] // B.shape[1])
            step = dt[b, h] if dt_bias is None else dt[b, h] + dt_bias[h]
            step = (1 + step.exp()).log() if softplus else step
            step = step.clamp(low, high)
            state[row, h] = (step[:, None] * A[h]).exp() * state[row, h] + torch.outer(step * x[b, h], B[b, g])
            o = state[row, h] @ C[b, g] + (0 if D is None else D[h] * x[b, h])
            y[b, h] = o if z is None else o * z[b, h] / (1 + (-z[b, h]).exp())
    return y, state


def draw(seed, batch, rows, H, P, N, G, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def t(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    return dict(
        state=t(rows, H, P, N), x=t(batch, H, P), dt=t(batch, H, P), A=-t(H, P, N).abs(), B=t(batch, G, N),
        C=t(batch, G, N), D=t(H, P), z=t(batch, H, P), dt_bias=t(H, P),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    P=st.sampled_from([1, 3, 4]),
    N=st.sampled_from([1, 5]),
    absent=st.sets(st.sampled_from(["D", "z", "dt_bias"])),
    softplus=st.booleans(),
    indexed=st.booleans(),
    limit=st.sampled_from([(0.0, inf), (0.1, 0.9)]),
    seed=st.integers(0, 99),
)
def test_against_the_formula(backend, groups, P, N, absent, softplus, indexed, limit, seed):
    H, G = groups
    call = draw(seed, 3, 5 if indexed else 3, H, P, N, G) | dict.fromkeys(absent)
    indices = torch.tensor([4, -1, 0]) if indexed else None
    want, end = formula(*call.values(), softplus, indices, *limit)
    y = selective_state_update(
        **call, dt_softplus=softplus, state_batch_indices=indices, dt_limit=limit, backend=backend
    )
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(call["state"], end)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("indices", [[-1, -1, -1], [-1, 2, -5], [3, 1, -1]])
def test_padding_rows_give_zeros_and_touch_no_state(backend, indices):
    """Whatever they hold; the state lies in memory as it likes."""
    call = draw(7, 3, 5, 2, 3, 4, 1)
    call["state"] = call["state"].transpose(0, 3).contiguous().transpose(0, 3)
    indices = torch.tensor(indices, dtype=torch.int32)
    want, end = formula(*call.values(), False, indices, 0.0, inf)
    call["x"][indices < 0] = float("nan")
    y = selective_state_update(**call, state_batch_indices=indices, backend=backend)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(call["state"], end)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_heads(backend):
    call = draw(2, 3, 3, 1, 4, 5, 1)
    want, end = formula(*call.values(), True, None, 0.0, inf)
    flat = {name: t[0] if name in ("A", "D", "dt_bias") else t[:, 0] for name, t in call.items()}
    y = selective_state_update(**flat, dt_softplus=True, backend=backend)
    torch.testing.assert_close(y, want[:, 0])
    torch.testing.assert_close(call["state"], end)  # flat["state"] is a view of it


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("materialised", [True, False])
def test_step_by_step_equals_the_scan(backend, materialised):
    """With steps and decays expanded over a head, as views or as tensors."""
    H, P, N, L = 4, 3, 5, 7
    g = torch.Generator().manual_seed(3)
    x, z = torch.randn(2, 2, L, H, P, generator=g, dtype=torch.float64)
    dt = torch.randn(2, L, H, generator=g, dtype=torch.float64)
    B, C = torch.randn(2, 2, L, 2, N, generator=g, dtype=torch.float64)
    A, D, bias = -torch.rand(3, H, generator=g, dtype=torch.float64)
    want, end = ssd(x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True, dt_limit=(0.3, 0.8), backend="reference")
    state = torch.zeros(2, H, P, N, dtype=torch.float64)
    wide = [A[:, None, None].expand(H, P, N), D[:, None].expand(H, P), bias[:, None].expand(H, P)]
    wide = [t.contiguous() for t in wide] if materialised else wide
    for t in range(L):
        step = dt[:, t, :, None].expand(2, H, P)
        y = selective_state_update(
            state, x[:, t], step, wide[0], B[:, t], C[:, t], wide[1], z[:, t], wide[2], True,
            dt_limit=(0.3, 0.8), backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(y, want[:, t])
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
def test_narrow_dtypes(backend, dtype, limit, state_dtype):
    call = draw(4, 2, 2, 4, 8, 16, 2, dtype)
    call["state"] = call["state"].to(state_dtype or dtype)
    want, end = formula(*(t.double() for t in call.values()), True, None, 0.0, inf)
    y = selective_state_update(**call, dt_softplus=True, backend=backend)
    assert y.dtype == dtype and call["state"].dtype == (state_dtype or dtype)
    assert error_ratio(y, want) <= limit
    assert error_ratio(call["state"], end) <= limit


def test_one_step_of_the_reference_is_differentiable():
    from vmamba_npu.ops.selective_state_update.reference import step

    call = draw(5, 1, 1, 1, 3, 4, 1)
    inputs = [t[0, 0] if t.ndim == 4 or (t.ndim == 3 and name != "A") else t[0] for name, t in call.items()]
    inputs = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *t: step(*t, True, 0.0, inf), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("indexed", [True, False])
def test_contract(backend, indexed):
    call = draw(1, 2, 2, 4, 3, 5, 2, torch.float32)
    indices = torch.tensor([1, 0]) if indexed else None
    op = torch.ops.vmamba_npu.selective_state_update.default
    torch.library.opcheck(op, (*call.values(), True, indices, 0.0, 5.0, backend))


def test_compiled_update_changes_the_state_as_eager():
    call = draw(6, 2, 2, 4, 3, 5, 2)
    other = call | dict(state=call["state"].clone())
    want = selective_state_update(**other)
    got = torch.compile(selective_state_update, fullgraph=True, backend="aot_eager")(**call)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(call["state"], other["state"])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(state=torch.ones(2, 3)), ValueError, "state: expected"),
        (dict(state=torch.ones(3, 4, 3, 5)), ValueError, "state: expected 2 rows.*got 3"),
        (dict(state=torch.ones(2, 4, 3, 5, dtype=torch.int32)), TypeError, "state: expected a floating-point"),
        (dict(x=torch.ones(2, 3)), ValueError, "x: expected"),
        (dict(x=torch.ones(2, 4, 2)), ValueError, r"x: expected shape \(2, 4, 3\), got \(2, 4, 2\)"),
        (dict(dt=torch.ones(2, 4)), ValueError, "dt: expected shape"),
        (dict(A=-torch.ones(4)), ValueError, "A: expected shape"),
        (dict(B=torch.ones(2, 5)), ValueError, "B: expected"),
        (dict(B=torch.ones(2, 3, 5), C=torch.ones(2, 3, 5)), ValueError, "B: .*divides the 4 heads, got 3"),
        (dict(C=torch.ones(2, 1, 5)), ValueError, "C: expected shape"),
        (dict(D=torch.ones(4)), ValueError, "D: expected shape"),
        (dict(z=torch.ones(2, 4, 3, device="meta")), ValueError, "z: expected device"),
        (dict(dt_bias=torch.ones(4)), ValueError, "dt_bias: expected shape"),
        (
            dict(state_batch_indices=torch.tensor([0, 7])),
            ValueError,
            "state_batch_indices: expected rows below 2, got 7",
        ),
        (dict(dt_limit=(1.0, 0.0)), ValueError, "dt_limit"),
        (dict(backend="fast"), ValueError, "'fast'"),
        (dict(softplus=True), TypeError, "softplus"),
    ],
)
def test_bad_input_names_the_argument(change, error, words):
    with pytest.raises(error, match=words):
        selective_state_update(**(draw(1, 2, 2, 4, 3, 5, 2, torch.float32) | change))

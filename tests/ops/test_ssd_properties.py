"""ssd: what must hold whatever the numbers are (invariances, extremes, NaN), and numbers worked out elsewhere."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmamba_npu.ops import ssd
from vmamba_npu.testing import OUTPUTS, assert_within, error_ratio, serving
from vmamba_npu.testing.ssd import definition, draw, leaves

BACKENDS = serving("ssd", torch.float64)
TOKENS = ("x", "dt", "B", "C", "z", "seq_idx")  # arguments with a token axis, which is their second
ROWS = (*TOKENS, "initial_states")  # arguments with a batch axis, which is their first
FULL = {"batch": 2, "H": 4, "G": 2, "D": "channel", "z": True, "dt_bias": True, "states": True, "softplus": True}


def part(call, names, change):
    return {k: change(v) if k in names else v for k, v in call.items()}


def all_gradients(out, call):
    """Gradients of a fixed sum of the outputs by every floating-point argument."""
    g = torch.Generator().manual_seed(5)
    d_out = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in out]
    return torch.autograd.grad(out, list(leaves(call).values()), d_out, retain_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@given(L=st.sampled_from([1, 5, 64, 67, 130]), chunk_size=st.integers(1, 200), seed=st.integers(0, 99))
def test_chunk_size_changes_nothing(backend, L, chunk_size, seed):
    call = draw(seed, L=L, **FULL)
    got, want = ssd(**call, chunk_size=chunk_size, backend=backend), ssd(**call, chunk_size=64, backend=backend)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(all_gradients(got, call), all_gradients(want, call))


@pytest.mark.parametrize("backend", BACKENDS)
@given(L=st.sampled_from([5, 67, 130]), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_split_sequence_with_carried_state_equals_whole(backend, L, share, seed):
    call, cut = draw(seed, L=L, **FULL), round(share * L)
    whole = ssd(**call, backend=backend)
    y1, middle = ssd(**part(call, TOKENS, lambda t: t[:, :cut]), backend=backend)
    second = part(call, TOKENS, lambda t: t[:, cut:]) | {"initial_states": middle}
    y2, final = ssd(**second, backend=backend)
    pieces = torch.cat([y1, y2], 1), final
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(all_gradients(pieces, call), all_gradients(whole, call))


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_by_token_equals_whole(backend):
    call = draw(L=9, **FULL)
    ys, state = [], call["initial_states"]
    for t in range(9):
        step = part(call, TOKENS, lambda v, t=t: v[:, t : t + 1]) | {"initial_states": state}
        y, state = ssd(**step, backend=backend)
        ys.append(y)
    torch.testing.assert_close((torch.cat(ys, 1), state), ssd(**call, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [None, "seq_idx"])
@pytest.mark.parametrize("L", [6, 70])
def test_batch_order_changes_nothing_else(backend, L, packed):
    call, order = draw(L=L, packed=packed, **(FULL | {"batch": 4})), [2, 0, 3, 1]
    y, final = ssd(**call, backend=backend)
    moved = ssd(**part(call, ROWS, lambda t: t[order]), backend=backend)
    torch.testing.assert_close(moved, (y[order], final[order]))
    alone = ssd(**part(call, ROWS, lambda t: t[2:3]), backend=backend)
    torch.testing.assert_close(alone, (y[2:3], final[2:3]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("L", [6, 60, 64])
def test_padding_tokens_with_step_zero_change_nothing(backend, L):
    call = draw(L=L, **(FULL | {"softplus": False}))
    y, final = ssd(**call, backend=backend)

    def padded(t):
        return torch.cat([t, torch.ones(2, 9, *t.shape[2:], dtype=t.dtype)], 1)

    longer = part(call, TOKENS, padded)
    longer["dt"] = torch.cat([call["dt"], torch.full((2, 9, 4), -1e4, dtype=torch.float64)], 1)  # clamped to 0
    y_padded, final_padded = ssd(**longer, backend=backend)
    torch.testing.assert_close((y_padded[:, :L], final_padded), (y, final))


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_do_not_reach_earlier_ones(backend):
    call = draw(L=70, **FULL)
    y = ssd(**call, backend=backend)[0]
    changed = part(call, TOKENS, lambda t: torch.cat([t[:, :33], t[:, 33:] + 1], 1))
    torch.testing.assert_close(ssd(**changed, backend=backend)[0][:, :33], y[:, :33], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("A", [0.0, -1e-3, -1.0, -100.0])
@pytest.mark.parametrize("dt", [0.0, 1.0, 1e3, "mixed"])
@pytest.mark.parametrize("packed", [None, "seq_idx"])
def test_extreme_decays(backend, dtype, A, dt, packed):
    """No decay, total decay, steps of 0 to 1000: finite outputs and gradients, right values."""
    call = draw(L=70, H=2, D="head", z=True, states=True, packed=packed, dtype=dtype)
    step = torch.full_like(call["dt"].detach(), 1.0 if dt == "mixed" else dt)
    if dt == "mixed":
        step[:, ::3], step[:, 1::3] = 1e3, 0
    call |= {"A": torch.full_like(call["A"], A).requires_grad_(), "dt": step.requires_grad_()}
    got, want = ssd(**call, backend=backend), definition(**part(call, leaves(call), lambda t: t.detach().double()))
    assert all(t.isfinite().all() for t in (*got, *all_gradients(got, call)))
    if dtype == torch.float64 or dt != "mixed":  # float32 sums of decays lose small steps beside large ones
        for name, a, b in zip(("y", "final_states"), got, want, strict=True):
            assert error_ratio(a, b) <= OUTPUTS[dtype].ratio, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_total_decay_leaves_the_token_alone(backend):
    """exp(-1000) is 0 in every dtype: y[t] = step * (C[t] . B[t]) x[t], and nothing reaches the initial state."""
    call = draw(L=70, H=2, states=True)
    call |= {"A": torch.full((2,), -1e3, dtype=torch.float64), "dt": torch.ones(1, 70, 2, dtype=torch.float64)}
    y, final = ssd(**call, backend=backend)
    torch.testing.assert_close(y, (call["B"] * call["C"]).sum(-1)[..., None] * call["x"])
    (d_initial,) = torch.autograd.grad(y.sum() + final.sum(), [call["initial_states"]])
    assert (d_initial == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("at", [0, 40, 63, 64, 100])
@pytest.mark.parametrize("options", [{}, {"softplus": True}, {"dt_limit": (0.1, 0.5)}], ids=str)
def test_nan_in_dt_is_not_hidden(backend, at, options):
    """NaN from the token on, in its row and head alone; nothing before its chunk changes."""
    call = draw(batch=2, L=130, H=2, **options)
    clean_y, clean_final = ssd(**call, backend=backend)
    dt = call["dt"].detach().clone()
    dt[1, at, 0] = math.nan
    call["dt"] = dt.requires_grad_()
    y, final = ssd(**call, backend=backend)
    assert y[1, at:, 0].isnan().all() and final[1, 0].isnan().all()
    for got, clean in ((y[0], clean_y[0]), (y[1, :, 1], clean_y[1, :, 1]), (final[1, 1], clean_final[1, 1])):
        torch.testing.assert_close(got, clean)
    start = max(0, at - 63)  # a chunk has at most 64 tokens, wherever it begins
    torch.testing.assert_close(y[1, :start, 0], clean_y[1, :start, 0])
    (d_dt,) = torch.autograd.grad(y.sum(), [call["dt"]])
    assert d_dt[1, at, 0].isnan() and d_dt[0].isfinite().all() and d_dt[1, :, 1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_backward_of_a_kept_graph_repeats_the_first(backend):
    call = draw(L=67, **FULL)
    loss = sum(t.square().sum() for t in ssd(**call, backend=backend))
    loss.backward(retain_graph=True)
    first = {name: t.grad.clone() for name, t in leaves(call).items()}
    loss.backward()
    for name, t in leaves(call).items():
        torch.testing.assert_close(t.grad, 2 * first[name])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_gradient_is_an_error(backend):
    call = draw(L=5)
    y = ssd(**call, backend=backend)[0]
    with pytest.raises(RuntimeError):
        (dx,) = torch.autograd.grad(y.square().sum(), [call["x"]], create_graph=True)
        torch.autograd.grad(dx.sum(), [call["x"]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone_and_outputs_are_new(backend):
    call = draw(L=67, packed="seq_idx", **FULL)
    before = {k: v.detach().clone() for k, v in call.items() if isinstance(v, torch.Tensor)}
    out = ssd(**call, backend=backend)
    all_gradients(out, call)
    again = ssd(**call, backend=backend)
    assert all(torch.equal(call[k], v) for k, v in before.items())
    torch.testing.assert_close(out, again, rtol=0, atol=0)  # the second call did not write into the first's results
    assert {t.untyped_storage().data_ptr() for t in out}.isdisjoint(t.untyped_storage().data_ptr() for t in again)


def test_seventy_thousand_tokens():
    """L = 70000, H = P = N = 1 in float32, forward and gradients, against a loop over Python floats."""
    L = 70_000
    call = draw(L=L, H=1, P=1, N=1, dtype=torch.float32)
    y, final = ssd(**call, backend="torch")
    x, dt, B, C = (call[k].detach().double().flatten().tolist() for k in ("x", "dt", "B", "C"))
    step, A = [max(t, 0.0) for t in dt], call["A"].item()
    S, want = 0.0, []
    for t in range(L):
        S = math.exp(step[t] * A) * S + step[t] * x[t] * B[t]
        want.append(S * C[t])
    assert_within("y", y.flatten(), torch.tensor(want, dtype=torch.float64), OUTPUTS[torch.float32])
    assert_within("final_states", final.flatten(), torch.tensor([S], dtype=torch.float64), OUTPUTS[torch.float32])
    (dx,) = torch.autograd.grad(y.sum(), [call["x"]])
    dS, want = 0.0, [0.0] * L
    for t in reversed(range(L)):
        dS += C[t]
        want[t] = step[t] * B[t] * dS
        dS *= math.exp(step[t] * A)
    assert_within("dx", dx.flatten(), torch.tensor(want, dtype=torch.float64), OUTPUTS[torch.float32])


# Sum and sum of squares of each result, from a float64 program of the recurrence that shares no code with this package.
WORKED = {
    "y": (54.5803654917, 76.0462257629),
    "final_states": (-63.1568631237, 50.7386512833),
    "x": (-63.9627996030, 194.1108893637),
    "dt": (-0.7759563797, 6.9775943755),
    "A": (-3.4693846846, 24.0293668545),
    "B": (38.5060315928, 90.6786712610),
    "C": (100.4009890527, 159.7803098031),
    "D": (-10.0207357996, 8.6384573431),
    "z": (-47.4186538159, 95.1486512677),
    "dt_bias": (-0.7759563797, 2.5158007819),
    "initial_states": (6.4505431508, 2.8872566473),
}
WORKED_SEQ_IDX = {
    "y": (52.8567321192, 69.0411859812),
    "final_states": (-56.3203811090, 42.2558031335),
    "x": (-64.2663746553, 192.9808846941),
    "dt": (0.1330678390, 8.4482874147),
    "A": (0.2607673064, 5.2432784146),
    "initial_states": (5.7349205987, 3.0607885539),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_size", [1, 2, 64])
@pytest.mark.parametrize(
    ("seq_idx", "worked"),
    [(None, WORKED), ([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]], WORKED_SEQ_IDX)],
    ids=["plain", "seq_idx"],
)
def test_worked_numbers(backend, chunk_size, seq_idx, worked):
    def v(k, *shape):
        return torch.sin(0.37 * torch.arange(math.prod(shape), dtype=torch.float64) + k).reshape(shape)

    batch, L, H, P, G, N = 2, 5, 4, 3, 2, 6
    call = {"x": v(1, batch, L, H, P), "dt": v(2, batch, L, H), "A": -1.5 - v(3, H), "B": v(4, batch, L, G, N)}
    call |= {"C": v(5, batch, L, G, N), "D": v(6, H, P), "z": v(7, batch, L, H, P), "dt_bias": v(8, H)}
    call |= {"initial_states": v(9, batch, H, P, N)}
    call = {k: t.requires_grad_() for k, t in call.items()}
    indices = None if seq_idx is None else torch.tensor(seq_idx, dtype=torch.int32)
    y, final = ssd(
        **call, seq_idx=indices, chunk_size=chunk_size, dt_softplus=True, dt_limit=(0.2, 1.1), backend=backend
    )
    d = torch.autograd.grad((y, final), list(call.values()), (v(10, *y.shape), v(11, *final.shape)))
    results = {"y": y, "final_states": final} | dict(zip(call, d, strict=True))
    for name, (total, squares) in worked.items():
        assert math.isclose(results[name].sum().item(), total, abs_tol=1e-9), name
        assert math.isclose(results[name].square().sum().item(), squares, abs_tol=1e-9), name

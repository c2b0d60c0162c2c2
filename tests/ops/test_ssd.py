"""ssd: every backend against the recurrence in float64, forward and all gradients."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmamba_npu.ops import ssd
from vmamba_npu.testing import GRADIENTS, OUTPUTS, SUMMED_GRADIENTS, assert_within, serving
from vmamba_npu.testing.ssd import SUMMED, definition, draw, in_float64, leaves

BACKENDS = serving("ssd", torch.float64)
BY_DTYPE = [(dtype, name) for dtype in OUTPUTS for name in serving("ssd", dtype)]
# Below this size a gradient that is a sum is the rounding of terms of size 1 that cancelled.
FLOOR = 0.1


def gradients(out, call, d_out):
    if not any(t.requires_grad for t in out):  # the definition without tokens and states is a constant
        return {name: torch.zeros_like(t) for name, t in leaves(call).items()}
    connected = [i for i, t in enumerate(out) if t.requires_grad]
    out, d_out = [out[i] for i in connected], None if d_out is None else [d_out[i] for i in connected]
    d = torch.autograd.grad(out, list(leaves(call).values()), d_out, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves(call), d, strict=True))


def check(call, backend, chunk_size=64):
    """Outputs, their dtypes, and the gradients of every floating-point argument through both outputs."""
    dtype = call["x"].dtype
    exact = in_float64(call)
    got, want = ssd(**call, chunk_size=chunk_size, backend=backend), definition(**exact)
    assert got[0].dtype == dtype and got[1].dtype == torch.promote_types(dtype, torch.float32)
    for name, a, b in zip(("y", "final_states"), got, want, strict=True):
        assert_within(name, a, b, OUTPUTS[dtype])
    g = torch.Generator().manual_seed(7)
    d_out = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in got]
    got_d, want_d = gradients(got, call, d_out), gradients(want, exact, [d.double() for d in d_out])
    for name, leaf in leaves(call).items():
        assert got_d[name].dtype == leaf.dtype
        tolerance = SUMMED_GRADIENTS[dtype] if name in SUMMED else GRADIENTS[dtype]
        assert_within("d" + name, got_d[name], want_d[name], tolerance, FLOOR if name in SUMMED else 1e-2)


def test_reference_and_torch_are_tested():
    assert {"reference", "torch"} <= set(BACKENDS)


OPTIONS = {
    "batch": st.integers(1, 3),
    "H": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 3)]),  # H, G
    "P": st.sampled_from([1, 3, 8]),
    "N": st.sampled_from([1, 5, 8]),
    "D": st.sampled_from([None, "head", "channel"]),
    "z": st.booleans(),
    "dt_bias": st.booleans(),
    "states": st.booleans(),
    "packed": st.sampled_from([None, "seq_idx", "cu_seqlens"]),
    "softplus": st.booleans(),
    "dt_limit": st.sampled_from([(0.0, math.inf), (0.2, 0.9), (-0.1, 0.4), (0.5, 0.5)]),
    "seed": st.integers(0, 999),
}


def shaped(H, **options):
    return draw(H=H[0], G=H[1], **options)


@pytest.mark.parametrize("backend", BACKENDS)
@given(L=st.sampled_from([0, 1, 2, 3, 7, 13, 16, 31]), chunk_size=st.sampled_from([1, 4, 5, 64]), **OPTIONS)
def test_short_sequences(backend, L, chunk_size, **options):
    check(shaped(L=L, **options), backend, chunk_size)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    L=st.sampled_from([63, 64, 65, 97, 127, 128, 129, 193, 200]), chunk_size=st.sampled_from([16, 64, 256]), **OPTIONS
)
def test_sequences_of_several_chunks(backend, L, chunk_size, **options):
    check(shaped(L=L, **options), backend, chunk_size)


@pytest.mark.parametrize(("dtype", "backend"), BY_DTYPE, ids=str)
@given(L=st.sampled_from([1, 5, 37, 66, 131]), **OPTIONS)
def test_dtypes(dtype, backend, L, **options):
    check(shaped(L=L, dtype=dtype, **options), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("P", [1, 3, 80, 192])
@pytest.mark.parametrize("N", [5, 48])
def test_short_and_odd_sizes(backend, P, N):
    for L in range(1, 9):
        check(draw(seed=L, L=L, P=P, N=N, H=2, G=2, states=True, dtype=torch.float32), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_sequence_per_token(backend):
    call = draw(L=70, batch=2, states=True, D="head")
    check(call | {"seq_idx": torch.arange(70).repeat(2, 1)}, backend)
    check(call | {"seq_idx": torch.arange(70).repeat(2, 1) + 3}, backend)  # no token sees the initial states
    call = draw(L=70, states=False, D="head")
    check(call | {"cu_seqlens": torch.arange(71)}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_seq_idx_may_return_to_an_earlier_value(backend):
    """A change of seq_idx is what restarts the state, whatever the values are."""
    call = draw(L=70, batch=2, states=True)
    check(call | {"seq_idx": torch.tensor([0, 0, 5, 2, 2, 5, 0] * 10).repeat(2, 1)}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("borders", [[0, 9], [0, 0, 9], [0, 9, 9], [0, 0, 0, 4, 4, 9, 9], [0, 1, 9]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_have_their_own_states(backend, borders, dtype):
    """Each packed sequence is what a call on it alone gives; an empty one hands its initial state on."""
    call = draw(L=9, H=4, G=2, D="channel", z=True)
    initial = torch.randn(len(borders) - 1, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    packed = call | {"initial_states": initial, "cu_seqlens": torch.tensor(borders, dtype=dtype)}
    y, final = ssd(**packed, backend=backend)
    for i, (a, b) in enumerate(pairwise(borders)):
        alone = {k: v[:, a:b] if k in ("x", "dt", "B", "C", "z") else v for k, v in call.items()}
        want = definition(**alone, initial_states=initial[i : i + 1])
        torch.testing.assert_close((y[:, a:b], final[i : i + 1]), want)
    check(packed, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_of_no_tokens(backend):
    """L = 0: no output, the state passes through, and the gradient with it."""
    check(draw(L=0, batch=2, states=True, D="head", z=True, dt_bias=True), backend)
    call = draw(L=0, H=2) | {"cu_seqlens": torch.zeros(4, dtype=torch.int32)}
    check(call | {"initial_states": torch.randn(3, 2, 3, 4, dtype=torch.float64, requires_grad=True)}, backend)


def strided(t):
    """The same values in memory of another order, with gaps."""
    if t.ndim < 2:
        return torch.stack([t, t + 1], -1)[..., 0]
    wide = t.new_full((*t.shape[::-1], 2), math.nan if t.is_floating_point() else -7)
    wide[..., 0] = t.permute(*reversed(range(t.ndim)))
    return wide[..., 0].permute(*reversed(range(t.ndim)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("L", [5, 70])
def test_strided_inputs(backend, L):
    call = draw(batch=2, L=L, H=4, G=2, D="channel", z=True, dt_bias=True, states=True, packed="seq_idx")
    moved = {k: strided(t.detach()).requires_grad_() for k, t in leaves(call).items()}
    moved["seq_idx"] = strided(call["seq_idx"])
    assert not any(t.is_contiguous() for t in moved.values())
    assert all(torch.equal(moved[name], call[name]) for name in moved)
    check(call | moved, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("L", [5, 70])
def test_expanded_inputs(backend, L):
    """Stride 0 along each axis in turn: the gradient of the unexpanded tensor is the sum."""
    shapes = {"x": (2, L, 4, 3), "dt": (2, L, 4), "A": (4,), "B": (2, L, 2, 4), "C": (2, L, 2, 4), "D": (4, 3)}
    shapes |= {"z": (2, L, 4, 3), "initial_states": (2, 4, 3, 4), "dt_bias": (4,)}
    g = torch.Generator().manual_seed(3)
    for axis in range(4):
        small = {}
        for name, shape in shapes.items():
            size = [1 if i == axis % len(shape) else n for i, n in enumerate(shape)]
            value = torch.randn(size, generator=g, dtype=torch.float64)
            small[name] = (-value.abs() if name == "A" else value).requires_grad_()
        call = {name: t.expand(shapes[name]) for name, t in small.items()}
        got, want = ssd(**call, dt_softplus=True, backend=backend), definition(**call, dt_softplus=True)
        torch.testing.assert_close(got, want)
        d_out = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in got]
        inputs = list(small.values())
        torch.testing.assert_close(torch.autograd.grad(got, inputs, d_out), torch.autograd.grad(want, inputs, d_out))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_one_output_alone(backend):
    """An output without a cotangent, and a cotangent of stride 0 (what sum() sends back)."""
    call = draw(batch=2, L=67, H=4, G=2, D="head", z=True, dt_bias=True, states=True, softplus=True)
    for which in (0, 1):
        got, want = ssd(**call, backend=backend)[which], definition(**call)[which]
        got_d, want_d = gradients((got.sum(),), call, None), gradients((want.sum(),), call, None)
        torch.testing.assert_close(got_d, want_d)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_requires_a_gradient_gets_one(backend):
    for name in leaves(draw(D="head", z=True, dt_bias=True, states=True)):
        call = draw(L=9, D="head", z=True, dt_bias=True, states=True)
        want = gradients((definition(**call)[0].sum(),), call, None)[name]
        call = {k: v.detach() if isinstance(v, torch.Tensor) and k != name else v for k, v in call.items()}
        ssd(**call, backend=backend)[0].sum().backward()
        torch.testing.assert_close(call[name].grad, want)
        assert all(call[k].grad is None for k in leaves(call) if k != name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_on_a_limit_still_has_a_gradient(backend):
    """The derivative of the clamp is 1 on both limits and 0 beyond them."""
    call = draw(L=5, H=1, dt_limit=(0.25, 0.75))
    call["dt"] = torch.tensor([0.2, 0.25, 0.5, 0.75, 0.8], dtype=torch.float64).view(1, 5, 1).requires_grad_()
    (d_dt,) = torch.autograd.grad(ssd(**call, backend=backend)[0].sum(), [call["dt"]])
    assert (d_dt.flatten() != 0).tolist() == [False, True, True, True, False]
    check(call, backend)

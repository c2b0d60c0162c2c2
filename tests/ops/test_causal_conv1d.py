"""causal_conv1d: every backend against the formula in float64, forward and all gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmamba_npu.ops import causal_conv1d, causal_conv1d_varlen_states
from vmamba_npu.testing import error_ratio, serving

BACKENDS = serving("causal_conv1d", torch.float64)


def formula(x, weight, bias, seq_idx, initial_states, activation):
    """(out, final_states) term by term."""
    batch, channels, L = x.shape
    W = weight.shape[1]
    before = x.new_zeros(batch, channels, W - 1) if initial_states is None else initial_states
    X = torch.cat([before, x], 2)
    rows = []
    for b in range(batch):
        tokens = []
        for t in range(L):
            p = torch.zeros_like(weight[:, 0]) if bias is None else bias
            for j in range(W):
                u = t - (W - 1) + j
                if seq_idx is None or (u >= 0 and seq_idx[b, u] == seq_idx[b, t]):
                    p = p + weight[:, j] * X[b, :, u + W - 1]
            p = p if activation is None else p / (1 + (-p).exp())
            tokens.append(p if seq_idx is None or seq_idx[b, t] >= 0 else 0 * p)
        rows.append(torch.stack(tokens, 1) if tokens else x[b])
    final = X[:, :, L:]
    if seq_idx is not None and L:
        last = seq_idx[:, -1:]
        same = torch.nn.functional.pad((seq_idx == last) & (last >= 0), (W - 1, 0))[:, L:]
        final = final * same[:, None]
    return torch.stack(rows), final


def draw(seed, B, channels, L, W, bias, states, channels_last, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def t(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    x = t(B, L, channels).mT if channels_last else t(B, channels, L)
    optional = (t(channels) if bias else None, t(B, channels, W - 1) if states else None)
    return [None if v is None else v.requires_grad_() for v in (x, t(channels, W), *optional)]


def check(got, want, inputs):
    torch.testing.assert_close(got, want)
    leaves = [t for t in inputs if t is not None]
    d = [torch.randn_like(t) for t in want]
    # a weight of width 0 or states of width 0 reach no output
    got_d = torch.autograd.grad(got, leaves, d, allow_unused=True, materialize_grads=True)
    want_d = torch.autograd.grad(want, leaves, d, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got_d, want_d)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    B=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 5]),
    L=st.sampled_from([0, 1, 2, 3, 4, 11]),
    W=st.integers(1, 5),
    bias=st.booleans(),
    states=st.booleans(),
    channels_last=st.booleans(),
    activation=st.sampled_from([None, "silu", "swish"]),
    seed=st.integers(0, 99),
)
def test_forward_and_gradients(backend, B, channels, L, W, bias, states, channels_last, activation, seed):
    x, weight, b, initial = draw(seed, B, channels, L, W, bias, states, channels_last)
    got = causal_conv1d(x, weight, b, None, initial, activation, backend)
    want = formula(x, weight, b, None, initial, activation)
    check(got, want, (x, weight, b, initial))
    if channels > 1 and L > 1:
        assert (got[0].stride(1) == 1) == channels_last


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    padding=st.integers(0, 2),
    W=st.integers(1, 4),
    channels_last=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    seed=st.integers(0, 99),
)
def test_sequences_in_rows(backend, lengths, padding, W, channels_last, activation, seed):
    """Rows hold different sequences; tokens of index -1 are padding. Several rows: the weight's gradient adds up."""
    L = max(map(sum, lengths)) + padding
    seq_idx = torch.full((len(lengths), L), -1, dtype=torch.int32)
    for row, parts in zip(seq_idx, lengths, strict=True):
        row[L - sum(parts) :] = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    x, weight, bias, _ = draw(seed, len(lengths), 3, L, W, True, False, channels_last)
    got = causal_conv1d(x, weight, bias, seq_idx, None, activation, backend)
    check(got, formula(x, weight, bias, seq_idx, None, activation), (x, weight, bias))


def worked(k, *shape):
    n = int(torch.tensor(shape).prod())
    return (0.37 * torch.arange(n, dtype=torch.float64) + k).sin().view(shape).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_example(backend):
    """Sums and sums of squares, computed once outside of this package."""
    x, weight, bias, initial = worked(1, 2, 5, 7), worked(2, 5, 4), worked(3, 5), worked(4, 2, 5, 3)
    out, final = causal_conv1d(x, weight, bias, None, initial, "silu", backend)
    d = [worked(5, 2, 5, 7).detach(), worked(6, 2, 5, 3).detach()]
    results = (out, final, *torch.autograd.grad([out, final], [x, weight, bias, initial], d))
    want = [(32.2895794904, 68.4288498004), (1.0397807448, 16.2162493032), (-2.0332868645, 62.0195221055),
            (-9.4803111627, 114.9893100482), (7.9468366385, 46.7450911533), (-3.7776460948, 11.4521448904)]  # fmt: skip
    for got, (total, squares) in zip(results, want, strict=True):
        assert float(got.detach().sum()) == pytest.approx(total, abs=1e-9)
        assert float(got.detach().square().sum()) == pytest.approx(squares, abs=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_narrow_dtypes(backend, dtype, limit):
    x, weight, bias, initial = draw(3, 2, 6, 33, 4, True, True, True, dtype)
    weight = weight.detach().float().requires_grad_()  # mixed, as layers under autocast have it
    inputs = (x, weight, bias, initial)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    got = causal_conv1d(x, weight, bias, None, initial, "silu", backend)
    want = formula(wide[0], wide[1], wide[2], None, wide[3], "silu")
    d = [torch.randn_like(t).to(dtype) for t in want]
    got_d = torch.autograd.grad(got, inputs, d)
    want_d = torch.autograd.grad(want, wide, [t.double() for t in d])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert error_ratio(a, b) <= limit
    for a, b, t in zip(got_d, want_d, inputs, strict=True):
        assert a.dtype == t.dtype
        assert error_ratio(a, b) <= 5 * limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_split_sequence_equals_whole(backend):
    x, weight, bias, initial = draw(8, 2, 3, 12, 4, True, True, False)
    whole, end = causal_conv1d(x, weight, bias, None, initial, "silu", backend)
    parts, state = [], initial
    for piece in x.split([1, 2, 5, 4], 2):
        out, state = causal_conv1d(piece, weight, bias, None, state, "silu", backend)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(state, end)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_expanded_inputs(backend):
    x = torch.randn(1, 3, 16, dtype=torch.float64)[:, :, ::2].expand(2, 3, 8).requires_grad_()
    weight = torch.randn(4, 3, dtype=torch.float64).mT.requires_grad_()
    check(causal_conv1d(x, weight, backend=backend), formula(x, weight, None, None, None, None), (x, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_contract(backend, channels_last, packed):
    x, weight, bias, initial = draw(1, 2, 3, 5, 4, True, True, channels_last, torch.float32)
    seq_idx = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, -1]]) if packed else None
    call = (x.detach().requires_grad_(), weight, bias, seq_idx, None if packed else initial, "silu", backend)
    torch.library.opcheck(torch.ops.vmamba_npu.causal_conv1d_fwd.default, call)


def test_compiles_without_a_break():
    x, weight, bias, initial = draw(1, 2, 3, 5, 4, True, True, True)
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    check(
        compiled(x, weight, bias, None, initial, "silu"),
        formula(x, weight, bias, None, initial, "silu"),
        (x, weight, bias, initial),
    )


def test_varlen_states():
    x = torch.randn(9, 2, dtype=torch.float64)
    got = causal_conv1d_varlen_states(x, torch.tensor([0, 2, 2, 9]), 3)
    zero = torch.zeros(2, 1, dtype=torch.float64)
    want = torch.stack([torch.cat([zero, x[:2].T], 1), zero.expand(2, 3), x[6:].T])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


GOOD = dict(x=torch.ones(2, 3, 5), weight=torch.ones(3, 4))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.ones(3, 5)), ValueError, r"x: expected \[B, channels, L\]"),
        (dict(x=torch.ones(0, 3, 5)), ValueError, "batch: expected"),
        (dict(x=torch.ones(2, 4, 5)), ValueError, r"x: expected shape \(2, 3, 5\), got \(2, 4, 5\)"),
        (dict(x=torch.ones(2, 3, 5, dtype=torch.int32)), TypeError, "x: expected a floating-point"),
        (dict(weight=torch.ones(3, 1, 4)), ValueError, "weight: expected"),
        (dict(weight=torch.ones(3, 0)), ValueError, "W: expected"),
        (dict(bias=torch.ones(4)), ValueError, "bias: expected shape"),
        (dict(bias=torch.ones(3, device="meta")), ValueError, "bias: expected device"),
        (dict(seq_idx=torch.zeros(2, 4, dtype=torch.int32)), ValueError, "seq_idx: expected shape"),
        (dict(seq_idx=torch.zeros(2, 5)), TypeError, "seq_idx: expected an int32"),
        (dict(initial_states=torch.zeros(2, 3, 4)), ValueError, "initial_states: expected shape"),
        (
            dict(seq_idx=torch.zeros(2, 5, dtype=torch.int32), initial_states=torch.zeros(2, 3, 3)),
            ValueError,
            "got both",
        ),
        (dict(activation="gelu"), NotImplementedError, "activation: .*'gelu'"),
        (dict(backend="fast"), ValueError, "'fast'"),
        (dict(activate="silu"), TypeError, "activate"),
    ],
)
def test_bad_input_names_the_argument(change, error, words):
    with pytest.raises(error, match=words):
        causal_conv1d(**(GOOD | change))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_result_may_be_changed_in_place(backend, channels_last):
    x, weight, _, _ = draw(1, 2, 3, 5, 4, False, False, channels_last)
    want = formula(x, weight, None, None, None, "silu")[0] + 1
    out, _ = causal_conv1d(x, weight, activation="silu", backend=backend)
    out += 1
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(want.sum(), x))

"""causal_conv1d_update: every backend against the convolution of the whole sequence and against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmamba_npu.ops import causal_conv1d, causal_conv1d_update
from vmamba_npu.testing import serving

BACKENDS = serving("causal_conv1d_update", torch.float64)


def one_by_one(x, state, weight, bias, cache_seqlens, indices):
    """(out, state) of a few tokens with SiLU, token by token, on a copy of the state."""
    state, out = state.clone(), torch.zeros_like(x)
    W, K = weight.shape[1], state.shape[2]
    for b in range(x.shape[0]):
        row = b if indices is None else int(indices[b])
        if row < 0:
            continue
        for t in range(x.shape[2]):
            at = K if cache_seqlens is None else int(cache_seqlens[b]) + t
            history = [state[row, :, (at - (W - 1) + j) % K] for j in range(W - 1)]
            p = bias + sum(w * h for w, h in zip(weight.T, [*history, x[b, :, t]], strict=True))
            out[b, :, t] = p / (1 + (-p).exp())
            if cache_seqlens is None and K:
                state[row] = torch.cat([state[row, :, 1:], x[b, :, t, None]], 1)
            elif K:
                state[row, :, at % K] = x[b, :, t]
    return out, state


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    W=st.integers(1, 4),
    extra=st.integers(0, 3),
    T=st.integers(0, 6),
    ring=st.booleans(),
    indexed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_the_definition(backend, W, extra, T, ring, indexed, seed):
    g = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(3, 2, T, generator=g, dtype=torch.float64),
        torch.randn(2, W, generator=g, dtype=torch.float64),
    )
    state = torch.randn(5 if indexed else 3, 2, W - 1 + extra, generator=g, dtype=torch.float64)
    bias = torch.randn(2, generator=g, dtype=torch.float64)
    cache_seqlens = torch.tensor([0, 3, 17], dtype=torch.int32) if ring else None
    indices = torch.tensor([4, -1, 0], dtype=torch.int32) if indexed else None
    want, end = one_by_one(x, state, weight, bias, cache_seqlens, indices)
    got = causal_conv1d_update(x, state, weight, bias, "silu", cache_seqlens, indices, backend)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state, end, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("indices", [[-1, -1, -1], [-1, 2, -5], [3, 1, -1]])
def test_padding_rows_give_zeros_and_touch_no_state(backend, indices):
    """Whatever they hold; the state lies in memory as the layers have it, channels last."""
    x, weight, bias = torch.randn(3, 2, 1), torch.randn(2, 4), torch.randn(2)
    state = torch.randn(5, 4, 2).mT
    indices = torch.tensor(indices)
    want, end = one_by_one(x, state, weight, bias, None, indices)
    x[indices < 0] = float("nan")
    got = causal_conv1d_update(x[..., 0], state, weight, bias, "silu", None, indices, backend)
    torch.testing.assert_close(got, want[..., 0])
    torch.testing.assert_close(state, end, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefill", [1, 2, 9])
def test_prefill_then_decode_equals_whole(backend, prefill):
    """Also for a prefill that is shorter than the window."""
    x, weight = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    whole, _ = causal_conv1d(x, weight, activation="silu", backend=backend)
    first, state = causal_conv1d(x[:, :, :prefill], weight, activation="silu", backend=backend)
    rest = [causal_conv1d_update(x[:, :, t], state, weight, None, "silu", backend=backend) for t in range(prefill, 12)]
    torch.testing.assert_close(torch.cat([first, torch.stack(rest, 2)], 2), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_keeps_its_dtype(backend, state_dtype):
    x, weight = torch.randn(2, 3).bfloat16(), torch.randn(3, 4)
    state = torch.randn(2, 3, 4).to(state_dtype)
    want, end = one_by_one(x.double()[..., None], state.double(), weight.double(), torch.zeros(3).double(), None, None)
    out = causal_conv1d_update(x, state, weight, None, "silu", backend=backend)
    assert out.dtype == torch.bfloat16 and state.dtype == state_dtype
    torch.testing.assert_close(out.double(), want[..., 0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(state.double(), end, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_contract(backend):
    call = (torch.randn(2, 3), torch.randn(2, 3, 4), torch.randn(3, 4), torch.randn(3), "silu", None, None, backend)
    torch.library.opcheck(torch.ops.vmamba_npu.causal_conv1d_update.default, call)


def test_compiled_update_changes_the_state_as_eager():
    x, weight, state = torch.randn(2, 3), torch.randn(3, 4), torch.randn(2, 3, 4)
    expected = state.clone()
    want = causal_conv1d_update(x, expected, weight)
    got = torch.compile(causal_conv1d_update, fullgraph=True, backend="aot_eager")(x, state, weight)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.ones(2)), ValueError, "x: expected"),
        (dict(x=torch.ones(2, 4)), ValueError, "x: expected shape"),
        (dict(conv_state=torch.ones(2, 3)), ValueError, "conv_state: expected"),
        (dict(conv_state=torch.ones(2, 3, 2)), ValueError, "conv_state: expected at least W - 1 = 3 columns, got 2"),
        (dict(conv_state=torch.ones(4, 3, 4)), ValueError, "conv_state: expected 2 rows.*got 4"),
        (dict(conv_state_indices=torch.tensor([0, 2])), ValueError, "conv_state_indices: expected rows below 2, got 2"),
        (dict(conv_state_indices=torch.tensor([0.0, 1.0])), TypeError, "conv_state_indices"),
        (dict(cache_seqlens=torch.tensor([0])), ValueError, "cache_seqlens: expected shape"),
        (dict(activation="relu"), NotImplementedError, "relu"),
        (dict(weight=torch.ones(3, 4, device="meta")), ValueError, "weight: expected device"),
    ],
)
def test_bad_input_names_the_argument(change, error, words):
    good = dict(x=torch.ones(2, 3), conv_state=torch.ones(2, 3, 4), weight=torch.ones(3, 4))
    with pytest.raises(error, match=words):
        causal_conv1d_update(**(good | change))

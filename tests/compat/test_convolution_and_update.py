"""The convolution, the one-token update and the inference parameters under their upstream names, in float64."""

import itertools

import pytest
import torch
from torch import Tensor

from vmamba_npu.compat import causal_conv1d as conv
from vmamba_npu.compat.inference import InferenceParams
from vmamba_npu.compat.selective_state_update import selective_state_update, selective_state_update_ref

g = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def silu(u: Tensor) -> Tensor:
    return u / (1 + (-u).exp())


def convolved(x, weight, bias, before=None, seq=None) -> tuple[Tensor, Tensor]:
    batch, channels, L = x.shape
    W = weight.shape[1]
    X = torch.cat([torch.zeros(batch, channels, W - 1).double() if before is None else before, x], 2)
    out = []
    for t in range(L):
        p = torch.zeros(batch, channels).double() if bias is None else bias.expand(batch, channels)
        for j in range(W):
            u = t - (W - 1) + j
            same = 1 if seq is None else float(u >= 0) * (seq[:, max(u, 0)] == seq[:, t])[:, None]
            p = p + weight[:, j] * X[:, :, t + j] * same
        out.append(p)
    return torch.stack(out, 2), X[:, :, L:]


@pytest.mark.parametrize("L", [2, 9])
@pytest.mark.parametrize("function", [conv.causal_conv1d_fn, conv.causal_conv1d_ref])
def test_convolution_with_states(function, L):
    leaves = [t.requires_grad_() for t in (normal(2, L, 6).mT, normal(6, 4), normal(6), normal(2, 6, 3))]
    x, weight, bias, before = leaves
    room = torch.zeros(2, 6, 3, dtype=torch.float64)
    out, final = function(
        x, weight, bias, initial_states=before, return_final_states=True, final_states_out=room, activation="swish"
    )
    want, last = convolved(*leaves)
    assert final is room
    torch.testing.assert_close((out, final), (silu(want), last))
    d = [normal(*out.shape), normal(*final.shape)]
    torch.testing.assert_close(
        torch.autograd.grad((out, final), leaves, d), torch.autograd.grad((silu(want), last), leaves, d)
    )
    plain = function(x, weight)
    torch.testing.assert_close(plain, convolved(x, weight, None)[0])
    pair = function(x, weight, return_final_states=True)
    torch.testing.assert_close(pair, convolved(x, weight, None))


def test_convolution_of_packed_sequences():
    leaves = [t.requires_grad_() for t in (normal(2, 6, 9), normal(6, 4), normal(6))]
    seq = torch.tensor([[0] * 4 + [1] * 5, [0] * 9], dtype=torch.int32)
    out = conv.causal_conv1d_fn(*leaves, seq, activation="silu")
    want = silu(convolved(*leaves, seq=seq)[0])
    torch.testing.assert_close(out, want)
    d = normal(2, 6, 9)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, d), torch.autograd.grad(want, leaves, d))


def test_convolution_refuses():
    x, weight, seq = normal(2, 6, 9), normal(6, 4), torch.zeros(2, 9, dtype=torch.int32)
    with pytest.raises(TypeError, match="pass activation by keyword: activation='silu'"):
        conv.causal_conv1d_fn(x, weight, None, "silu")
    with pytest.raises(TypeError, match="pass activation by keyword"):
        conv.causal_conv1d_ref(x, weight, None, "silu")
    for function in (conv.causal_conv1d_fn, conv.causal_conv1d_ref):
        with pytest.raises(NotImplementedError, match="activation: expected None, 'silu' or 'swish', got 'relu'"):
            function(x, weight, activation="relu")
        with pytest.raises(ValueError, match="final_states_out: expected return_final_states=True"):
            function(x, weight, final_states_out=normal(2, 6, 3))
        with pytest.raises(ValueError, match=r"final_states_out: expected .2, 6, 3."):
            function(x, weight, return_final_states=True, final_states_out=normal(1, 6, 3))
        with pytest.raises(TypeError, match="unexpected keyword"):
            function(x, weight, backend="torch")
    for states in ({"return_final_states": True}, {"initial_states": normal(2, 6, 3)}):
        with pytest.raises(ValueError, match="seq_idx is given"):
            conv.causal_conv1d_fn(x, weight, seq_idx=seq, **states)


@pytest.mark.parametrize("function", [conv.causal_conv1d_update, conv.causal_conv1d_update_ref])
def test_convolution_update(function):
    x, weight, bias, state = normal(2, 6, 5), normal(6, 3), normal(6), normal(2, 6, 4)
    want, _ = convolved(x, weight, bias, state[:, :, 2:])
    columns = torch.cat([state, x], 2)[:, :, 5:]
    token = function(x[:, :, 0], state, weight, bias, "silu")
    others = function(x[:, :, 1:], state, weight, bias, activation="silu")
    torch.testing.assert_close(torch.cat([token[..., None], others], 2), silu(want))
    torch.testing.assert_close(state, columns)
    with pytest.raises(NotImplementedError, match="activation"):
        function(x, state, weight, bias, "gelu")


@pytest.mark.parametrize("function", [conv.causal_conv1d_update, conv.causal_conv1d_update_ref])
def test_convolution_update_of_a_ring(function):
    x, weight, ring = normal(2, 6, 5), normal(6, 3), normal(2, 6, 4)
    seen = torch.tensor([3, 6], dtype=torch.int32)
    before = torch.stack([ring[b][:, [(int(seen[b]) - 2) % 4, (int(seen[b]) - 1) % 4]] for b in range(2)])
    after = ring.clone()
    for b, t in itertools.product(range(2), range(5)):
        after[b, :, (int(seen[b]) + t) % 4] = x[b, :, t]
    out = function(x, ring, weight, cache_seqlens=seen)
    torch.testing.assert_close(out, convolved(x, weight, None, before)[0])
    torch.testing.assert_close(ring, after)


def test_convolution_update_of_chosen_rows():
    x, weight, pool = normal(3, 6), normal(6, 3), normal(5, 6, 2)
    before = pool.clone()
    out = conv.causal_conv1d_update(x, pool, weight, conv_state_indices=torch.tensor([4, -1, 0], dtype=torch.int32))
    want = convolved(x[[0, 2], :, None], weight, None, before[[4, 0]])[0][..., 0]
    torch.testing.assert_close(out[[0, 2]], want)
    assert not out[1].any()
    torch.testing.assert_close(pool[[1, 2, 3]], before[[1, 2, 3]])
    torch.testing.assert_close(pool[[4, 0], :, 1], x[[0, 2]])


@pytest.mark.parametrize("function", [conv.causal_conv1d_varlen_states, conv.causal_conv1d_varlen_states_ref])
def test_varlen_states(function):
    x = normal(9, 6)
    got = function(x, torch.tensor([0, 2, 2, 9], dtype=torch.int32), 4)
    short = torch.cat([torch.zeros(2, 6, dtype=torch.float64), x[:2]]).T
    torch.testing.assert_close(got, torch.stack([short, torch.zeros_like(short), x[5:].T]))


def token(state, x, dt, A, B, C, D=0.0, z=None, dt_bias=0.0, softplus=False) -> tuple[Tensor, Tensor]:
    """(out, new state) with heads: state [B, H, P, N], B and C [B, G, N]."""
    step = dt + dt_bias
    step = (1 + step.exp()).log() if softplus else step
    B, C = (t.repeat_interleave(state.shape[1] // t.shape[1], 1) for t in (B, C))
    new = (step[..., None] * A).exp() * state + (step * x)[..., None] * B[:, :, None]
    out = (new * C[:, :, None]).sum(-1) + D * x
    return (out if z is None else out * silu(z)), new


UPDATES = pytest.mark.parametrize("function", [selective_state_update, selective_state_update_ref])


@UPDATES
@pytest.mark.parametrize("absent", [(), ("D",), ("z",), ("dt_bias",), ("D", "z", "dt_bias")], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_state_update_with_heads(function, softplus, absent):
    t = {
        "x": normal(2, 4, 3), "dt": normal(2, 4, 3), "A": -normal(4, 3, 5).abs(), "B": normal(2, 2, 5),
        "C": normal(2, 2, 5), "D": normal(4, 3), "z": normal(2, 4, 3), "dt_bias": normal(4, 3),
    }  # fmt: skip
    t = {n: v for n, v in t.items() if n not in absent}
    state = normal(2, 4, 3, 5)
    want, new = token(state, **t, softplus=softplus)  # negative steps are kept, as upstream
    got = function(state, **t, dt_softplus=softplus)
    torch.testing.assert_close((got, state), (want, new))


@UPDATES
def test_state_update_without_heads(function):
    t = {
        "x": normal(2, 3), "dt": normal(2, 3), "A": -normal(3, 5).abs(), "B": normal(2, 5), "C": normal(2, 5),
        "D": normal(3), "z": normal(2, 3), "dt_bias": normal(3),
    }  # fmt: skip
    state = normal(2, 3, 5)
    axis = {"A": 0, "D": 0, "dt_bias": 0}
    want, new = token(state[:, None], **{n: v.unsqueeze(axis.get(n, 1)) for n, v in t.items()}, softplus=True)
    got = function(state, **t, dt_softplus=True)
    torch.testing.assert_close((got, state), (want[:, 0], new[:, 0]))


@pytest.mark.parametrize("name", ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"])
def test_each_argument_of_the_state_update_is_expanded_on_its_own(name):
    t = {
        "state": normal(2, 1, 3, 5), "x": normal(2, 1, 3), "dt": normal(2, 1, 3), "A": -normal(1, 3, 5).abs(),
        "B": normal(2, 1, 5), "C": normal(2, 1, 5), "D": normal(1, 3), "z": normal(2, 1, 3), "dt_bias": normal(1, 3),
    }  # fmt: skip
    want, new = token(**t, softplus=True)
    t[name] = t[name].squeeze(0 if name in ("A", "D", "dt_bias") else 1)
    got = selective_state_update(**t, dt_softplus=True)
    assert got.shape == ((2, 3) if name == "state" else (2, 1, 3))
    torch.testing.assert_close((got.reshape(2, 1, 3), t["state"].reshape(2, 1, 3, 5)), (want, new))


def test_groups_of_one_serve_all_heads_and_expanded_views_equal_copies():
    A, dt, D = -normal(4).abs(), normal(2, 4), normal(4)
    views = {
        "A": A[:, None, None].expand(4, 3, 5), "dt": dt[..., None].expand(2, 4, 3), "D": D[:, None].expand(4, 3),
        "dt_bias": D[:, None].expand(4, 3),
    }  # fmt: skip
    t = {"x": normal(2, 4, 3), "B": normal(2, 5), "C": normal(2, 5)}
    states = [normal(2, 4, 3, 5)] * 2
    states = [s.clone() for s in states]
    want, new = token(states[0], t["x"], B=t["B"][:, None], C=t["C"][:, None], **views, softplus=True)
    for state, given in zip(states, (views, {n: v.contiguous() for n, v in views.items()}), strict=True):
        torch.testing.assert_close(selective_state_update(state, **t, **given, dt_softplus=True), want)
        torch.testing.assert_close(state, new)


@UPDATES
def test_state_update_of_chosen_rows(function):
    t = {"x": normal(3, 3), "dt": normal(3, 3), "A": -normal(3, 5).abs(), "B": normal(3, 5), "C": normal(3, 5)}
    pool = normal(6, 3, 5)
    before = pool.clone()
    got = function(pool, **t, state_batch_indices=torch.tensor([5, -1, 2], dtype=torch.int32))
    axis = {"A": 0}
    rows = {n: v.unsqueeze(axis.get(n, 1)) if n == "A" else v[[0, 2]].unsqueeze(1) for n, v in t.items()}
    want, new = token(before[[5, 2]][:, None], **rows)
    torch.testing.assert_close((got[[0, 2]], pool[[5, 2]]), (want[:, 0], new[:, 0]))
    assert not got[1].any()
    torch.testing.assert_close(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_state_update_keeps_dtypes_and_refuses():
    t = {"x": normal(2, 3), "dt": normal(2, 3), "A": -normal(3, 5).abs(), "B": normal(2, 5), "C": normal(2, 5)}
    half = {n: v.bfloat16() for n, v in t.items()}
    state = normal(2, 3, 5).float()
    assert selective_state_update(state, **half).dtype == torch.bfloat16 and state.dtype == torch.float32
    with pytest.raises(ValueError, match="x: expected 2 or 3 axes"):
        selective_state_update(normal(2, 3, 5), **{**t, "x": normal(3)})
    with pytest.raises(ValueError, match="B: expected shape"):
        selective_state_update(normal(2, 3, 5), **{**t, "B": normal(2, 6)})
    with pytest.raises(TypeError, match="unexpected keyword"):
        selective_state_update(normal(2, 3, 5), **t, dt_limit=(0.0, 1.0))


def test_inference_parameters():
    first, second = InferenceParams(max_seqlen=8, max_batch_size=2), InferenceParams(8, 2)
    first.key_value_memory_dict[0] = "cache"
    assert second.key_value_memory_dict == {}
    first.seqlen_offset, first.lengths_per_sample = 5, torch.tensor([5, 4])
    first.reset(16, 3)
    assert (first.max_seqlen, first.max_batch_size, first.seqlen_offset) == (16, 3, 0)
    assert first.lengths_per_sample.tolist() == [0, 0] and first.key_value_memory_dict == {0: "cache"}

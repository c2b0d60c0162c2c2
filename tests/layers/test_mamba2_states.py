"""Mamba2 with caches and packed sequences against the recurrence: steps, prefill in pieces, seq_idx, cu_seqlens."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.layers.mamba2_definition import disturb, draw, rows, run, weights_of
from vmamba_npu.layers import Mamba2
from vmamba_npu.testing import error_ratio

SMALL = dict(d_state=5, headdim=4, chunk_size=3, layer_idx=7, dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "groups": dict(ngroups=2, bias=True),
    "skip_per_channel": dict(D_has_hdim=True, conv_bias=False),
    "mlp_part": dict(d_ssm=8, norm_before_gate=True, ngroups=2),
    "no_norm": dict(rmsnorm=False, D_has_hdim=True, d_ssm=12),
    "dt_limit": dict(dt_limit=(0.3, 0.6), d_conv=2),
    "conv_1": dict(d_conv=1),
}
BORDERS = [0, 3, 3, 4, 9]  # one sequence empty, one shorter than the convolution


def make(**options):
    return disturb(Mamba2(8, **{**SMALL, **options}))


def params(offset=0):
    return SimpleNamespace(seqlen_offset=offset, key_value_memory_dict={})


def feed(layer, u, cuts, inference):
    """Outputs of u, given in pieces that end at `cuts`."""
    out, start = [], 0
    for end in cuts:
        out.append(layer(u[:, start:end], inference_params=inference))
        inference.seqlen_offset += end - start
        start = end
    return torch.cat(out, 1)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_step_is_the_forward_token_by_token(options, backend):
    layer, u = make(**options, backend=backend), draw(2, 6, 8)
    out, conv, ssm = rows(layer, weights_of(layer), u)
    cache = layer.allocate_inference_cache(2, 6)
    steps = []
    for t in range(6):
        y, *same = layer.step(u[:, t : t + 1], *cache)
        assert same[0] is cache[0] and same[1] is cache[1]
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), out)
    torch.testing.assert_close(cache, (conv, ssm))


@pytest.mark.parametrize("cuts", [[7], [1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7], [1, 3, 7], [2, 3, 6, 7]], ids=str)
@pytest.mark.parametrize("name", ["plain", "mlp_part", "no_norm", "conv_1"])
def test_prefill_in_pieces_and_decode_are_the_forward(name, cuts):
    layer, u, inference = make(**OPTIONS[name]), draw(3, 7, 8), params()
    out, conv, ssm = rows(layer, weights_of(layer), u)
    torch.testing.assert_close(feed(layer, u, cuts, inference), out)
    torch.testing.assert_close(inference.key_value_memory_dict[7], (conv, ssm))


def test_a_new_prefill_forgets_the_old_cache():
    layer, inference = make(), params()
    feed(layer, draw(2, 5, 8), [5], inference)
    kept = inference.key_value_memory_dict[7]
    inference.seqlen_offset = 0
    u = draw(2, 4, 8, seed=5)
    want = rows(layer, weights_of(layer), u)
    torch.testing.assert_close(feed(layer, u, [2, 4], inference), want[0])
    assert all(a is b for a, b in zip(kept, inference.key_value_memory_dict[7], strict=True))  # written into
    torch.testing.assert_close(kept, want[1:])


def test_rows_of_a_cache_may_be_reordered():
    layer, u, inference = make(), draw(3, 6, 8), params()
    weights = weights_of(layer)
    feed(layer, u, [4], inference)
    order = torch.tensor([2, 0, 0])
    inference.key_value_memory_dict[7] = tuple(t[order] for t in inference.key_value_memory_dict[7])
    history = torch.cat([u[order, :4], u[:, 4:]], 1)
    got = torch.cat([layer(u[:, t : t + 1], inference_params=inference) for t in (4, 5)], 1)
    torch.testing.assert_close(got, rows(layer, weights, history)[0][:, 4:])


def test_float32_state_beside_bfloat16_activations():
    layer = disturb(Mamba2(16, d_state=8, headdim=8, layer_idx=0))
    u, inference = draw(2, 60, 16), params()
    want = rows(layer, weights_of(layer), u)
    inference.key_value_memory_dict[0] = layer.allocate_inference_cache(2, 60, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = feed(layer, u.float(), [10, 25, *range(26, 61)], inference)
    assert out.dtype == torch.bfloat16 and error_ratio(out, want[0]) < 2e-2
    conv, ssm = inference.key_value_memory_dict[0]
    assert conv.dtype == ssm.dtype == torch.float32 and error_ratio(ssm, want[2]) < 2e-2


def test_allocated_cache():
    layer = Mamba2(8, headdim=4, d_state=5, ngroups=2, dtype=torch.bfloat16)
    conv, ssm = layer.allocate_inference_cache(3, 100)
    assert conv.shape == (3, 16 + 2 * 2 * 5, 4) and conv.stride(1) == 1 and ssm.shape == (3, 4, 4, 5)
    assert conv.dtype == ssm.dtype == torch.bfloat16 and not conv.any() and not ssm.any()
    assert layer.allocate_inference_cache(3, 100, dtype=torch.float32)[1].dtype == torch.float32


def test_cache_refusals():
    layer, inference = make(), params()
    feed(layer, draw(2, 3, 8), [3], inference)
    for pieces in (draw(3, 1, 8), draw(3, 2, 8)):
        with pytest.raises(ValueError, match="cache has 2 rows, the input 3"):
            layer(pieces, inference_params=inference)
    with pytest.raises(ValueError, match=r"layer_idx.*None"):
        make(layer_idx=None)(draw(1, 3, 8), inference_params=params())
    cache = layer.allocate_inference_cache(2, 1)
    with pytest.raises(ValueError, match=r"one token.*\(2, 3, 8\)"):
        layer.step(draw(2, 3, 8), *cache)
    with pytest.raises(ValueError, match="ssm_state: expected"):
        layer.step(draw(2, 1, 8), cache[0], cache[1][..., :-1])
    states = layer._get_states_from_cache(inference, 2, initialize_states=True)
    assert states is not None and not any(t.any() for t in inference.key_value_memory_dict[7])


def separate(layer, weights, u, borders=BORDERS):
    """(outputs [1, L, d_model], conv_state, ssm_state) of the sequences of u [1, L, d_model], each run alone."""
    parts = [run(layer, weights, u[0, a:b]) for a, b in pairwise(borders)]
    out, conv, ssm = zip(*parts, strict=True)
    return torch.cat(out)[None], torch.stack(conv), torch.stack(ssm)


@pytest.mark.parametrize("said", ["cu_seqlens", "seq_idx", "both"])
@pytest.mark.parametrize("name", ["plain", "mlp_part", "no_norm"])
def test_packed_sequences_are_separate_with_gradients(name, said):
    layer, u = make(**OPTIONS[name]), draw(1, 9, 8).requires_grad_()
    weights, v = weights_of(layer), u.detach().clone().requires_grad_()
    packing = {
        "cu_seqlens": torch.tensor(BORDERS, dtype=torch.int32),
        "seq_idx": torch.tensor([[0, 0, 0, 2, 3, 3, 3, 3, 3]], dtype=torch.int32),
    }
    got = layer(u, **{k: t for k, t in packing.items() if said in (k, "both")})
    want = separate(layer, weights, v)[0]
    torch.testing.assert_close(got, want)
    d = draw(1, 9, 8, seed=3)
    leaves = {n: p for n, p in layer.named_parameters() if n != "D"}  # D is float32: test_mamba2.py
    got_d = torch.autograd.grad(got, [u, *leaves.values()], d)
    torch.testing.assert_close(got_d, torch.autograd.grad(want, [v, *(weights[n] for n in leaves)], d))


def test_seq_idx_of_several_rows_and_padding():
    layer, u = make(), draw(2, 6, 8)
    weights = weights_of(layer)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, -1, -1]])
    want = torch.cat([separate(layer, weights, u[:1], [0, 2, 6])[0], separate(layer, weights, u[1:], [0, 1, 4, 6])[0]])
    got = layer(u, seq_idx=seq_idx)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1, :4], want[1, :4])


def test_packed_prefill_fills_a_row_for_each_sequence_and_goes_on():
    layer, inference = make(ngroups=2), params()
    weights, first, then = weights_of(layer), draw(1, 9, 8), draw(1, 7, 8, seed=4)
    more, last = [0, 1, 3, 3, 7], draw(4, 1, 8, seed=6)
    cu = torch.tensor(BORDERS)
    torch.testing.assert_close(
        layer(first, cu_seqlens=cu, inference_params=inference), separate(layer, weights, first)[0]
    )
    torch.testing.assert_close(inference.key_value_memory_dict[7], separate(layer, weights, first)[1:])
    inference.seqlen_offset = 5
    whole, places = [], []  # each sequence with what continues it
    for i in range(4):
        whole.append(torch.cat([first[0, BORDERS[i] : BORDERS[i + 1]], then[0, more[i] : more[i + 1]], last[i]]))
        places.append(BORDERS[i + 1] - BORDERS[i])
    runs = [run(layer, weights, tokens) for tokens in whole]
    got = layer(then, cu_seqlens=torch.tensor(more), inference_params=inference)
    want = torch.cat([out[n:-1] for (out, _, _), n in zip(runs, places, strict=True)])
    torch.testing.assert_close(got[0], want)
    decoded = layer(last, inference_params=inference)
    torch.testing.assert_close(decoded[:, 0], torch.stack([out[-1] for out, _, _ in runs]))
    states = tuple(torch.stack(part) for part in list(zip(*runs, strict=True))[1:])
    torch.testing.assert_close(inference.key_value_memory_dict[7], states)


def test_seq_idx_with_a_cache():
    """The cache belongs to the last sequence of a row; tokens of index 0 continue it, others start anew."""
    layer, u, inference = make(), draw(2, 5, 8), params()
    weights = weights_of(layer)
    layer(u, seq_idx=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]), inference_params=inference)
    kept = [row[n:] for row, n in zip(u, (3, 2), strict=True)]
    want = [run(layer, weights, tokens) for tokens in kept]
    torch.testing.assert_close(inference.key_value_memory_dict[7][0], torch.stack([w[1] for w in want]))
    torch.testing.assert_close(inference.key_value_memory_dict[7][1], torch.stack([w[2] for w in want]))
    inference.seqlen_offset = 5
    v = draw(2, 4, 8, seed=2)
    got = layer(v, seq_idx=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), inference_params=inference)
    going_on = run(layer, weights, torch.cat([kept[0], v[0, :2]]))
    fresh = [run(layer, weights, v[0, 2:]), run(layer, weights, v[1])]
    torch.testing.assert_close(got[0], torch.cat([going_on[0][-2:], fresh[0][0]]))
    torch.testing.assert_close(got[1], fresh[1][0])
    torch.testing.assert_close(inference.key_value_memory_dict[7][0], torch.stack([f[1] for f in fresh]))
    torch.testing.assert_close(inference.key_value_memory_dict[7][1], torch.stack([f[2] for f in fresh]))


def test_a_row_that_ends_in_padding_leaves_an_empty_cache():
    layer, inference = make(), params()
    layer(draw(1, 5, 8), seq_idx=torch.tensor([[0, 0, 0, -1, -1]]), inference_params=inference)
    assert not any(t.any() for t in inference.key_value_memory_dict[7])


@torch.no_grad()
def test_a_float32_state_keeps_a_long_decode_exact():
    """Slow decay, so that a state sums many tokens: in bfloat16 it stops growing, in float32 it does not."""
    layer = Mamba2(8, d_state=4, headdim=4, A_init_range=(1e-3, 1e-3), dtype=torch.bfloat16)
    u = (1 + 0.1 * draw(1, 600, 8)).to(torch.bfloat16)
    want = run(layer, weights_of(layer), u[0].double())[2][None].detach()
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        cache = layer.allocate_inference_cache(1, 600, dtype=dtype)
        for t in range(600):
            layer.step(u[:, t : t + 1], *cache)
        errors[dtype] = float((cache[1].double() - want).norm() / want.norm())
    assert errors[torch.float32] < 2e-2 and errors[torch.bfloat16] > 5 * errors[torch.float32]


def test_prefill_with_gradients_keeps_them_and_not_the_cache_s():
    layer, u, inference = make(), draw(1, 6, 8), params()
    first = layer(u[:, :3], inference_params=inference)
    inference.seqlen_offset = 3
    second = layer(u[:, 3:], inference_params=inference)
    assert not any(t.requires_grad for t in inference.key_value_memory_dict[7])
    grad = torch.autograd.grad(first.sum() + second.sum(), layer.in_proj.weight)[0]
    assert grad.isfinite().all() and grad.abs().max() > 0


@pytest.mark.parametrize(
    ("packing", "error", "words"),
    [
        (dict(seq_idx=torch.zeros(1, 5, dtype=torch.int32)), ValueError, r"seq_idx: expected \(1, 6\)"),
        (dict(seq_idx=torch.zeros(1, 6)), TypeError, "seq_idx"),
        (dict(cu_seqlens=torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens"),
        (dict(cu_seqlens=torch.tensor([0, 5])), ValueError, "cu_seqlens"),
        (dict(cu_seqlens=torch.tensor([0, 4, 2, 6])), ValueError, "cu_seqlens"),
        (dict(cu_seqlens=[0, 6]), TypeError, "cu_seqlens.*list"),
        (dict(cu_seqlens=torch.tensor([0, 3, 6]), seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1]])), ValueError, "borders"),
    ],
    ids=["idx_shape", "idx_float", "cu_float", "cu_end", "cu_order", "cu_list", "disagree"],
)
def test_bad_packing_is_named(packing, error, words):
    with pytest.raises(error, match=words):
        make()(draw(1, 6, 8), **packing)


def test_packing_needs_one_row():
    with pytest.raises(ValueError, match=r"cu_seqlens.*B = 2"):
        make()(draw(2, 6, 8), cu_seqlens=torch.tensor([0, 6]))


def test_flat_input_with_seqlen():
    layer, u = make(), draw(2, 5, 8)
    torch.testing.assert_close(layer(u.flatten(0, 1), seqlen=5), layer(u).flatten(0, 1))

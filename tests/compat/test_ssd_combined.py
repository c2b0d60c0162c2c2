"""SSD under mamba_ssm's names: values and gradients against the recurrences in float64, and what the flags return."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vmamba_npu.compat.ssd_combined import (
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    mamba_conv1d_scan_ref,
    mamba_split_conv1d_scan_combined,
    mamba_split_conv1d_scan_ref,
    ssd_chunk_scan_combined_ref,
)
from vmamba_npu.compat.ssd_minimal import segsum, ssd_minimal_discrete


def recurrence(x, step, A, B, C, D=None, z=None, first=None, seq=None) -> tuple[Tensor, list[Tensor]]:
    """(y, state after each token); `step` is the effective one, `seq` [B, L] resets where it changes (from 0)."""
    batch, L, H, P = x.shape
    B, C = (t.repeat_interleave(H // t.shape[2], 2) for t in (B, C))
    S = x.new_zeros(batch, H, P, B.shape[-1]) if first is None else first
    y, states = [], []
    for t in range(L):
        if seq is not None:
            before = seq[:, t - 1] if t else torch.zeros_like(seq[:, 0])
            S = S * (seq[:, t] == before)[:, None, None, None]
        S = (step[:, t] * A).exp()[..., None, None] * S + (
            (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        )
        o = (S * C[:, t, :, None]).sum(-1)
        if D is not None:
            o = o + (D if D.ndim == 2 else D[:, None]) * x[:, t]
        y.append(o if z is None else o * z[:, t] / (1 + (-z[:, t]).exp()))
        states.append(S)
    return torch.stack(y, 1), states


def softplus(u: Tensor) -> Tensor:
    return (1 + u.exp()).log()


def draw(batch=2, L=11, H=4, P=3, G=2, N=5, seed=0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    A = -torch.rand(H, generator=g, dtype=torch.float64)
    return {
        "x": normal(batch, L, H, P), "dt": normal(batch, L, H), "A": A.requires_grad_(), "B": normal(batch, L, G, N),
        "C": normal(batch, L, G, N), "D": normal(H, P), "z": normal(batch, L, H, P), "dt_bias": normal(H),
        "initial_states": normal(batch, H, P, N),
    }  # fmt: skip


def check(got, want, leaves) -> None:
    """Equal values, and equal gradients of a random combination of all results."""
    torch.testing.assert_close(got, want)
    d = [torch.randn_like(t) for t in want]
    torch.testing.assert_close(torch.autograd.grad(got, leaves, d), torch.autograd.grad(want, leaves, d))


def test_combined_with_every_option():
    t = draw()
    seq = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    got = mamba_chunk_scan_combined(
        t["x"], t["dt"], t["A"], t["B"], t["C"], 4, D=t["D"], z=t["z"], dt_bias=t["dt_bias"],
        initial_states=t["initial_states"], seq_idx=seq, dt_softplus=True, dt_limit=(0.1, 1.5),
        return_final_states=True, state_dtype=torch.bfloat16,
    )  # fmt: skip
    step = softplus(t["dt"] + t["dt_bias"]).clamp(0.1, 1.5)
    y, states = recurrence(t["x"], step, t["A"], t["B"], t["C"], t["D"], t["z"], t["initial_states"], seq)
    check(got, (y, states[-1]), list(t.values()))


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "initial_states"])
def test_combined_without_one_option(absent):
    t = draw()
    del t[absent]
    got = mamba_chunk_scan_combined(**t, chunk_size=4, dt_softplus=True)
    step = softplus(t["dt"] + t.get("dt_bias", 0))
    y, _ = recurrence(
        t["x"], step, t["A"], t["B"], t["C"], t.get("D"), t.get("z"), t.get("initial_states")
    )  # fmt: skip
    check((got,), (y,), list(t.values()))


def test_positional_call_and_one_result():
    t = draw()
    y = mamba_chunk_scan_combined(t["x"], t["dt"], t["A"], t["B"], t["C"], 256, t["D"], t["z"], t["dt_bias"])
    step = (t["dt"] + t["dt_bias"]).clamp_min(0)  # the default limit
    torch.testing.assert_close(y, recurrence(t["x"], step, t["A"], t["B"], t["C"], t["D"], t["z"])[0])


def packed(borders, states) -> tuple:
    """(inputs with a batch of 1, wanted y, state after each sequence) computed one sequence at a time."""
    t = draw(batch=1, L=borders[-1])
    step, y, last = t["dt"].clamp_min(0), [], []
    for i, (a, b) in enumerate(pairwise(borders)):
        first = None if states is None else states[i : i + 1]
        x, s, B, C = (v[:, a:b] for v in (t["x"], step, t["B"], t["C"]))
        if a == b:
            last.append(torch.zeros(1, 4, 3, 5, dtype=torch.float64) if first is None else first)
            continue
        out, seen = recurrence(x, s, t["A"], B, C, first=first)
        y.append(out)
        last.append(seen[-1])
    return t, torch.cat(y, 1), torch.cat(last)


def states_of(kind, sequences):
    """(what is passed, the state of each sequence that it means)"""
    full = torch.randn(sequences, 4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if kind == "one":
        return full[:1], torch.cat([full[:1], torch.zeros_like(full[1:])])
    return (full, full) if kind == "each" else (None, None)


@pytest.mark.parametrize("kind", ["none", "one", "each"])
@pytest.mark.parametrize("borders", [(0, 4, 11), (0, 0, 3, 3, 9, 9, 9), (0, 7)], ids=str)
def test_packed_sequences_stay_apart(borders, kind):
    given, meant = states_of(kind, len(borders) - 1)
    t, y, last = packed(borders, meant)
    call = (t["x"], t["dt"], t["A"], t["B"], t["C"], 4)
    cu = torch.tensor(borders, dtype=torch.int32)
    got = mamba_chunk_scan_combined(
        *call, cu_seqlens=cu, initial_states=given, return_final_states=True, return_varlen_states=True
    )
    nonempty = max(i for i in range(len(borders) - 1) if borders[i] < borders[i + 1])
    check(got, (y, last[nonempty : nonempty + 1], last), [t[n] for n in ("x", "dt", "A", "B", "C")])
    out, varlen = mamba_chunk_scan_combined(*call, cu_seqlens=cu, initial_states=given, return_varlen_states=True)
    torch.testing.assert_close((out, varlen), (y, last))
    torch.testing.assert_close(mamba_chunk_scan_combined(*call, cu_seqlens=cu, initial_states=given), y)


def test_seq_idx_beside_cu_seqlens_must_agree():
    t, y, _ = packed((0, 4, 4, 11), None)
    call = {n: t[n] for n in ("x", "dt", "A", "B", "C")}
    cu = torch.tensor([0, 4, 4, 11])
    seq = torch.tensor([[0] * 4 + [2] * 7], dtype=torch.int32)
    torch.testing.assert_close(mamba_chunk_scan_combined(**call, chunk_size=4, cu_seqlens=cu, seq_idx=seq), y)
    for wrong in (seq.roll(1, 1), torch.zeros_like(seq), seq[:, 1:]):
        with pytest.raises(ValueError, match="seq_idx: expected to change at the borders"):
            mamba_chunk_scan_combined(**call, chunk_size=4, cu_seqlens=cu, seq_idx=wrong)


@pytest.mark.parametrize("with_index", [False, True])
def test_packed_sequences_compile_to_one_graph(with_index):
    """Borders are data: a graph made for one set of them serves another of the same number."""
    t = draw(batch=1)
    call = [t[n] for n in ("x", "dt", "A", "B", "C")]

    def scan(*inputs):
        *inputs, cu, seq = inputs
        wanted = {"return_final_states": True, "return_varlen_states": True}
        return mamba_chunk_scan_combined(*inputs, 4, cu_seqlens=cu, seq_idx=seq if with_index else None, **wanted)

    torch._dynamo.reset()
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for cu, seq in (([0, 4, 11], [0] * 4 + [1] * 7), ([0, 9, 11], [0] * 9 + [1] * 2)):
        packing = torch.tensor(cu, dtype=torch.int32), torch.tensor([seq], dtype=torch.int32)
        check(compiled(*call, *packing), scan(*call, *packing), call)


def test_states_are_float32_and_out_has_the_dtype_of_x():
    t = {n: v.detach().bfloat16() for n, v in draw().items()}
    y, final = mamba_chunk_scan_combined(**t, chunk_size=4, dt_softplus=True, return_final_states=True)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_bad_arguments():
    t = {n: v for n, v in draw().items() if n in ("x", "dt", "A", "B", "C")}
    for error, words, wrong in (
        (TypeError, "state_dtype: expected a floating-point", {"state_dtype": torch.int32}),
        (TypeError, "state_dtype: expected a floating-point", {"state_dtype": "bf16"}),
        (TypeError, "pass activation by keyword", {"seq_idx": "silu"}),
        (TypeError, "unexpected keyword", {"backend": "torch"}),
        (ValueError, "return_varlen_states: expected cu_seqlens", {"return_varlen_states": True}),
        (ValueError, "cu_seqlens: expected one row", {"cu_seqlens": torch.tensor([0, 11])}),
        (ValueError, "cu_seqlens: expected .sequences", {"cu_seqlens": torch.tensor([0])}),
        (ValueError, "dt_limit", {"dt_limit": (1.0, 0.0)}),
    ):
        with pytest.raises(error, match=words):
            mamba_chunk_scan_combined(**t, chunk_size=4, **wrong)


@pytest.mark.parametrize("function", [mamba_chunk_scan, ssd_chunk_scan_combined_ref])
def test_plain_scans_do_not_clamp(function):
    t = draw(L=6)
    del t["initial_states"]
    y = function(t["x"], t["dt"], t["A"], t["B"], t["C"], 4, t["D"], t["z"], t["dt_bias"])
    want, _ = recurrence(t["x"], t["dt"] + t["dt_bias"], t["A"], t["B"], t["C"], t["D"], t["z"])
    check((y,), (want,), list(t.values()))


def conv(xBC, weight, bias, seq=None) -> Tensor:
    """silu of the causal convolution of [B, L, channels], tap after tap."""
    L, W = xBC.shape[1], weight.shape[1]
    rows = []
    for t in range(L):
        p = bias
        for j in range(W):
            u = t - (W - 1) + j
            if u >= 0:
                same = 1 if seq is None else (seq[:, u] == seq[:, t])[:, None]
                p = p + weight[:, j] * xBC[:, u] * same
        rows.append(p / (1 + (-p).exp()) + 0 * xBC[:, t])
    return torch.stack(rows, 1)


def fused(d_mlp=3, H=4, P=3, G=2, N=5, L=7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    dim, channels = H * P, H * P + 2 * G * N

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    return {
        "zxbcdt": normal(2, L, 2 * d_mlp + dim + channels + H), "conv1d_weight": normal(channels, 4),
        "conv1d_bias": normal(channels), "dt_bias": normal(H), "D": normal(H, P),
        "A": (-torch.rand(H, generator=g, dtype=torch.float64)).requires_grad_(),
        "rmsnorm_weight": normal(dim), "outproj_weight": normal(6, d_mlp + dim), "outproj_bias": normal(6),
        "initial_states": normal(2, H, P, N),
    }  # fmt: skip


def fused_formula(t, d_mlp=3, seq=None, norm_before_gate=True, eps=1e-6) -> tuple[Tensor, Tensor]:
    H, P, G, N = 4, 3, 2, 5
    z0, x0, z, xBC, dt = t["zxbcdt"].split([d_mlp, d_mlp, H * P, H * P + 2 * G * N, H], -1)
    x, B, C = conv(xBC, t["conv1d_weight"], t["conv1d_bias"], seq).split([H * P, G * N, G * N], -1)
    D = t["D"]
    y, states = recurrence(
        x.reshape(*x.shape[:2], H, P), softplus(dt + t["dt_bias"]), t["A"], B.reshape(*B.shape[:2], G, N),
        C.reshape(*C.shape[:2], G, N), D, first=t.get("initial_states"), seq=seq,
    )  # fmt: skip
    y, gate = y.flatten(2), z / (1 + (-z).exp())
    if "rmsnorm_weight" in t:
        u = y if norm_before_gate else y * gate
        groups = u.reshape(*u.shape[:2], G, -1)
        u = (groups / (groups.pow(2).mean(-1, keepdim=True) + eps).sqrt()).flatten(2) * t["rmsnorm_weight"]
        y = u * gate if norm_before_gate else u
    else:
        y = y * gate
    y = torch.cat([z0 / (1 + (-z0).exp()) * x0, y], -1)
    if "outproj_weight" in t:
        y = y @ t["outproj_weight"].T + t["outproj_bias"]
    return y, states[-1]


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("seq", [None, torch.tensor([[0] * 3 + [1] * 4, [0] * 7])], ids=["one", "packed"])
def test_fused_form(seq, norm_before_gate):
    t = fused()
    got = mamba_split_conv1d_scan_combined(
        **t, chunk_size=4, seq_idx=seq, return_final_states=True, ngroups=2, norm_before_gate=norm_before_gate
    )
    check(got, fused_formula(t, seq=seq, norm_before_gate=norm_before_gate), list(t.values()))


@pytest.mark.parametrize("absent", [("rmsnorm_weight",), ("outproj_weight", "outproj_bias"), ("initial_states",)])
def test_fused_form_without(absent):
    t = {n: v for n, v in fused().items() if n not in absent}
    got = mamba_split_conv1d_scan_combined(**t, chunk_size=4, ngroups=2)
    check((got,), fused_formula(t)[:1], list(t.values()))


def test_fused_form_with_one_skip_a_head_needs_headdim():
    t = fused(d_mlp=0)
    D = t["D"][:, 0]
    t["outproj_weight"] = torch.randn(6, 12, dtype=torch.float64)
    with pytest.raises(ValueError, match="headdim: expected the size of a head"):
        mamba_split_conv1d_scan_combined(**{**t, "D": D}, chunk_size=4, ngroups=2)
    got = mamba_split_conv1d_scan_combined(**{**t, "D": D}, chunk_size=4, ngroups=2, headdim=3)
    torch.testing.assert_close(got, fused_formula({**t, "D": D[:, None].expand(4, 3)}, d_mlp=0)[0])


def test_fused_form_refuses():
    t = fused()
    for error, words, wrong in (
        (NotImplementedError, "activation", {"activation": "relu"}),
        (TypeError, "pass activation by keyword", {"seq_idx": "silu"}),
        (TypeError, "state_dtype", {"state_dtype": torch.int8}),
        (ValueError, "zxbcdt: expected 2", {"zxbcdt": t["zxbcdt"][..., 1:]}),
        (ValueError, "conv1d_weight: expected", {"ngroups": 3}),
        (ValueError, "headdim: expected 3", {"headdim": 4}),
    ):
        with pytest.raises(error, match=words):
            mamba_split_conv1d_scan_combined(**{"ngroups": 2, **t, **wrong}, chunk_size=4)


def test_fused_form_projects_in_the_autocast_dtype():
    t = {n: v.detach().float() for n, v in fused().items()}
    with torch.autocast("cpu", torch.bfloat16):
        got = mamba_split_conv1d_scan_combined(**t, chunk_size=4, ngroups=2)
    want, _ = fused_formula({n: v.double() for n, v in t.items()})
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_fused_reference():
    t = {n: v for n, v in fused().items() if n != "initial_states"}
    got = mamba_split_conv1d_scan_ref(**t, chunk_size=4, ngroups=2)
    check((got,), fused_formula(t)[:1], list(t.values()))


def test_convolution_and_scan_reference():
    t = fused()
    xBC, dt, z = torch.randn(2, 7, 32).double(), torch.randn(2, 7, 4).double(), torch.randn(2, 7, 12).double()
    leaves = [v.requires_grad_() for v in (xBC, dt, z)]
    common = (t["conv1d_weight"], t["conv1d_bias"])
    got = mamba_conv1d_scan_ref(xBC, *common, dt, t["A"], 4, t["D"], z, t["dt_bias"], dt_softplus=True, ngroups=2)
    x, B, C = conv(xBC, *common).split([12, 10, 10], -1)
    want, _ = recurrence(
        x.reshape(2, 7, 4, 3), softplus(dt + t["dt_bias"]), t["A"], B.reshape(2, 7, 2, 5), C.reshape(2, 7, 2, 5),
        t["D"], z.reshape(2, 7, 4, 3),
    )  # fmt: skip
    check((got,), (want.flatten(2),), leaves)


def test_segsum_is_the_sum_of_each_segment():
    x = torch.randn(2, 6, dtype=torch.float64)
    got = segsum(x)
    for i in range(6):
        for j in range(6):
            want = x[:, j + 1 : i + 1].sum(1) if j <= i else torch.full((2,), -torch.inf, dtype=torch.float64)
            torch.testing.assert_close(got[:, i, j], want)


@pytest.mark.parametrize("L", [1, 8, 11])
@pytest.mark.parametrize("states", [False, True])
def test_minimal_form(L, states):
    t = draw(L=L, G=4)
    log_decay = -torch.rand(2, L, 4, dtype=torch.float64).requires_grad_()
    first = t["initial_states"][:, None] if states else None
    got = ssd_minimal_discrete(t["x"], log_decay, t["B"], t["C"], 4, first)
    S, y = t["initial_states"] if states else torch.zeros(2, 4, 3, 5, dtype=torch.float64), []
    for k in range(L):
        S = log_decay[:, k].exp()[..., None, None] * S + t["x"][:, k, ..., None] * t["B"][:, k, :, None]
        y.append((S * t["C"][:, k, :, None]).sum(-1))
    leaves = [t["x"], log_decay, t["B"], t["C"], *([t["initial_states"]] if states else [])]
    check(got, (torch.stack(y, 1), S), leaves)


def test_minimal_form_refuses_states_without_their_axis_of_blocks():
    t = draw(G=4)
    with pytest.raises(ValueError, match="initial_states: expected"):
        ssd_minimal_discrete(t["x"], t["dt"], t["B"], t["C"], 4, t["initial_states"])
    with pytest.raises(ValueError, match="block_len"):
        ssd_minimal_discrete(t["x"], t["dt"], t["B"], t["C"], 0)


def test_strong_decay_keeps_gradients_finite():
    t = draw(G=4)
    log_decay = torch.full((2, 11, 4), -300.0, dtype=torch.float64, requires_grad=True)
    Y, S = ssd_minimal_discrete(t["x"], log_decay, t["B"], t["C"], 4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(Y.sum() + S.sum(), [t["x"], log_decay, t["B"], t["C"]]))
    assert F.mse_loss(S, torch.einsum("bhp,bhn->bhpn", t["x"][:, -1], t["B"][:, -1])) < 1e-20

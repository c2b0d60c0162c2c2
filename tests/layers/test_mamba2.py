"""Mamba2, Mamba2Simple, Mamba2Mixer: numbers and gradients against the recurrence; parameters, dtypes, refusals."""

import copy
import inspect
import math
import pickle
import re

import pytest
import torch

from tests.layers.mamba2_definition import disturb, draw, rows, run, weights_of
from vmamba_npu import use_backend
from vmamba_npu.layers import Mamba2, Mamba2Mixer, Mamba2Simple, RMSNorm
from vmamba_npu.layers.norm import LayerNorm
from vmamba_npu.testing import error_ratio

INF = float("inf")
SMALL = dict(d_state=5, headdim=4, chunk_size=3, dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "groups": dict(ngroups=2, bias=True),
    "skip_per_channel": dict(D_has_hdim=True, conv_bias=False),
    "mlp_part": dict(d_ssm=8, norm_before_gate=True, ngroups=2),
    "no_norm": dict(rmsnorm=False, D_has_hdim=True, d_ssm=12),
    "dt_limit": dict(dt_limit=(0.3, 0.6), d_conv=2),
    "conv_1": dict(d_conv=1, conv_init=0.5, expand=1.5, headdim=3),
}


def check_against_definition(layer, u):
    """Outputs, and gradients of the input and of every parameter."""
    weights, v = weights_of(layer), u.detach().clone().requires_grad_()
    u = u.detach().clone().requires_grad_()
    got, want = layer(u), rows(layer, weights, v)[0]
    torch.testing.assert_close(got, want)
    d = draw(*want.shape, seed=9)
    leaves = dict(layer.named_parameters())
    got_d = torch.autograd.grad(got, [u, *leaves.values()], d)
    want_d = torch.autograd.grad(want, [v, *(weights[name] for name in leaves)], d)
    for name, g, w in zip(("u", *leaves), got_d, want_d, strict=True):
        # D is kept in the default dtype, float32, and so is its gradient
        torch.testing.assert_close(
            g.double(), w, rtol=1e-5 if name == "D" else 1e-8, atol=1e-6 if name == "D" else 1e-9
        )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_numbers_and_gradients(options, backend):
    layer = disturb(Mamba2(8, **{**SMALL, **options}, backend=backend))
    check_against_definition(layer, draw(2, 7, 8))


@pytest.mark.parametrize("L", [1, 2, 3, 4])
def test_short_sequences(L):
    check_against_definition(disturb(Mamba2(8, **SMALL)), draw(2, L, 8))


@pytest.mark.parametrize("kind", [Mamba2Mixer, Mamba2Simple])
def test_the_other_layers(kind):
    check_against_definition(disturb(kind(8, ngroups=2, **SMALL)), draw(2, 5, 8))


def test_simple_starts_from_its_learned_states_and_honours_seq_idx():
    layer = disturb(Mamba2Simple(8, learnable_init_states=True, **SMALL))
    weights, u = weights_of(layer), draw(2, 6, 8)
    want = torch.stack([run(layer, weights, row, weights["init_states"])[0] for row in u])
    got = layer(u)
    torch.testing.assert_close(got, want)
    (got_d,) = torch.autograd.grad(got.sum(), layer.init_states)
    torch.testing.assert_close(got_d, torch.autograd.grad(want.sum(), weights["init_states"])[0])
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    second = torch.stack([run(layer, weights, row[3:])[0] for row in u])
    torch.testing.assert_close(layer(u, seq_idx), torch.cat([want[:, :3], second], 1))


def test_state_dict_names_shapes_and_dtypes():
    layer = Mamba2(16, d_state=6, headdim=8, d_ssm=16, ngroups=2, bias=True, D_has_hdim=True, dtype=torch.bfloat16)
    E, GN, H, inner = 16, 12, 2, 32
    shapes = {
        "in_proj.weight": (2 * inner + 2 * GN + H, 16), "in_proj.bias": (2 * inner + 2 * GN + H,),
        "conv1d.weight": (E + 2 * GN, 1, 4), "conv1d.bias": (E + 2 * GN,), "dt_bias": (H,), "A_log": (H,), "D": (E,),
        "norm.weight": (E,), "out_proj.weight": (16, inner), "out_proj.bias": (16,),
    }  # fmt: skip
    state = layer.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == shapes
    assert {name for name, t in state.items() if t.dtype != torch.bfloat16} == {"D"}
    assert layer.norm.group_size == 8 and layer.norm.eps == 1e-5
    bare = Mamba2(16, headdim=8, rmsnorm=False, conv_bias=False)
    assert set(bare.state_dict()) == {"in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "out_proj.weight"}
    simple = Mamba2Simple(16, headdim=8, learnable_init_states=True)
    assert simple.state_dict()["init_states"].shape == (4, 8, 64) and simple.norm.group_size is None
    plain = Mamba2Mixer(16, headdim=8)
    plain.load_state_dict(Mamba2(16, headdim=8).state_dict(), strict=True)


def test_signatures_are_those_of_mamba_ssm():
    common = "d_conv=4 conv_init=None expand=2"
    steps = "dt_min=0.001 dt_max=0.1 dt_init_floor=0.0001 dt_limit=(0.0, inf)".replace(", ", ",")
    tail = "bias=False conv_bias=True chunk_size=256 use_mem_eff_path=True layer_idx=None"
    wanted = {
        Mamba2: f"d_model d_state=128 {common} headdim=64 d_ssm=None ngroups=1 A_init_range=(1,16) D_has_hdim=False "
        f"rmsnorm=True norm_before_gate=False {steps} {tail} process_group=None sequence_parallel=True device=None "
        "dtype=None backend=auto",
        Mamba2Simple: f"d_model d_state=64 {common} headdim=128 ngroups=1 A_init_range=(1,16) {steps} "
        f"learnable_init_states=False activation=swish {tail} device=None dtype=None backend=auto",
        RMSNorm: "hidden_size eps=1e-05 group_size=None norm_before_gate=True device=None dtype=None backend=auto",
    }
    for kind, text in wanted.items():
        parameters = inspect.signature(kind).parameters.values()
        said = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(", ", ",") for p in parameters]
        assert said == text.split()
    assert list(inspect.signature(Mamba2.forward).parameters)[1:] == [
        "u", "seqlen", "seq_idx", "cu_seqlens", "inference_params",
    ]  # fmt: skip


def test_initial_values():
    torch.manual_seed(0)
    layer = Mamba2(256, headdim=1, d_state=1, A_init_range=(2, 8), dt_min=0.01, dt_max=0.2, dt_init_floor=0.05)
    A, steps = layer.A_log.detach().exp(), torch.log1p(layer.dt_bias.detach().exp())
    assert 2 <= A.min() < 2.1 and 7.9 < A.max() <= 8.001 and abs(A.mean() - 5) < 0.3
    assert math.isclose(steps.min(), 0.05, rel_tol=1e-4) and 0.19 < steps.max() < 0.2001
    floored = math.log(5) / math.log(20)  # of log-uniform (0.01, 0.2), the part below 0.05
    assert abs((steps < 0.0501).double().mean() - floored) < 0.06
    assert layer.D.eq(1).all() and layer.norm.weight.eq(1).all()
    assert Mamba2(16, headdim=8, conv_init=0.0).conv1d.weight.eq(0).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(d_model=16), ("d_ssm = 32", "headdim = 64")),
        (dict(d_model=64, ngroups=3), ("ngroups", "2 heads", "3")),
        (dict(d_model=64, d_ssm=256), ("d_ssm", "128", "256")),
        (dict(d_model=64, d_ssm=0), ("d_ssm", "0")),
        (dict(d_model=3, expand=1.5, headdim=1), ("expand", "4.5")),
        (dict(d_model=64, d_state=0), ("d_state", "0")),
        (dict(d_model=64, chunk_size=0), ("chunk_size", "0")),
        (dict(d_model=64, A_init_range=(0, 1)), ("A_init_range", "(0, 1)")),
        (dict(d_model=64, dt_limit=(1.0, 0.5)), ("dt_limit", "0.5")),
        (dict(d_model=64, dt_min=0.2), ("dt_min", "0.1")),
        (dict(d_model=64, backend="tritn"), ("backend", "torch", "'tritn'")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_constructor_argument_is_named(options, words):
    with pytest.raises(ValueError) as error:
        Mamba2(**options)
    assert all(word in str(error.value) for word in words), error.value


def test_other_refusals():
    with pytest.raises(TypeError):
        Mamba2(64, d_stat=3)
    with pytest.raises(NotImplementedError, match="process_group"):
        Mamba2(64, process_group=object())
    with pytest.raises(NotImplementedError, match=r"activation.*'relu'"):
        Mamba2Simple(64, activation="relu")
    with pytest.raises(ValueError, match=r"group_size.*12.*5"):
        RMSNorm(12, group_size=5)
    layer = Mamba2(8, **SMALL)
    for kind in (layer, Mamba2Simple(8, **SMALL)):
        for size in ((2, 3, 7), (3, 8), (2, 3, 2, 8)):
            with pytest.raises(ValueError, match=rf"u: .*d_model = 8.*{re.escape(str(size))}"):
                kind(draw(*size))
    with pytest.raises(ValueError, match=r"u: .*seqlen = 4.*\(6, 8\)"):
        layer(draw(6, 8), seqlen=4)
    with pytest.raises(TypeError, match=r"seq_idx.*str"):
        layer(draw(1, 3, 8), seq_idx="012")
    with pytest.raises(ValueError, match="batch"):
        layer(draw(0, 3, 8))


def test_switch_backend_on_a_live_layer():
    layer, u = Mamba2(8, **SMALL), draw(1, 5, 8)
    want = layer(u)
    layer.set_backend("reference")
    assert layer.backend == layer.norm.backend == "reference"
    torch.testing.assert_close(layer(u), want)
    layer.set_backend("auto")
    with use_backend("reference"):
        torch.testing.assert_close(layer(u), want)
    with pytest.raises(ValueError, match=r"backend.*'cuda'"):
        layer.set_backend("cuda")


def test_copies_keep_values_and_flags():
    def marked(layer):
        return {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}

    layer, u = Mamba2Simple(8, learnable_init_states=True, **SMALL), draw(1, 5, 8)
    flags = {"A_log", "D", "dt_bias", "init_states"}
    meta = Mamba2Simple(8, learnable_init_states=True, **SMALL, device="meta")
    assert meta(u.to("meta")).device.type == "meta"
    empty = meta.to_empty(device="cpu")
    assert marked(empty) == flags
    empty.load_state_dict(layer.state_dict(), strict=True)
    assigned = Mamba2Simple(8, learnable_init_states=True, **SMALL)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), empty, assigned):
        torch.testing.assert_close(other(u), layer(u), rtol=0, atol=0)
        assert marked(other) == layer.no_weight_decay() == flags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_forward_and_backward(dtype):
    torch.manual_seed(0)
    layer = Mamba2(32, d_state=16, headdim=16, ngroups=2)
    u = draw(2, 40, 32)
    want = rows(layer, weights_of(layer), u)[0]
    rates = layer._decay_rates()
    with torch.autocast("cpu", dtype):
        out = layer(u.float())
        torch.testing.assert_close(layer._decay_rates(), rates, rtol=0, atol=0)
    assert out.dtype == dtype and rates.dtype == torch.float32
    assert error_ratio(out, want) < 2e-2  # three roundings: each projection's operands, and between the operators
    out.float().square().mean().backward()
    for name, p in layer.named_parameters():
        assert p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_module_answers_in_its_dtype(dtype):
    layer = Mamba2(32, d_state=16, headdim=16, dtype=dtype)
    u = draw(2, 20, 32)
    out = layer(u.to(dtype))
    assert out.dtype == dtype
    assert error_ratio(out, rows(layer, weights_of(layer), u.to(dtype).double())[0]) < 2e-2


@pytest.mark.parametrize("kind", [Mamba2, Mamba2Simple])
def test_decay_rates_of_half_weights_are_float32(kind):
    layer = kind(64, headdim=2, dtype=torch.bfloat16)
    torch.testing.assert_close(layer._decay_rates(), -layer.A_log.float().exp(), rtol=1e-6, atol=0)
    rates = kind(64, headdim=2, dtype=torch.float64)
    torch.testing.assert_close(rates._decay_rates(), -rates.A_log.exp(), rtol=1e-14, atol=0)


def test_fp16_training_step_with_a_scaler():
    layer = Mamba2(16, d_state=4, headdim=8)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler("cpu")
    before = [p.clone() for p in layer.parameters()]
    with torch.autocast("cpu", torch.float16):
        loss = layer(draw(2, 9, 16).float()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert all(p.isfinite().all() and not p.equal(b) for p, b in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize("before", [True, False])
def test_gated_norm_modules(before):
    x, z, w, b = draw(3, 12), draw(3, 12, seed=1), draw(12, seed=2), draw(12, seed=3)
    rms = RMSNorm(12, group_size=4, norm_before_gate=before, dtype=torch.float64)
    layer_norm = LayerNorm(12, group_size=4, norm_before_gate=before, dtype=torch.float64)
    rms.load_state_dict({"weight": w})
    layer_norm.load_state_dict({"weight": w, "bias": b})
    gate = z / (1 + (-z).exp())
    u = (x if before else x * gate).reshape(3, 3, 4)
    centred = u - u.mean(-1, keepdim=True)
    for module, t, shift in ((rms, u, 0), (layer_norm, centred, b)):
        v = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(3, 12) * w + shift
        torch.testing.assert_close(module(x, z), v * gate if before else v)
        assert module(x.to(torch.bfloat16)).dtype == torch.bfloat16

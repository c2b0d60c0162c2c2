"""Norms under mamba_ssm's names: values and gradients against the formulas in float64."""

import pytest
import torch
from torch import Tensor

from vmamba_npu.compat import layer_norm as residual_norms
from vmamba_npu.compat import layernorm_gated as gated

g = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


def check(got, want, leaves) -> None:
    torch.testing.assert_close(got, want)
    d = [torch.randn_like(t) for t in want]
    torch.testing.assert_close(torch.autograd.grad(got, leaves, d), torch.autograd.grad(want, leaves, d))


def normed(u: Tensor, eps: float, rms: bool, size: int | None = None) -> Tensor:
    v = u.reshape(*u.shape[:-1], -1, size or u.shape[-1])
    if not rms:
        v = v - v.mean(-1, keepdim=True)
    return (v / (v.pow(2).mean(-1, keepdim=True) + eps).sqrt()).reshape(u.shape)


def gated_formula(x, weight, bias, z, eps, size, norm_before_gate, rms) -> Tensor:
    gate = 1 if z is None else z / (1 + (-z).exp())
    v = normed(x if norm_before_gate else x * gate, eps, rms, size) * weight
    v = v if bias is None else v + bias
    return v * gate if norm_before_gate else v


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("name", ["rmsnorm_fn", "layernorm_fn", "rms_norm_ref"])
def test_gated_functions(name, size, norm_before_gate):
    x, z, weight, bias = normal(2, 5, 12), normal(2, 5, 12), normal(12), normal(12)
    function, rms = getattr(gated, name), name != "layernorm_fn"
    for b, gate in ((bias, z), (None, z), (bias, None)):
        got = function(x, weight, b, z=gate, eps=0.1, group_size=size, norm_before_gate=norm_before_gate)
        want = gated_formula(x, weight, b, gate, 0.1, size, norm_before_gate, rms)
        check((got,), (want,), [t for t in (x, weight, b, gate) if t is not None])


def test_layernorm_fn_with_rms_is_rmsnorm_fn_and_the_default_eps_is_1e_6():
    x, weight, z = normal(3, 8) * 1e-3, normal(8), normal(3, 8)
    want = gated_formula(x, weight, None, z, 1e-6, None, True, True)
    torch.testing.assert_close(gated.layernorm_fn(x, weight, None, z, is_rms_norm=True), want)
    torch.testing.assert_close(gated.rmsnorm_fn(x, weight, None, z), want)
    torch.testing.assert_close(gated.rms_norm_ref(x, weight, None, z), want)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_gated_modules(name):
    module = getattr(gated, name)(12, group_size=4, norm_before_gate=False, dtype=torch.float64)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == (
        {"weight": (12,)} if name == "RMSNorm" else {"weight": (12,), "bias": (12,)}
    )
    assert name == "LayerNorm" or module.bias is None
    x, z = normal(2, 12) * 1e-2, normal(2, 12)
    want = gated_formula(x, module.weight, module.bias, z, 1e-5, 4, False, name == "RMSNorm")
    torch.testing.assert_close(module(x, z), want)


def test_gated_dtypes():
    x, z, weight = normal(2, 8).bfloat16(), normal(2, 8).float(), normal(8).float()
    for name in ("rmsnorm_fn", "layernorm_fn", "rms_norm_ref"):
        y = getattr(gated, name)(x, weight, None, z)
        assert y.dtype == torch.bfloat16
        want = gated_formula(x.double(), weight.double(), None, z.double(), 1e-6, None, True, name != "layernorm_fn")
        torch.testing.assert_close(y.double(), want, rtol=1e-2, atol=1e-2)
    assert gated.rms_norm_ref(x, weight, None, z, upcast=False).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["rmsnorm_fn", "layernorm_fn", "rms_norm_ref"])
def test_a_group_must_divide_the_width(name):
    with pytest.raises(ValueError, match="group_size: expected a divisor of the 12 channels"):
        getattr(gated, name)(normal(2, 12), normal(12), None, group_size=5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("name", ["layer_norm_fn", "rms_norm_fn", "layer_norm_ref", "rms_norm_ref"])
def test_residual_functions(name, second, residual):
    x, weight, bias = normal(2, 3, 8), normal(8), normal(8)
    options = (
        {"x1": normal(2, 3, 8), "weight1": normal(8), "bias1": normal(8)} if second else {"rowscale": normal(2, 3)}
    )
    before = normal(2, 3, 8) if residual else None
    got = getattr(residual_norms, name)(x, weight, bias, before, prenorm=True, eps=0.1, **options)
    r = x + options["x1"] if second else x * options["rowscale"][..., None]
    r = r + before if residual else r
    n = normed(r, 0.1, name.startswith("rms"))
    want = (n * weight + bias, *([n * options["weight1"] + options["bias1"]] if second else []), r)
    leaves = [x, weight, bias, *options.values(), *([before] if residual else [])]
    check(got, want, leaves)
    alone = getattr(residual_norms, name)(x, weight, bias, before, eps=0.1, **options)
    torch.testing.assert_close(alone, want[:2] if second else want[0])


@pytest.mark.parametrize("name", ["layer_norm_ref", "rms_norm_ref"])
def test_references_return_the_sum_in_the_dtype_that_computed_it(name):
    x, residual, weight = normal(2, 8).bfloat16(), normal(2, 8).bfloat16(), normal(8).bfloat16()
    for upcast, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        y, r = getattr(residual_norms, name)(x, weight, None, residual, prenorm=True, upcast=upcast)
        assert (y.dtype, r.dtype) == (torch.bfloat16, dtype)
        torch.testing.assert_close(r, x.to(dtype) + residual.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_dropout_masks(name):
    x, x1, residual, weight = normal(4, 64), normal(4, 64), normal(4, 64), normal(64)
    function, reference = getattr(residual_norms, f"{name}_fn"), getattr(residual_norms, f"{name}_ref")
    y, r, mask, mask1 = function(
        x, weight, None, residual, x1=x1, dropout_p=0.25, prenorm=True, return_dropout_mask=True
    )
    assert 0.5 < mask.double().mean() < 0.95 and not torch.equal(mask, mask1)
    want = (x * mask + x1 * mask1) / 0.75 + residual
    torch.testing.assert_close(r, want)
    torch.testing.assert_close(y, normed(want, 1e-6, name == "rms_norm") * weight)
    again = reference(x, weight, None, residual, x1, dropout_p=0.25, dropout_mask=mask, dropout_mask1=mask1)
    torch.testing.assert_close(again, y)
    assert function(x, weight, None, return_dropout_mask=True)[1:] == (None, None)
    assert not torch.equal(reference(x, weight, None, dropout_p=0.5), reference(x, weight, None))


def test_the_residual_has_its_own_dtype():
    x, weight = normal(2, 8).detach().bfloat16(), normal(8).detach().float()
    dtypes = [
        residual_norms.rms_norm_fn(x, weight, None, residual, prenorm=True, residual_in_fp32=wide)[1].dtype
        for residual, wide in ((None, False), (None, True), (x.half(), True), (x.float(), False))
    ]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float16, torch.float32]
    y, r = residual_norms.rms_norm_fn(x, weight, None, x.float() * 1e-3, prenorm=True)
    torch.testing.assert_close(r, x.float() + x.float() * 1e-3)  # the sum is not rounded to the dtype of x
    assert y.dtype == torch.bfloat16


def test_norm_and_linear_map():
    x, residual, weight, bias = normal(2, 8), normal(2, 8), normal(8), normal(8)
    W, b = normal(3, 8), normal(3)
    got = residual_norms.layer_norm_linear_fn(x, weight, bias, W, b, residual, prenorm=True)
    r = x + residual
    check(got, ((normed(r, 1e-6, False) * weight + bias) @ W.T + b, r), [x, residual, weight, bias, W, b])
    out = residual_norms.layer_norm_linear_fn(x, weight, None, W, None, is_rms_norm=True)
    torch.testing.assert_close(out, normed(x, 1e-6, True) * weight @ W.T)


def test_residual_module():
    module = residual_norms.RMSNorm(8, dropout_p=0.5, dtype=torch.float64)
    assert list(module.state_dict()) == ["weight"] and module.bias is None
    x, residual = normal(2, 8) * 1e-2, normal(2, 8) * 1e-2
    assert not torch.equal(module(x), module(x))
    module.eval()
    y, r = module(x, residual, prenorm=True)
    torch.testing.assert_close((y, r), (normed(x + residual, 1e-5, True) * module.weight, x + residual))


def test_residual_functions_refuse():
    x, weight = normal(2, 8), normal(8)
    for words, wrong in (
        ("residual: expected the shape of x", {"residual": x[:1]}),
        ("x1: expected the shape of x", {"x1": x[:1]}),
        ("rowscale: expected to be absent", {"x1": x, "rowscale": x[:, 0]}),
        ("rowscale: expected .2,.", {"rowscale": x}),
        ("bias1: expected weight1", {"bias1": weight}),
        ("dropout_p: expected", {"dropout_p": 1.0}),
    ):
        with pytest.raises(ValueError, match=words):
            residual_norms.layer_norm_fn(x, weight, None, **wrong)

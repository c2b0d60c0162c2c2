"""gated_rms_norm: every backend against the formula in float64, forward and all gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmamba_npu.ops import gated_rms_norm
from vmamba_npu.ops.gated_rms_norm import torch as blocks
from vmamba_npu.testing import error_ratio, serving

BACKENDS = serving("gated_rms_norm", torch.float64)


def formula(x, weight, bias, z, eps, group_size, norm_before_gate):
    def silu(t):
        return t / (1 + (-t).exp())

    u = x if norm_before_gate or z is None else x * silu(z)
    size = x.shape[-1] if group_size is None else group_size
    groups = [g / (g.pow(2).sum(-1, keepdim=True) / size + eps) ** 0.5 for g in u.split(size, -1)]
    v = torch.cat(groups, -1) * weight
    v = v if bias is None else v + bias
    return v * silu(z) if norm_before_gate and z is not None else v


def draw(seed, shape, has_bias, has_z, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def t(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    return t(*shape), t(shape[-1]), t(shape[-1]) if has_bias else None, t(*shape) if has_z else None


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, [t for t in inputs if t is not None], dy)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.sampled_from([(), (1,), (3,), (2, 5), (0,)]),
    groups=st.integers(1, 4),
    size=st.integers(1, 9),
    has_bias=st.booleans(),
    has_z=st.booleans(),
    before=st.booleans(),
    seed=st.integers(0, 99),
)
def test_forward_and_gradients(backend, rows, groups, size, has_bias, has_z, before, seed):
    inputs = draw(seed, (*rows, groups * size), has_bias, has_z)
    group_size = None if groups == 1 else size
    got = gated_rms_norm(*inputs, 1e-5, group_size, before, backend)
    want = formula(*inputs, 1e-5, group_size, before)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(gradients(got, inputs, dy), gradients(want, inputs, dy))


def worked(k, *shape):
    n = int(torch.tensor(shape).prod())
    return (0.37 * torch.arange(n, dtype=torch.float64) + k).sin().view(shape).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("before", "want"),
    [
        (True, [(1.0852771737, 0.6926499744), (-0.7073767470, 0.2449686682), (-0.3272996245, 0.0820587582),
                (-1.1411930069, 0.8907499955)]),
        (False, [(2.8235079584, 5.6893754979), (-1.4220391381, 2.0290322198), (3.5930076643, 4.1450840289),
                 (-9.9783088714, 14.2486828189)]),
    ],
)  # fmt: skip
def test_worked_example(backend, before, want):
    """Sums and sums of squares of y, dx, dweight, dz, computed once outside of this package."""
    x, weight, z = worked(1, 3, 8), worked(2, 8), worked(3, 3, 8)
    y = gated_rms_norm(x, weight, None, z, 1e-5, 4, before, backend)
    results = (y, *torch.autograd.grad(y, [x, weight, z], worked(4, 3, 8).detach()))
    for got, (total, squares) in zip(results, want, strict=True):
        assert float(got.detach().sum()) == pytest.approx(total, abs=1e-9)
        assert float(got.detach().square().sum()) == pytest.approx(squares, abs=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("before", [True, False])
def test_narrow_dtypes(backend, dtype, limit, before):
    x, weight, bias, z = draw(5, (7, 96), True, True, dtype)
    weight = weight.detach().float().requires_grad_()  # mixed, as layers under autocast have it
    inputs = (x, weight, bias, z)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    got, want = gated_rms_norm(*inputs, 1e-5, 32, before, backend), formula(*wide, 1e-5, 32, before)
    assert got.dtype == dtype
    assert error_ratio(got, want) <= limit
    dy = torch.randn_like(want)
    for a, b, t in zip(
        gradients(got, inputs, dy.to(dtype)), gradients(want, wide, dy.to(dtype).double()), inputs, strict=True
    ):
        assert a.dtype == t.dtype
        assert error_ratio(a, b) <= 5 * limit


@pytest.mark.parametrize("elements", [1, 24, 30, 1000])
@pytest.mark.parametrize("has_z", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_blocks_of_rows_change_nothing(monkeypatch, elements, has_z, before):
    """The torch backend in blocks of one row, of some rows with a rest, and of all."""
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", elements)
    inputs = draw(6, (7, 12), True, has_z)
    got, want = gated_rms_norm(*inputs, 1e-5, 4, before, "torch"), formula(*inputs, 1e-5, 4, before)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(gradients(got, inputs, dy), gradients(want, inputs, dy))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_expanded_inputs(backend):
    x = torch.randn(6, 4, dtype=torch.float64).mT.requires_grad_()  # [4, 6]
    z = torch.randn(1, 6, dtype=torch.float64).expand(4, 6).requires_grad_()
    weight = torch.randn(12, dtype=torch.float64)[::2].requires_grad_()
    got, want = gated_rms_norm(x, weight, None, z, backend=backend), formula(x, weight, None, z, 1e-5, None, True)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(gradients(got, (x, weight, z), dy), gradients(want, (x, weight, z), dy))


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_of_zeros_is_finite(backend):
    x = torch.zeros(2, 8, requires_grad=True)
    y = gated_rms_norm(x, torch.ones(8), backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.abs().max() == 0
    torch.testing.assert_close(dx, torch.full_like(dx, 1e-5**-0.5))  # du = g / sqrt(eps) where x is 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("before", [True, False])
def test_contract(backend, before):
    x, weight, bias, z = draw(1, (2, 3, 8), True, True, torch.float32)
    op = torch.ops.vmamba_npu.gated_rms_norm_fwd.default
    torch.library.opcheck(op, (x, weight, bias, z, 1e-5, 4, before, backend))


def test_compiles_without_a_break():
    x, weight, _, z = draw(1, (3, 8), False, True)
    compiled = torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, None, z), formula(x, weight, None, z, 1e-5, None, True))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.tensor(1.0)), ValueError, "x: expected"),
        (dict(x=torch.zeros(2, 0)), ValueError, "D: expected"),
        (dict(x=torch.zeros(2, 8, dtype=torch.int64)), TypeError, "x: expected a floating-point"),
        (dict(weight=torch.ones(7)), ValueError, r"weight: expected shape \(8,\), got \(7,\)"),
        (dict(bias=torch.ones(1, 8)), ValueError, "bias: expected shape"),
        (dict(z=torch.ones(8)), ValueError, r"z: expected shape \(2, 8\), got \(8,\)"),
        (dict(weight=torch.ones(8, device="meta")), ValueError, "weight: expected device cpu, got meta"),
        (dict(eps=0.0), ValueError, "eps: expected a positive"),
        (dict(eps=float("nan")), ValueError, "eps: expected a positive"),
        (dict(group_size=3), ValueError, "group_size: expected a divisor of the 8 channels"),
        (dict(group_size=0), ValueError, "group_size"),
        (dict(backend="fast"), ValueError, "backend: .*'fast'"),
        (dict(gruop_size=4), TypeError, "gruop_size"),
    ],
)
def test_bad_input_names_the_argument(change, error, words):
    with pytest.raises(error, match=words):
        gated_rms_norm(**(dict(x=torch.ones(2, 8), weight=torch.ones(8)) | change))

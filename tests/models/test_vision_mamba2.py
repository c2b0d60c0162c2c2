"""VisionMamba2 against the network written here from its definition: plain loops over tokens, float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import vmamba_npu
from vmamba_npu import VisionMamba2
from vmamba_npu.layers.vision import VisionMamba2Mixer
from vmamba_npu.models import count_scans, scan_order
from vmamba_npu.ops import ssd
from vmamba_npu.testing import serving

BACKENDS = serving("ssd", torch.float64)


def order(direction: int, H: int, W: int) -> list[int]:
    """Row-major token at each step of a scan, from the formulas of the definition."""
    L = H * W
    if direction in (1, 3):
        return [order(direction - 1, H, W)[L - 1 - k] for k in range(L)]
    return list(range(L)) if direction == 0 else [(k % H) * W + k // H for k in range(L)]


def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # [H, W, C]
    H, W, _ = x.shape
    rows = []
    for r in range(H):
        for c in range(W):
            y = bias
            for i in range(3):
                for j in range(3):
                    if 0 <= r + i - 1 < H and 0 <= c + j - 1 < W:
                        y = y + x[r + i - 1, c + j - 1] * weight[:, 0, i, j]
            rows.append(y)
    return torch.stack(rows).view(H, W, -1)


def patches(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # [H, W, C] -> [ceil(H/k), ceil(W/k), C']
    k = weight.shape[-1]
    H, W, C = x.shape
    padded = x.new_zeros(-(-H // k) * k, -(-W // k) * k, C)
    padded[:H, :W] = x
    rows = [
        [torch.einsum("ijc,ocij->o", padded[r : r + k, c : c + k], weight) + bias for c in range(0, padded.shape[1], k)]
        for r in range(0, padded.shape[0], k)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def layer_norm(x: Tensor, p: dict, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def plain_mixer(u: Tensor, p: dict, name: str, G: int, directions: int = 4) -> Tensor:
    """One map [H, W, C]; gate and skip inside of each scan."""
    H, W, _ = u.shape
    heads, P = p[f"{name}D"].shape
    E = heads * P
    zxbcdt = u @ p[f"{name}in_proj.weight"].T
    GN = (zxbcdt.shape[-1] - 2 * E - heads) // 2
    z, xBC, dt = zxbcdt[..., :E], zxbcdt[..., E : 2 * E + 2 * GN], zxbcdt[..., 2 * E + 2 * GN :]
    xBC = silu(depthwise(xBC, p[f"{name}dwconv.weight"], p[f"{name}dwconv.bias"])).view(H * W, -1)
    x = xBC[:, :E].view(-1, heads, P)
    B, C = (t.view(H * W, G, -1).repeat_interleave(heads // G, 1) for t in (xBC[:, E : E + GN], xBC[:, E + GN :]))
    z = z.reshape(-1, heads, P)
    step = (1 + (dt.reshape(-1, heads) + p[f"{name}dt_bias"]).exp()).log()
    A = -p[f"{name}A_log"].exp()
    total = 0
    for direction in range(directions):
        S, y = u.new_zeros(heads, P, B.shape[-1]), {}
        for t in order(direction, H, W):
            S = (step[t] * A).exp()[:, None, None] * S + step[t][:, None, None] * x[t][:, :, None] * B[t][:, None]
            y[t] = ((S * C[t][:, None]).sum(-1) + p[f"{name}D"] * x[t]) * silu(z[t])
        total = total + torch.stack([y[t] for t in range(H * W)])
    mean = (total / directions).view(H, W, E)
    return layer_norm(mean, p, f"{name}out_norm") @ p[f"{name}out_proj.weight"].T


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def plain_network(image: Tensor, p: dict, depths, ngroups) -> Tensor:  # [C, H, W] -> logits
    x = patches(image.permute(1, 2, 0), p["patch_embed.proj.weight"], p["patch_embed.proj.bias"])
    for s, depth in enumerate(depths):
        if s:
            name = f"stages.{s}.downsample"
            x = layer_norm(patches(x, p[f"{name}.conv.weight"], p[f"{name}.conv.bias"]), p, f"{name}.norm")
        for b in range(depth):
            name = f"stages.{s}.blocks.{b}."
            x = x + depthwise(x, p[f"{name}cpe1.weight"], p[f"{name}cpe1.bias"])
            x = x + plain_mixer(layer_norm(x, p, f"{name}norm1"), p, f"{name}mixer.", ngroups[s])
            x = x + depthwise(x, p[f"{name}cpe2.weight"], p[f"{name}cpe2.bias"])
            hidden = gelu(layer_norm(x, p, f"{name}norm2") @ p[f"{name}mlp.fc1.weight"].T + p[f"{name}mlp.fc1.bias"])
            x = x + hidden @ p[f"{name}mlp.fc2.weight"].T + p[f"{name}mlp.fc2.bias"]
    tokens = layer_norm(x, p, "norm").reshape(-1, x.shape[-1])
    return p["head.fc.weight"] @ tokens.mean(0) + p["head.fc.bias"]


def draw_parameters(model: torch.nn.Module) -> None:
    """Values of ordinary size everywhere, so that no term hides behind a small weight or a zero bias."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)


def small(**changes) -> VisionMamba2:
    sizes = dict(
        in_chans=2, num_classes=5, dims=(4, 8), depths=(1, 2), ngroups=(2, 4), chunk_sizes=(5, 3), patch_size=2,
        headdim=2, d_state=3, dtype=torch.float64,
    )  # fmt: skip
    model = VisionMamba2(**{**sizes, **changes})
    draw_parameters(model)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(8, 8), (5, 10), (11, 4), (1, 1)], ids=str)
def test_network_equals_its_definition_with_all_gradients(backend, size):
    model = small(backend=backend)
    images = torch.randn(2, 2, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parameters = dict(model.named_parameters())
    got = model(images)
    want = torch.stack([plain_network(image, parameters, (1, 2), (2, 4)) for image in images])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    cotangent = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got_gradients = torch.autograd.grad(got, list(parameters.values()), cotangent)
    want_gradients = torch.autograd.grad(want, list(parameters.values()), cotangent)
    for name, g, w in zip(parameters, got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def mixer_and_input(H: int, W: int, **changes) -> tuple[VisionMamba2Mixer, Tensor]:
    sizes = dict(d_model=8, d_state=3, headdim=2, ngroups=4, chunk_size=4, dtype=torch.float64)
    mixer = VisionMamba2Mixer(**{**sizes, **changes})
    draw_parameters(mixer)
    u = torch.randn(2, H, W, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return mixer, u


@pytest.mark.parametrize("directions", [1, 2, 4])
@pytest.mark.parametrize("size", [(3, 3), (2, 5), (4, 1)], ids=str)
def test_mixer_equals_its_definition(directions, size):
    mixer, u = mixer_and_input(*size, directions=directions)
    p = dict(mixer.named_parameters())
    want = torch.stack([plain_mixer(one, p, "", 4, directions) for one in u])
    torch.testing.assert_close(mixer(u), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [(4, 4), (3, 7), (6, 2)], ids=str)
def test_one_call_equals_four_calls_with_gate_and_skip_inside(size):
    """The single SSD call of a block, and D and z after the mean, against four calls that have D and z inside."""
    mixer, u = mixer_and_input(*size)
    H, W = size
    z, xBC, dt = mixer.in_proj(u).split([16, 16 + 24, 8], -1)
    x, B, C = torch.nn.functional.silu(mixer.dwconv(xBC)).flatten(1, 2).split([16, 12, 12], -1)
    x, z = x.unflatten(2, (8, 2)), z.flatten(1, 2).unflatten(2, (8, 2))
    B, C, dt = B.unflatten(2, (4, 3)), C.unflatten(2, (4, 3)), dt.flatten(1, 2)
    A = -mixer.A_log.exp()
    total = 0
    for direction in range(4):
        i = torch.tensor(order(direction, H, W))
        y, _ = ssd(
            x[:, i], dt[:, i], A, B[:, i], C[:, i], 4, D=mixer.D, z=z[:, i], dt_bias=mixer.dt_bias, dt_softplus=True
        )
        total = total + torch.zeros_like(y).index_copy(1, i, y)
    want = mixer.out_proj(mixer.out_norm((total / 4).flatten(2).unflatten(1, size)))
    got = mixer(u)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    inputs = [u, *mixer.parameters()]
    cotangent = torch.randn_like(want)
    got_gradients = torch.autograd.grad(got, inputs, cotangent, retain_graph=True)
    torch.testing.assert_close(got_gradients, torch.autograd.grad(want, inputs, cotangent), rtol=1e-10, atol=1e-11)


def test_scan_orders():
    assert [scan_order(d, 2, 3).tolist() for d in range(4)] == [
        [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 3, 1, 4, 2, 5], [5, 2, 4, 1, 3, 0],
    ]  # fmt: skip
    for H, W in ((3, 3), (2, 5), (5, 2), (1, 4), (1, 1)):
        assert [scan_order(d, H, W).tolist() for d in range(4)] == [order(d, H, W) for d in range(4)]
    with pytest.raises(ValueError, match="direction: expected 0 to 3, got 4"):
        scan_order(4, 2, 2)
    with pytest.raises(ValueError, match="at least 1 x 1, got 0 x 2"):
        scan_order(0, 0, 2)


def test_mixer_commutes_with_half_turn_and_transposition_but_not_with_a_mirror():
    mixer, u = mixer_and_input(3, 4)
    with torch.no_grad():
        mixer.dwconv.weight.copy_(mixer.dwconv.weight[:, :, 1:2, 1:2].expand(-1, -1, 3, 3))
    y = mixer(u)
    torch.testing.assert_close(mixer(u.flip(1, 2)), y.flip(1, 2))
    torch.testing.assert_close(mixer(u.transpose(1, 2)), y.transpose(1, 2))
    assert (mixer(u.flip(2)) - y.flip(2)).abs().max() > 1e-3


@pytest.mark.parametrize("chunk_sizes", [(1, 1), (2, 7), (64, 64)], ids=str)
def test_chunk_sizes_are_no_part_of_the_result(chunk_sizes):
    model = small()
    images = torch.randn(1, 2, 12, 14, dtype=torch.float64)
    want = model(images)
    model.set_chunk_sizes(chunk_sizes)
    torch.testing.assert_close(model(images), want, rtol=1e-11, atol=1e-12)
    assert set(small(chunk_sizes=chunk_sizes).state_dict()) == set(model.state_dict())
    with pytest.raises(ValueError, match="chunk_sizes: expected 2 values >= 1, got"):
        model.set_chunk_sizes((8,))


def test_images_of_a_batch_do_not_mix():
    model = small()
    images = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images), torch.cat([model(image[None]) for image in images]))
    torch.testing.assert_close(model(images[[2, 0, 1]]), model(images)[[2, 0, 1]])


class Calls(TorchDispatchMode):
    """Names of the backends that operator calls were given."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == "vmamba_npu.ssd_fwd.default":
            self.backends.append(args[-1])
        return func(*args, **(kwargs or {}))


def test_backend_is_an_argument_and_can_be_switched_on_a_live_model():
    model = small(backend="reference")
    images = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    with torch.no_grad(), Calls() as calls:
        want = model(images)
    assert calls.backends == ["reference"] * 3 and model.backend == "reference"
    model.set_backend("torch")
    with torch.no_grad(), Calls() as calls:
        got = model(images)
    assert calls.backends == ["torch"] * 3 and model.backend == "torch"
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match=r"backend: expected one of auto, reference, torch.*, got 'toch'"):
        model.set_backend("toch")
    assert model.backend == "torch" and all(m.backend == "torch" for m in model.modules() if hasattr(m, "set_backend"))


def test_scans_are_counted_and_each_block_makes_one_call():
    model = VisionMamba2(dims=(4, 8, 8, 8), depths=(2, 2, 6, 2), ngroups=(1, 1, 1, 1), headdim=4, d_state=2)
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), Calls() as calls, count_scans(model) as count:
        model(images)
    assert str(count) == "48 directional scans (12 launches x 4 directions)"
    assert len(calls.backends) == 12
    model(images)
    assert count.launches == 12, "counting ends with the block"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(headdim=3), r"headdim: expected a divisor of the inner width 2 \* 4, got 3"),
        (dict(ngroups=(3, 4)), "ngroups: expected a divisor of the 4 heads, got 3"),
        (dict(depths=(1, 2, 3)), r"depths: expected 2 values, one for each of dims, got \(1, 2, 3\)"),
        (dict(ngroups=(1,)), r"ngroups: expected 2 values, one for each of dims, got \(1,\)"),
        (dict(chunk_sizes=(1, 2, 3)), "chunk_sizes: expected 2 values"),
        (dict(chunk_sizes=(4, 0)), "chunk_size: expected at least 1, got 0"),
        (dict(dims=()), "dims: expected the channels of at least one stage"),
        (dict(directions=3), "directions: expected 1, 2 or 4, got 3"),
        (dict(backend="cuda"), r"backend: expected one of auto, reference, torch.*, got 'cuda'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="output_stride"):
        small(output_stride=16)


def test_initial_values():
    model = VisionMamba2(dims=(32, 64), depths=(1, 1), ngroups=(1, 1), chunk_sizes=(8, 8), headdim=2)
    p = dict(model.named_parameters())
    A_log = torch.cat([v for n, v in p.items() if n.endswith("A_log")])
    step = torch.nn.functional.softplus(torch.cat([v for n, v in p.items() if n.endswith("dt_bias")]))
    assert 0 <= A_log.min() < 0.3 and 2.4 < A_log.max() <= math.log(16) + 1e-6
    assert 0.999e-3 <= step.min() < 1.5e-3 and 0.06 < step.max() <= 0.1001
    assert abs(step.log().mean() - math.log(1e-2)) < 0.4
    for name, value in p.items():
        if name.endswith(".D"):
            assert (value == 1).all()
        if (
            any(part in name for part in ("proj.weight", "fc1.weight", "fc2.weight", "head.fc.weight"))
            and "patch" not in name
        ):
            assert 0.018 < value.std() < 0.022, name
        if name.endswith(("fc1.bias", "fc2.bias", "fc.bias")):
            assert (value == 0).all(), name
    assert p["patch_embed.proj.weight"].abs().max() <= 1 / math.sqrt(48)


def test_half_precision_modules_and_autocast():
    """float32 does not leak, and deep stacks stay finite in bf16 and under autocast, backward included."""
    model = VisionMamba2(dims=(8,), depths=(12,), ngroups=(2,), chunk_sizes=(16,), headdim=4, d_state=4, num_classes=3)
    draw_parameters(model)
    images = torch.randn(2, 3, 24, 24)
    exact = model.double()(images.double())
    scale = exact.abs().max()
    for dtype in (torch.bfloat16, torch.float16):
        low = model.to(dtype)(images.to(dtype))
        assert low.dtype == dtype and (low.double() - exact).abs().max() < 0.1 * scale
        model.float()
        with torch.autocast("cpu", dtype=dtype):
            logits = model(images)
        assert (logits.double() - exact).abs().max() < 0.1 * scale
        model.zero_grad()
        logits.float().logsumexp(1).sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_named_parameters_of_the_package():
    assert vmamba_npu.VisionMamba2 is VisionMamba2

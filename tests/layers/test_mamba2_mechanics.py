"""Mamba-2 layers under what users do to modules: compile, export, script, trace, wrap, checkpoint, stack, lay out."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.layers.mamba2_definition import disturb, draw, rows, weights_of
from vmamba_npu.layers import Mamba2, Mamba2Mixer, Mamba2Simple

SMALL = dict(d_state=5, headdim=4, chunk_size=3, dtype=torch.float64)
VARIANTS = {
    "plain": {},
    "no_norm": dict(rmsnorm=False, D_has_hdim=True),
    "mlp_part": dict(d_ssm=8, ngroups=2, bias=True, conv_bias=False),
}


def gradients(layer, out):
    return torch.autograd.grad(out.square().sum(), list(layer.parameters()))


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("kind", [Mamba2Mixer, Mamba2, Mamba2Simple])
def test_compile_is_one_graph_forward_and_backward(kind):
    layer, u = disturb(kind(8, ngroups=2, **SMALL)), draw(2, 7, 8)
    got, want = compiled(layer)(u), layer(u)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(layer, got), gradients(layer, want))


def test_compiled_training_follows_eager():
    u, target, curves = draw(4, 9, 8), draw(4, 9, 8, seed=1), []
    first = nn.Sequential(disturb(Mamba2(8, **SMALL)), disturb(Mamba2(8, **SMALL), seed=50))
    for wrap in (compiled, lambda model: model):
        model = copy.deepcopy(first)
        step, optimizer, losses = wrap(model), torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(20):
            loss = (step(u) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    torch.testing.assert_close(*curves, rtol=1e-6, atol=0)
    assert curves[0][-1] < 0.9 * curves[0][0]


@pytest.mark.parametrize(
    "packing",
    [dict(seq_idx=torch.tensor([[0, 0, 1, 1, 1, 2, 2]])), dict(cu_seqlens=torch.tensor([0, 2, 5, 7]))],
    ids=["seq_idx", "cu_seqlens"],
)
def test_compile_with_packed_sequences(packing):
    layer, u = disturb(Mamba2(8, **SMALL)), draw(1, 7, 8)
    got, want = compiled(layer)(u, **packing), layer(u, **packing)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(layer, got), gradients(layer, want))


@torch.no_grad()
def test_compiled_step_updates_the_cache_in_place():
    layer, u = disturb(Mamba2(8, **SMALL)), draw(2, 4, 8)
    ours, theirs = layer.allocate_inference_cache(2, 4), layer.allocate_inference_cache(2, 4)
    step = compiled(layer.step)
    for t in range(4):
        token = u[:, t : t + 1]
        torch.testing.assert_close(step(token, *ours)[0], layer.step(token, *theirs)[0])
    torch.testing.assert_close(ours, theirs)
    assert ours[1].abs().max() > 0


@torch.no_grad()
def test_compiled_prefill():
    layer, u = disturb(Mamba2(8, layer_idx=0, **SMALL)), draw(2, 6, 8)
    ours, theirs = (SimpleNamespace(seqlen_offset=0, key_value_memory_dict={}) for _ in range(2))
    fast = compiled(layer)
    for start, end in ((0, 3), (3, 5), (5, 6)):
        ours.seqlen_offset = theirs.seqlen_offset = start
        piece = u[:, start:end]
        torch.testing.assert_close(fast(piece, inference_params=ours), layer(piece, inference_params=theirs))
    torch.testing.assert_close(ours.key_value_memory_dict[0], theirs.key_value_memory_dict[0])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_mixer_scripts_traces_and_exports(options):
    layer, u, longer = disturb(Mamba2Mixer(8, **{**SMALL, **options})), draw(2, 7, 8), draw(3, 11, 8)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    exported = torch.export.export(layer, (u,), dynamic_shapes=({0: batch, 1: length},))
    forms = [torch.jit.script(layer), torch.fx.symbolic_trace(layer), torch.jit.trace(layer, u), exported.module()]
    for form in forms:
        for t in (u, longer):
            torch.testing.assert_close(form(t), layer(t))
    got = forms[0](u)
    torch.testing.assert_close(gradients(layer, got), gradients(layer, layer(u)))


def test_mamba2_exports():
    layer, u = disturb(Mamba2(8, **SMALL)), draw(2, 7, 8)
    torch.testing.assert_close(torch.export.export(layer, (u,)).module()(u), layer(u))


class LowRank(nn.Module):
    """A wrapper as LoRA makes: the wrapped projection has no `weight` of its own."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(draw(2, base.in_features, seed=20))
        self.up = nn.Parameter(draw(base.out_features, 2, seed=21))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_a_wrapped_projection_counts(name):
    """The layer equals one whose weight has the low-rank term added, in forward, step and gradients."""
    layer, u = disturb(Mamba2(8, **SMALL)), draw(2, 5, 8)
    wrapper = LowRank(getattr(layer, name))
    weights = weights_of(layer)
    weights[f"{name}.weight"] = weights[f"{name}.weight"] + wrapper.up.detach() @ wrapper.down.detach()
    want = rows(layer, weights, u)[0]
    setattr(layer, name, wrapper)
    torch.testing.assert_close(layer(u), want)
    cache = layer.allocate_inference_cache(2, 5)
    torch.testing.assert_close(torch.cat([layer.step(u[:, t : t + 1], *cache)[0] for t in range(5)], 1), want)
    layer(u).sum().backward()
    assert wrapper.up.grad.abs().max() > 0 and wrapper.down.grad.abs().max() > 0


def test_hooks_of_projections_and_norm_run():
    layer, seen = Mamba2(8, **SMALL), []
    for name in ("in_proj", "norm", "out_proj"):
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: seen.append(name))
    layer(draw(1, 3, 8))
    layer.step(draw(1, 1, 8), *layer.allocate_inference_cache(1, 1))
    assert seen == ["in_proj", "norm", "out_proj"] * 2


def test_backward_twice_gives_the_same():
    layer = disturb(Mamba2(8, **SMALL))
    loss = layer(draw(2, 7, 8)).square().sum()
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, list(layer.parameters())), first, rtol=0, atol=0)


def test_train_and_eval_are_the_same():
    layer, u = disturb(Mamba2(8, **{**SMALL, "headdim": 8})), draw(2, 7, 8)  # H = 2
    trained = layer.train()(u)
    torch.testing.assert_close(layer.eval()(u), trained, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(layer(u).clone(), trained.detach(), rtol=0, atol=0)


def layouts(u):
    yield u.transpose(0, 1).contiguous().transpose(0, 1)  # batch innermost of rows
    yield u.mT.contiguous().mT  # channels first in memory
    yield torch.stack([u, -u], -1)[..., 0]  # every second element
    yield torch.cat([-u, u, -u], 1)[:, u.shape[1] : 2 * u.shape[1]]  # a window


def test_layout_of_the_input_does_not_matter():
    layer, u = disturb(Mamba2(8, ngroups=2, **SMALL)), draw(2, 7, 8)
    want = layer(u)
    want_d = gradients(layer, want)
    for t in layouts(u):
        assert t.equal(u) and (t.stride() != u.stride() or t.storage_offset() > 0)
        torch.testing.assert_close(layer(t), want)
        torch.testing.assert_close(gradients(layer, layer(t)), want_d)
    one = u[:1, :1]
    torch.testing.assert_close(layer(one.expand(2, 4, 8)), layer(one.repeat(2, 4, 1)))


def test_cache_layout_does_not_matter():
    layer, u = disturb(Mamba2(8, **SMALL)), draw(2, 1, 8)
    usual = layer.allocate_inference_cache(2, 1)
    usual[0].copy_(draw(*usual[0].shape, seed=2))
    usual[1].copy_(draw(*usual[1].shape, seed=3))
    other = usual[0].contiguous(), usual[1].mT.contiguous().mT
    assert other[0].stride() != usual[0].stride() and other[1].stride() != usual[1].stride()
    torch.testing.assert_close(layer.step(u, *other), layer.step(u, *usual))


def test_gradient_checkpointing():
    layer, u = disturb(Mamba2(8, **SMALL)), draw(2, 7, 8)
    got, want = checkpoint(layer, u, use_reentrant=False), layer(u)
    torch.testing.assert_close(gradients(layer, got), gradients(layer, want))


def test_fsdp2_in_both_ways_the_document_names(tmp_path):
    """Float32 weights under a policy, and a bfloat16 layer cast whole: outputs and gradients of the unsharded layer."""
    layer, u = Mamba2(32, d_state=8, headdim=16), draw(2, 5, 32).to(torch.bfloat16)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    want = half(u)
    want_d = gradients(half, want.float())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for sharded in (fully_shard(layer, mesh=mesh, mp_policy=policy), fully_shard(copy.deepcopy(half), mesh=mesh)):
            out = sharded(u)
            torch.testing.assert_close(out, want)
            out.float().square().sum().backward()
            for p, d in zip(sharded.parameters(), want_d, strict=True):
                torch.testing.assert_close(p.grad.full_tensor().to(torch.bfloat16), d)
    finally:
        torch.distributed.destroy_process_group()


def test_tokens_see_the_past_alone():
    layer, u = disturb(Mamba2(8, **SMALL)), draw(1, 9, 8).requires_grad_()
    (d,) = torch.autograd.grad(layer(u)[0, 4].sum(), u)
    assert d[0, :5].abs().amin(1).gt(0).all() and d[0, 5:].eq(0).all()


def test_deep_stacks_keep_finite_gradients_under_autocast():
    """Twelve layers with residuals, each read forwards and backwards."""
    torch.manual_seed(0)
    stack = nn.ModuleList(Mamba2(16, d_state=4, headdim=8, chunk_size=16) for _ in range(24))
    u = draw(2, 33, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        for there, back in zip(stack[::2], stack[1::2], strict=True):
            u = u + there(u) + back(u.flip(1)).flip(1)
    u.square().mean().backward()
    norms = torch.stack([p.grad.norm() for p in stack.parameters()])
    assert norms.isfinite().all() and norms.max() > 0


def test_strong_decay_and_large_steps_stay_finite():
    layer = Mamba2(8, d_state=5, headdim=4, A_init_range=(100, 200), dt_limit=(0.0, 1e3))
    with torch.no_grad():
        layer.dt_bias.fill_(500.0)
    out = layer(draw(2, 20, 8).float())
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(layer, out))

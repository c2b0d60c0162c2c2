"""The contract of timm, rule by rule, on the models of this package (timm's own test file: run_timm_suite.py)."""

import copy
import subprocess
import sys

import pytest
import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.models import get_notrace_functions, get_notrace_modules, group_parameters
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import vmamba_npu
from vmamba_npu.models.vision_mamba2 import checkpoint_filter_fn

NAME = "test_vmamba2_npu"
PARAMETERS = {
    "vmamba2_nano_npu": 18_770_144,
    "vmamba2_tiny_npu": 38_698_268,
    "vmamba2_small_npu": 61_140_596,
    "vmamba2_base_npu": 103_863_032,
    "vmamba2_digits_npu": 322_200,
    NAME: 220_848,
}


def create(name: str = NAME, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs)


def images(batch: int = 2, height: int = 64, width: int = 96, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


def test_registration_in_a_fresh_interpreter():
    """Unknown before the import; afterwards registered once, without deprecated paths."""
    script = """
import importlib, sys, warnings
import timm
try:
    timm.create_model("vmamba2_tiny_npu")
    sys.exit("known before the import")
except RuntimeError as error:
    assert "Unknown model" in str(error), error
warnings.simplefilter("error")
import vmamba_npu
import vmamba_npu as again
assert again is importlib.import_module("vmamba_npu")
names = timm.list_models(module="vision_mamba2")
assert len(names) == len(set(names)) == 6, names
assert not timm.list_models(module="vision_mamba2", pretrained=True)
assert timm.create_model("vmamba2_tiny_npu", device="meta", dtype=__import__("torch").float32).num_classes == 1000
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_and_configuration(name):
    model = create(name, device="meta", dtype=torch.float32).eval()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert not list(model.buffers())
    cfg = model.pretrained_cfg
    assert cfg["license"] == "apache-2.0" and not cfg.get("url") and not cfg.get("hf_hub_id")
    names = model.state_dict().keys()
    assert f"{cfg['classifier']}.weight" in names and f"{cfg['first_conv']}.weight" in names
    features = model.forward_features(torch.empty(1, *cfg["input_size"], device="meta"))
    assert features.shape == (1, *cfg["pool_size"], model.num_features)
    assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)
    assert model(torch.empty(3, *cfg["input_size"], device="meta")).shape == (3, cfg["num_classes"])


def test_state_dict_of_tiny_is_the_published_one():
    shapes = {name: tuple(p.shape) for name, p in create("vmamba2_tiny_npu", device="meta").state_dict().items()}
    want = {"patch_embed.proj.weight": (96, 3, 4, 4), "patch_embed.proj.bias": (96,)}
    dims, depths, groups = (96, 192, 384, 768), (2, 2, 6, 2), (1, 2, 4, 8)
    for s, (C, G) in enumerate(zip(dims, groups, strict=True)):
        E, H = 2 * C, C // 32
        if s:
            want[f"stages.{s}.downsample.conv.weight"] = (C, C // 2, 2, 2)
            want |= {f"stages.{s}.downsample.{n}": (C,) for n in ("conv.bias", "norm.weight", "norm.bias")}
        block = {
            **{f"{part}.weight": (C, 1, 3, 3) for part in ("cpe1", "cpe2")},
            **{n: (C,) for n in ("cpe1.bias", "cpe2.bias")},
            **{f"{part}.{n}": (C,) for part in ("norm1", "norm2") for n in ("weight", "bias")},
            "mixer.in_proj.weight": (2 * E + 256 * G + H, C),
            "mixer.dwconv.weight": (E + 256 * G, 1, 3, 3),
            "mixer.dwconv.bias": (E + 256 * G,),
            "mixer.A_log": (H,),
            "mixer.dt_bias": (H,),
            "mixer.D": (H, 64),
            "mixer.out_norm.weight": (E,),
            "mixer.out_norm.bias": (E,),
            "mixer.out_proj.weight": (C, E),
            "mlp.fc1.weight": (4 * C, C),
            "mlp.fc1.bias": (4 * C,),
            "mlp.fc2.weight": (C, 4 * C),
            "mlp.fc2.bias": (C,),
        }
        want |= {f"stages.{s}.blocks.{b}.{n}": shape for b in range(depths[s]) for n, shape in block.items()}
    want |= {"norm.weight": (768,), "norm.bias": (768,), "head.fc.weight": (1000, 768), "head.fc.bias": (1000,)}
    assert shapes == want
    assert shapes["stages.0.blocks.0.mixer.in_proj.weight"] == (643, 96)


def published_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of So-cean's network."""
    renamed = {}
    for name, value in state.items():
        parts = name.split(".")
        if parts[0] == "patch_embed":
            name = f"patch_embed.{parts[-1]}"
        elif parts[0] == "stages" and parts[2] == "downsample":
            name = ".".join(["downsamples", str(int(parts[1]) - 1), *parts[3:]])
        elif parts[0] == "stages":
            rest = ".".join(parts[4:]).replace("mlp.fc1", "ffn.net.0").replace("mlp.fc2", "ffn.net.2")
            name = f"stages.{parts[1]}.{parts[3]}.{rest}"
        elif parts[0] == "norm":
            name = f"final_norm.{parts[-1]}"
        elif parts[0] == "head":
            name = f"head.{parts[-1]}"
        renamed[name] = value
    return renamed


@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}, None])
def test_checkpoint_filter(wrap, headless):
    ours = create().state_dict()
    if headless:
        ours = {name: value for name, value in ours.items() if not name.startswith("head.")}
    theirs = dict(reversed(published_names(ours).items()))
    assert not set(theirs) & set(ours)
    theirs = wrap(theirs) if wrap else {f"module.{name}": value for name, value in theirs.items()}
    for state in (theirs, ours):
        converted = checkpoint_filter_fn(state, create())
        assert converted.keys() == ours.keys()
        assert all(converted[name] is ours[name] for name in ours)


def test_pretrained_weights_load_through_the_filter(tmp_path):
    """A checkpoint with published names and 3 channels, into 1 channel and other classes, and into features_only."""
    model = create()
    torch.save(published_names(model.state_dict()), tmp_path / "weights.pth")
    overlay = dict(file=str(tmp_path / "weights.pth"))
    other = create(pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=7)
    torch.testing.assert_close(other.patch_embed.proj.weight, model.patch_embed.proj.weight.sum(1, keepdim=True))
    torch.testing.assert_close(other.norm.state_dict(), model.norm.state_dict())
    assert other(images(channels=1)).shape == (2, 7)
    maps = create(pretrained=True, pretrained_cfg_overlay=overlay, features_only=True).eval()
    want = model.eval().forward_intermediates(images(), intermediates_only=True)
    torch.testing.assert_close(maps(images()), want)


def test_a_checkpoint_loads_at_any_image_size():
    model, larger = create().eval(), create(img_size=384).eval()
    larger.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(larger(images()), model(images()))
    assert timm.models.get_model_traits(larger)["img_size"] == (384, 384)


@pytest.mark.parametrize("size", [(1, 1), (31, 33), (32, 64), (50, 17)], ids=str)
def test_any_image_size(size):
    maps = create(features_only=True).eval()(images(1, *size))
    for i, one in enumerate(maps):
        assert one.shape[2:] == tuple(-(-side // (4 * 2**i)) for side in size)


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", "catavgmax", ""])
def test_classifier_and_pooling(pool):
    model = create(global_pool=pool, num_classes=5).eval()
    features = model.forward_features(images())
    assert features.shape == (2, 2, 3, 64)
    pooled = {
        "avg": features.mean((1, 2)),
        "max": features.amax((1, 2)),
        "avgmax": (features.mean((1, 2)) + features.amax((1, 2))) / 2,
        "catavgmax": torch.cat([features.mean((1, 2)), features.amax((1, 2))], 1),
        "": features,
    }[pool]
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), pooled)
    torch.testing.assert_close(model(images()), model.get_classifier()(pooled))
    model.reset_classifier(9)  # keeps the pooling
    assert model(images()).shape == (*pooled.shape[:-1], 9) and model.head_hidden_size == pooled.shape[-1]
    model.reset_classifier(0)
    torch.testing.assert_close(model(images()), pooled)
    assert model.num_classes == 0 and isinstance(model.get_classifier(), nn.Identity)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images()), features)
    model.reset_classifier(4, "max")
    assert model(images()).shape == (2, 4) and model.num_classes == 4


def test_reset_classifier_keeps_device_dtype_mode_and_freezing():
    model = create(device="meta", dtype=torch.float64).eval()
    model.requires_grad_(False)
    model.reset_classifier(0)
    assert not any(p.requires_grad for p in model.parameters())
    model.reset_classifier(3)
    fc = model.get_classifier()
    assert fc.weight.is_meta and fc.weight.dtype == torch.float64 and not fc.training


def test_forward_intermediates():
    model = create().eval()
    taps = []
    hooks = [s.register_forward_hook(lambda m, i, output: taps.append(output)) for s in model.stages]
    want = model.forward_features(images())
    for hook in hooks:
        hook.remove()
    final, maps = model.forward_intermediates(images())
    torch.testing.assert_close(final, want, rtol=1e-5, atol=1e-8)
    assert [tuple(m.shape) for m in maps] == [(2, 16, 16, 24), (2, 32, 8, 12), (2, 48, 4, 6), (2, 64, 2, 3)]
    for got, tap in zip(maps, taps, strict=True):
        torch.testing.assert_close(got, tap.permute(0, 3, 1, 2))
    normed = model.forward_intermediates(images(), norm=True, output_fmt="NHWC", intermediates_only=True)
    torch.testing.assert_close(normed, [*taps[:-1], want])
    assert len(model.forward_intermediates(images(), indices=2, intermediates_only=True)) == 2
    assert model.forward_intermediates(images(), indices=[-4], intermediates_only=True)[0].shape == maps[0].shape
    ran = []
    model.stages[2].register_forward_hook(lambda *_: ran.append(2))
    final, early = model.forward_intermediates(images(), indices=[1], norm=True, stop_early=True)
    assert not ran
    torch.testing.assert_close(early[0], maps[1])
    torch.testing.assert_close(final, taps[1])  # the final norm follows the last stage alone
    with pytest.raises(AssertionError, match="NCHW or NHWC"):
        model.forward_intermediates(images(), output_fmt="NLC")


@pytest.mark.parametrize("prune_norm", [False, True])
@pytest.mark.parametrize("index", [0, 2, 3])
def test_pruning(index, prune_norm):
    model = create(drop_rate=0.5).eval()
    expected, maps = model(images()), model.forward_intermediates(images(), intermediates_only=True)
    pruned = copy.deepcopy(model)
    assert pruned.prune_intermediate_layers([index], prune_norm=prune_norm) == [index]
    assert not any(m.training for m in pruned.modules())
    assert pruned.num_features == pruned.head_hidden_size == (16, 32, 48, 64)[index]
    got = pruned.forward_intermediates(images(), indices=[index], intermediates_only=True)
    torch.testing.assert_close(got[0], maps[index])
    if prune_norm or index < 3:
        torch.testing.assert_close(pruned.forward_features(images()).permute(0, 3, 1, 2), maps[index])
    pruned.train()(images()).square().sum().backward()
    assert not [name for name, p in pruned.named_parameters() if p.grad is None]
    pruned.reset_classifier(6, "avg")
    assert pruned(images()).shape == (2, 6)
    whole = copy.deepcopy(model)
    whole.prune_intermediate_layers([3], prune_head=False)
    torch.testing.assert_close(whole(images()), expected)


@pytest.mark.parametrize("kind", [None, "list", "getter", "hook", "fx", "dict"])
def test_features_only(kind):
    """NCHW by default and from the getter; timm's other extractors give the native NHWC."""
    model = create().eval()
    maps = create(features_only=True, out_indices=(1, 3), **(dict(feature_cls=kind) if kind else {})).eval()
    assert maps.feature_info.channels() == [32, 64] and maps.feature_info.reduction() == [8, 32]
    got = maps(images())
    got = list(got.values()) if isinstance(got, dict) else got
    fmt = "NCHW" if kind in (None, "getter") else "NHWC"
    want = model.forward_intermediates(images(), indices=[1, 3], output_fmt=fmt, intermediates_only=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("features_only", [False, True])
def test_gradient_checkpointing_changes_nothing(features_only):
    x, gradients = images().requires_grad_(), []
    for enable in (False, True):
        model = create(features_only=features_only).train()
        model.set_grad_checkpointing(enable)
        output = model(x)
        sum(o.square().mean() for o in (output if features_only else [output])).backward()
        gradients.append([p.grad for p in model.parameters()])
        assert not [p for p in gradients[-1] if p is None]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert not any(s.grad_checkpointing for s in create().stages)


def test_drop_path_and_drop_rates():
    model = create(drop_path_rate=0.3, drop_rate=0.2, depths=(1, 2, 2, 1))
    rates = [
        b.drop_path1.drop_prob if b.drop_path1.__class__.__name__ == "DropPath" else 0
        for s in model.stages
        for b in s.blocks
    ]
    assert rates == pytest.approx([0, 0.06, 0.12, 0.18, 0.24, 0.3])
    assert model.head.drop.p == 0.2
    model.eval()
    torch.testing.assert_close(model(images()), model(images()), rtol=0, atol=0)
    plain = create(depths=(1, 2, 2, 1)).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(images()), model(images()))
    assert not torch.equal(model.train()(images()), model(images()))


def test_parameter_groups():
    model = create()
    names = [name for name, _ in model.named_parameters()]
    for coarse, wanted in ((True, 6), (False, 10)):  # stem, stages, norm and head; or a layer a block
        layers = group_parameters(model, model.group_matcher(coarse), reverse=True)
        assert set(layers) == set(names) and 4 <= len(set(layers.values())) <= wanted
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.5)
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        spared = p.ndim < 2 or name.endswith((".D", ".A_log", ".dt_bias", ".bias"))
        assert of[p]["weight_decay"] == (0 if spared else 0.05), name
    scale = {name: of[p]["lr_scale"] for name, p in model.named_parameters()}
    assert scale["head.fc.weight"] == 1
    assert scale["patch_embed.proj.weight"] == min(scale.values()) < scale["stages.3.blocks.0.mixer.D"] < 1


def test_data_configuration_follows_the_model():
    config = resolve_data_config(model=create("vmamba2_digits_npu"))
    assert config["input_size"] == (1, 28, 28) and config["mean"] == (0.1313,) and config["std"] == (0.3086,)
    assert create_transform(**config, is_training=False)
    config = resolve_data_config(dict(img_size=96, in_chans=1), model=create(in_chans=1, img_size=96))
    assert config["input_size"] == (1, 96, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_init_weights_after_a_meta_model_was_filled_with_nan(dtype):
    model = create(device="meta", dtype=dtype).to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    pointers = [p.data_ptr() for p in model.parameters()]
    torch.manual_seed(0)
    model.init_weights()
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())
    assert model(images().to(dtype)).isfinite().all()


def test_meta_forward_and_dtype_changes():
    model = create(device="meta", dtype=torch.float32).eval()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        output = model.to(dtype)(images().to("meta", dtype))
        assert output.is_meta and output.dtype == dtype and output.shape == (2, 1000)


def test_backend_argument_of_create_model():
    assert create(backend="reference").backend == "reference"
    with pytest.raises(ValueError, match=r"backend: expected one of auto, reference, torch.*, got 'foo'"):
        create(backend="foo")
    with pytest.raises(TypeError):
        create(not_an_argument=1)
    maps = create(features_only=True)
    maps.set_backend("reference")
    assert maps.model.backend == "reference"


def test_torchscript():
    x = images()
    model = create(scriptable=True).eval()
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    torch.testing.assert_close(scripted(images(1, 33, 50)), model(images(1, 33, 50)))
    maps = create(features_only=True).eval()
    torch.testing.assert_close(torch.jit.script(maps)(x), maps(x))


@pytest.mark.parametrize("train", [False, True])
def test_fx(train):
    model = create().train(train)
    tracer = dict(
        leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions(), param_shapes_constant=True
    )
    trained, evaluated = get_graph_node_names(model, tracer_kwargs=tracer)
    traced = create_feature_extractor(
        model, train_return_nodes=trained[-1:], eval_return_nodes=evaluated[-1:], tracer_kwargs=tracer
    ).train(train)
    for x in (images(), images(1, 45, 32)):
        (output,) = traced(x).values()
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)
    output.mean().backward()
    assert not [name for name, p in traced.named_parameters() if p.grad is None]
    torch.testing.assert_close(*torch.jit.script(traced)(x).values(), output)


def test_a_model_can_be_copied_and_trained_with_an_average():
    model = create()
    model(images()).mean().backward()
    average = timm.utils.ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        model.norm.weight.add_(1)
    average.update(model)
    torch.testing.assert_close(average.module.norm.weight, model.norm.weight - 0.5)


def test_local_directory_round_trip(tmp_path):
    """timm's config.json names the architecture, so that `local-dir:` and `hf-hub:` names work after the import."""
    model = create(num_classes=5).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images()), model(images()))
    assert isinstance(loaded, vmamba_npu.VisionMamba2)

"""VisionMamba2: a pyramid of Mamba-2 blocks that scan the map in four directions, as timm models."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, calculate_drop_path_rates, get_device_dtype, is_exportable, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor

from ..layers.vision import VisionMamba2Mixer
from .pyramid import FeatureMaps, PatchEmbed, Stage

__all__ = ["VisionMamba2"]


class VisionMamba2(nn.Module):
    """A pyramid of Mamba-2 blocks; maps are channel-last, of any size from 1 x 1.

    Source: Mamba-2 (arXiv:2405.21060), VMamba (arXiv:2401.10166), So-cean/mamba-ascendc; docs/models.md.

    Args:
        in_chans: channels of the image.
        num_classes: width of the logits; 0 gives pooled features.
        global_pool: "avg", "max", "avgmax", "catavgmax", or "" for none.
        dims, depths, ngroups, chunk_sizes: channels, blocks, groups of B and C, and tokens that a scan processes as one
            block, for each stage; any number of stages. `chunk_sizes` is never part of the result.
        patch_size: stride of the patch embedding; each later stage halves the map. Images and maps are padded with
            zeros at the right and bottom to a multiple.
        expand, headdim, d_state: of the mixer: inner width over channels, channels of a head, size of the state.
        directions: 1, 2 or 4 scan directions: row, row reversed, column, column reversed.
        mlp_ratio: hidden width of the MLP over channels.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block; grows linearly from 0 over the blocks.
        backend: who computes the scans: "auto" or a name of the registry; `set_backend` changes it on a live model.
        img_size: the size that the model is made for; recorded, restricts nothing.
        device, dtype: of the parameters.

    Raises:
        ValueError: sizes do not fit each other, or the backend is unknown; the message names the argument.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: Sequence[int] = (96, 192, 384, 768),
        depths: Sequence[int] = (2, 2, 6, 2),
        ngroups: Sequence[int] = (1, 2, 4, 8),
        chunk_sizes: Sequence[int] = (128, 128, 128, 64),
        patch_size: int = 4,
        expand: int = 2,
        headdim: int = 64,
        d_state: int = 128,
        directions: int = 4,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        backend: str = "auto",
        img_size: int | tuple[int, int] | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if not dims:
            raise ValueError("dims: expected the channels of at least one stage, got none")
        for name, values in (("depths", depths), ("ngroups", ngroups), ("chunk_sizes", chunk_sizes)):
            if len(values) != len(dims):
                raise ValueError(f"{name}: expected {len(dims)} values, one for each of dims, got {tuple(values)}")
        dd = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans = num_classes, in_chans
        self.global_pool, self.drop_rate = global_pool, drop_rate
        self.output_fmt = "NHWC"
        self.img_size = img_size  # nominal: any size runs
        self.backend = backend
        self.patch_embed = PatchEmbed(in_chans, dims[0], patch_size, **dd)
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)  # one list a stage
        mixer: dict[str, Any] = dict(
            d_state=d_state, expand=expand, headdim=headdim, directions=directions, backend=backend,
            exportable=is_exportable(),
        )  # fmt: skip
        stages = []
        for i, dim in enumerate(dims):
            make_mixer = partial(VisionMamba2Mixer, dim, ngroups=ngroups[i], chunk_size=chunk_sizes[i], **mixer, **dd)
            stages.append(Stage(dims[i - 1] if i else None, dim, make_mixer, mlp_ratio, rates[i], **dd))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            dict(num_chs=dim, reduction=patch_size * 2**i, module=f"stages.{i}") for i, dim in enumerate(dims)
        ]
        self.num_features = dims[-1]
        self.norm: nn.Module = nn.LayerNorm(self.num_features, **dd)
        self.head = ClassifierHead(
            self.num_features, num_classes, global_pool, drop_rate, input_fmt=self.output_fmt, **dd
        )
        self.head_hidden_size = self.head.num_features
        if not self.patch_embed.proj.weight.is_meta:
            self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initial values of all parameters, in place; without `needs_reset` only of those that are not PyTorch's."""
        for module in self.modules():
            if isinstance(module, VisionMamba2Mixer):
                module.reset_scan_parameters()
            elif isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif needs_reset and isinstance(module, nn.Conv2d | nn.LayerNorm):
                module.reset_parameters()

    @torch.jit.ignore
    def set_backend(self, name: str) -> None:
        """Choose who computes the scans from now on: "auto" or a name of the registry; ValueError for any other."""
        for module in self.modules():
            if isinstance(module, VisionMamba2Mixer):
                module.set_backend(name)
        self.backend = name

    @torch.jit.ignore
    def set_chunk_sizes(self, chunk_sizes: Sequence[int]) -> None:
        """Choose the number of tokens that each stage's scans process as one block; the results stay the same."""
        if len(chunk_sizes) != len(self.stages) or min(chunk_sizes) < 1:
            raise ValueError(f"chunk_sizes: expected {len(self.stages)} values >= 1, got {tuple(chunk_sizes)}")
        for stage, size in zip(self.stages, chunk_sizes, strict=True):
            for module in stage.modules():
                if isinstance(module, VisionMamba2Mixer):
                    module.set_chunk_size(size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Patterns of the parameters that weight decay must not touch and that timm would not find by their rank."""
        return {"*.A_log", "*.dt_bias", "*.D"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that put each parameter into a layer, for layer-wise learning rates."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return dict(stem=r"^patch_embed", blocks=r"^stages\.(\d+)" if coarse else fine)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """In training, keep the inputs of blocks alone and compute the rest again in the backward."""
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head.fc

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier (none for 0 classes), on the model's device and in its dtype; None keeps the pooling."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **get_device_dtype(self))
        self.head_hidden_size = self.head.num_features
        if global_pool is not None:
            self.global_pool = global_pool

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features, and the map after each stage of `indices`.

        Args:
            x: [B, in_chans, H, W] images.
            indices: the last n stages if an int, all if None.
            norm: apply the final norm to the map of the last stage (the only one that it fits).
            stop_early: do not run stages after the last one asked for.
            output_fmt: layout of the maps, "NCHW" or "NHWC"; the features are channel-last always.
            intermediates_only: return the list of maps alone.
        """
        torch._assert(output_fmt in ("NCHW", "NHWC"), "output_fmt: expected NCHW or NHWC")
        intermediates: list[Tensor] = []
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        if torch.jit.is_scripting() or not stop_early:  # TorchScript cannot slice modules
            stages = self.stages
        else:
            stages = self.stages[: max_index + 1]
        x = self.patch_embed(x)
        i = 0
        for i, stage in enumerate(stages):
            x = stage(x)
            if i in take_indices:
                taken = self.norm(x) if norm and i == last else x
                intermediates.append(taken.permute(0, 3, 1, 2).contiguous() if output_fmt == "NCHW" else taken)
        if intermediates_only:
            return intermediates
        if i == last:
            x = self.norm(x)
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the maps of `indices` do not need; returns them as numbers of stages."""
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        ends_early = max_index < len(self.stages) - 1
        if prune_norm or ends_early:
            self.norm = nn.Identity().train(self.training)
        self.stages = self.stages[: max_index + 1]
        self.stages.training = self.training  # a slice is new
        self.num_features = self.feature_info[max_index]["num_chs"]
        if prune_head or ends_early:  # the head fits the last stage alone
            self.reset_classifier(0, "")
        return take_indices

    def forward_features(self, x: Tensor) -> Tensor:  # [B, in_chans, H, W] -> [B, H/32, W/32, C]
        return self.norm(self.stages(self.patch_embed(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


_RENAMED = (
    (r"^module\.", ""),
    (r"^patch_embed\.(weight|bias)$", r"patch_embed.proj.\1"),
    (r"^downsamples\.(\d+)\.", lambda m: f"stages.{int(m[1]) + 1}.downsample."),
    (r"^stages\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"\.ffn\.net\.0\.", ".mlp.fc1."),
    (r"\.ffn\.net\.2\.", ".mlp.fc2."),
    (r"^final_norm\.", "norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module | None = None) -> dict[str, Tensor]:
    """Parameter names of So-cean's network in ours; names that are ours stay, in any mixture and order."""
    for key in ("state_dict", "model"):
        if isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
    renamed = {}
    for name, value in state_dict.items():
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def _cfg(url: str = "", **kwargs: Any) -> dict[str, Any]:
    return {
        "url": url, "num_classes": 1000, "input_size": (3, 224, 224), "pool_size": (7, 7), "crop_pct": 0.9,
        "interpolation": "bicubic", "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj", "classifier": "head.fc", "license": "apache-2.0",
        **kwargs,
    }  # fmt: skip


default_cfgs = generate_default_cfgs({
    "vmamba2_nano_npu.untrained": _cfg(),
    "vmamba2_tiny_npu.untrained": _cfg(),
    "vmamba2_small_npu.untrained": _cfg(),
    "vmamba2_base_npu.untrained": _cfg(),
    "vmamba2_digits_npu.untrained": _cfg(
        num_classes=10, input_size=(1, 28, 28), pool_size=(4, 4), crop_pct=1.0, interpolation="bilinear",
        mean=(0.1313,), std=(0.3086,),
    ),
    "test_vmamba2_npu.untrained": _cfg(input_size=(3, 160, 160), pool_size=(5, 5)),
})  # fmt: skip


def _create(variant: str, pretrained: bool, **kwargs: Any) -> VisionMamba2:
    every_stage = tuple(range(len(kwargs["depths"])))
    return build_model_with_cfg(
        VisionMamba2, variant, pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=every_stage, flatten_sequential=True, feature_cls=FeatureMaps),
        **kwargs,
    )  # fmt: skip


@register_model
def vmamba2_nano_npu(pretrained: bool = False, **kwargs: Any) -> VisionMamba2:
    sizes = dict(dims=(64, 128, 256, 512), depths=(2, 2, 6, 2))
    return _create("vmamba2_nano_npu", pretrained, **dict(sizes, **kwargs))


@register_model
def vmamba2_tiny_npu(pretrained: bool = False, **kwargs: Any) -> VisionMamba2:
    sizes = dict(dims=(96, 192, 384, 768), depths=(2, 2, 6, 2))
    return _create("vmamba2_tiny_npu", pretrained, **dict(sizes, **kwargs))


@register_model
def vmamba2_small_npu(pretrained: bool = False, **kwargs: Any) -> VisionMamba2:
    sizes = dict(dims=(96, 192, 384, 768), depths=(2, 2, 15, 2))
    return _create("vmamba2_small_npu", pretrained, **dict(sizes, **kwargs))


@register_model
def vmamba2_base_npu(pretrained: bool = False, **kwargs: Any) -> VisionMamba2:
    sizes = dict(dims=(128, 256, 512, 1024), depths=(2, 2, 15, 2))
    return _create("vmamba2_base_npu", pretrained, **dict(sizes, **kwargs))


@register_model
def vmamba2_digits_npu(pretrained: bool = False, **kwargs: Any) -> VisionMamba2:
    sizes = dict(
        dims=(32, 64, 128), depths=(1, 1, 1), ngroups=(1, 1, 1), chunk_sizes=(64, 64, 64),
        patch_size=2, d_state=16, mlp_ratio=3.0,
    )  # fmt: skip
    return _create("vmamba2_digits_npu", pretrained, **dict(sizes, **kwargs))


@register_model
def test_vmamba2_npu(pretrained: bool = False, **kwargs: Any) -> VisionMamba2:
    sizes = dict(dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), ngroups=(1, 2, 2, 4), headdim=16, d_state=16)
    return _create("test_vmamba2_npu", pretrained, **dict(sizes, **kwargs))

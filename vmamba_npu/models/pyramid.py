"""Parts of a pyramid backbone, whatever mixer its blocks have: patches, downsampling, blocks, stages, feature maps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath, Mlp
from timm.models import checkpoint_seq
from timm.models._features import FeatureGetterNet
from torch import Tensor

from ..layers.vision import DepthwiseConv2d


class PatchEmbed(nn.Module):
    """Non-overlapping patches of an image, which zeros at its right and bottom extend to a multiple of the patch."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size, device=device, dtype=dtype)
        # always padded by this: the convolution leaves out what fills no patch, so no size is tested and any one traces
        self.margin = patch_size - 1

    def forward(self, x: Tensor) -> Tensor:  # [B, in_chans, H, W] -> [B, ceil(H/patch), ceil(W/patch), dim]
        return self.proj(F.pad(x, (0, self.margin, 0, self.margin))).permute(0, 2, 3, 1)


class Downsample(nn.Module):
    """Halves the map, which zeros at its right and bottom extend to even sizes; then a norm."""

    def __init__(self, dim: int, out_dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, 2, stride=2, device=device, dtype=dtype)
        self.norm = nn.LayerNorm(out_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:  # [B, H, W, dim] -> [B, ceil(H/2), ceil(W/2), out_dim]
        x = F.pad(x, (0, 0, 0, 1, 0, 1)).permute(0, 3, 1, 2)  # as in PatchEmbed
        return self.norm(self.conv(x).permute(0, 2, 3, 1))


class Block(nn.Module):
    """Mixer and MLP, each after a depthwise convolution that tells the tokens where they are; all four are residual."""

    def __init__(
        self, dim: int, mixer: nn.Module, mlp_ratio: float = 4.0, drop_path: float = 0.0, device=None, dtype=None
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.cpe1 = DepthwiseConv2d(dim, **dd)
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.mixer = mixer
        self.cpe2 = DepthwiseConv2d(dim, **dd)
        self.norm2 = nn.LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, int(mlp_ratio * dim), **dd)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # [B, H, W, C] -> [B, H, W, C]
        x = x + self.cpe1(x)
        x = x + self.drop_path1(self.mixer(self.norm1(x)))
        x = x + self.cpe2(x)
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """Downsampling from `in_dim` (none in the first stage) and one block for each rate of `drop_path`."""

    def __init__(
        self,
        in_dim: int | None,
        dim: int,
        make_mixer: Callable[[], nn.Module],
        mlp_ratio: float,
        drop_path: Sequence[float],
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.grad_checkpointing = False
        self.downsample = nn.Identity() if in_dim is None else Downsample(in_dim, dim, **dd)
        self.blocks = nn.Sequential(*[Block(dim, make_mixer(), mlp_ratio, rate, **dd) for rate in drop_path])

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        if self.grad_checkpointing and self.training and not torch.jit.is_scripting():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)


class FeatureMaps(FeatureGetterNet):
    """What `features_only` gives: the maps as NCHW, which detection and segmentation heads expect of any backbone."""

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        model: Any = self.model
        model.set_grad_checkpointing(enable)

    @torch.jit.ignore
    def set_backend(self, name: str) -> None:
        model: Any = self.model
        model.set_backend(name)

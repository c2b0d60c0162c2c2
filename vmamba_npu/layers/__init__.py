"""Layers: modules with parameters, projections and caches, on the operators of `vmamba_npu.ops`."""

from .mamba2_mixer import Mamba2Mixer
from .norm import RMSNorm
from .vision import VisionMamba2Mixer

__all__ = ["Mamba2Mixer", "RMSNorm", "VisionMamba2Mixer"]

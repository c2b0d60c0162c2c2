"""Layers: modules with parameters, projections and caches, on the operators of `vmamba_npu.ops`."""

from .mamba2 import Mamba2
from .mamba2_mixer import Mamba2Mixer
from .mamba2_simple import Mamba2Simple
from .norm import RMSNorm
from .vision import VisionMamba2Mixer

__all__ = ["Mamba2", "Mamba2Mixer", "Mamba2Simple", "RMSNorm", "VisionMamba2Mixer"]

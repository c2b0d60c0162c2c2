"""Backbones in timm; importing this module registers them with `timm.create_model`."""

from .vision_mamba2 import VisionMamba2

__all__ = ["VisionMamba2"]

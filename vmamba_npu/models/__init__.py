"""Backbones in timm; importing this module registers them with `timm.create_model`."""

from ..layers.scan_orders import DIRECTIONS, scan_order
from ..layers.vision import ScanCount, count_scans
from .vision_mamba2 import VisionMamba2

__all__ = ["DIRECTIONS", "ScanCount", "VisionMamba2", "count_scans", "scan_order"]

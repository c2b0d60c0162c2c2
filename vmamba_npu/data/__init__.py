"""Data sets by name: functions that Hydra calls with plain values, each returning an `ImageData`."""

from .arrays import Affine, ArrayImages
from .embedded import digits, mnist5k, synthetic
from .order import Batches, TrainOrder, load, share
from .sets import CorruptImage, ImageData, Preparation

__all__ = [
    "Affine",
    "ArrayImages",
    "Batches",
    "CorruptImage",
    "ImageData",
    "Preparation",
    "TrainOrder",
    "digits",
    "load",
    "mnist5k",
    "share",
    "synthetic",
]

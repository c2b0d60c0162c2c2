"""Whole trainings of a small network: which weights count, what chooses, and going on after a stop at any update."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch

from tests.engine.kill_and_resume import compare
from vmamba_npu.data import Affine, ArrayImages, ImageData, Preparation
from vmamba_npu.engine.checkpoints import load_state, load_weights
from vmamba_npu.engine.interrupts import Interrupted
from vmamba_npu.engine.loggers import CsvLogger
from vmamba_npu.engine.model import Model
from vmamba_npu.engine.optim import Optim
from vmamba_npu.engine.options import Trainer
from vmamba_npu.engine.step import NonFinite
from vmamba_npu.engine.training import train

TRAINER = Trainer(epochs=2, batch_size=8, log_every=1, ema_decay=0.8, clip_grad=1.0, smoothing=0.1, checkpoint_every=2)
OPTIM = Optim(opt="adamw", lr=3e-3, weight_decay=0.05, warmup=0.2)
UPDATES = 2 * 5


def data(seed: int = 0) -> ImageData:
    """Noise with a bright bar where the class says; two classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(64) % 2
    pixels = torch.randint(0, 120, (64, 1, 16, 16), dtype=torch.uint8, generator=generator)
    for i, label in enumerate(labels.tolist()):
        pixels[i, :, :, 4 + 6 * label] = 255
    whole = ArrayImages(pixels, labels, Preparation((16, 16), 1, (0.3,), (0.2,)))
    parts = torch.arange(64).split([40, 12, 12])
    augment = Affine(degrees=5, shift=1)
    return ImageData(
        "bars",
        ["left", "right"],
        whole.prepare,
        whole.at(parts[0], augment, seed),
        whole.at(parts[1]),
        whole.at(parts[2]),
    )


def run(
    output: Path, trainer: Trainer = TRAINER, seed: int = 0, logger=CsvLogger, dataset: ImageData | None = None
) -> dict:
    model = Model("test_vmamba2_npu", kwargs={"drop_rate": 0.2, "drop_path_rate": 0.1})
    return train("auto", model, dataset or data(seed), OPTIM, trainer, {"csv": logger}, seed, output, {"seed": seed})


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict]:
    """A run that nothing stops."""
    output = tmp_path_factory.mktemp("alone")
    return output, run(output)


class Stop(BaseException):
    """What a kill is to the test: nothing after it runs."""


class StoppingLogger(CsvLogger):
    """Stops the process after an update, when its line is written and its checkpoint, if any, is not."""

    def __init__(self, output: Path, after: int, how) -> None:
        super().__init__(output)
        self.after, self.how = after, how

    def update(self, row) -> None:
        super().update(row)
        if row["update"] == self.after:
            self.how()


def stop() -> None:
    raise Stop


def test_results_and_files(alone):
    output, results = alone
    assert results["epochs"] == 2 and results["test_images"] == 12 and results["test_accuracy"] > 0.9
    assert json.loads((output / "metrics.json").read_text())["history"][-1]["update"] == UPDATES
    rows = (output / "updates.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["update", *map(str, range(1, UPDATES + 1))]
    report = (output / "report.md").read_text()
    assert f"{results['test_accuracy']:.4f}" in report and "| left | 6 |" in report and "moving average" in report
    assert (
        str(output) not in (output / "model" / "config.json").read_text() + (output / "model" / "README.md").read_text()
    )


def test_weights_that_count_are_the_average_of_the_last_update(alone):
    output, _ = alone
    state = load_state(output / "checkpoints" / "state.pt")
    final = load_weights(output / "model" / "model.safetensors")
    assert final.keys() == state["average"].keys()
    assert all(torch.equal(final[name], state["average"][name]) for name in final)
    assert not torch.equal(final["head.fc.weight"], state["model"]["head.fc.weight"])


def test_model_folder_is_timms_local_dir(alone):
    output, results = alone
    model = timm.create_model(f"local-dir:{output / 'model'}", pretrained=True).eval()
    test = data().test
    x, y = test.__getitems__([(0, i) for i in range(len(test))])
    with torch.no_grad():
        assert float((model(x).argmax(-1) == y).double().mean()) == results["test_accuracy"]
    assert tuple(model.pretrained_cfg["mean"]) == (0.3,) and tuple(model.pretrained_cfg["input_size"]) == (1, 16, 16)


def test_without_an_average_the_last_weights_count(tmp_path):
    run(tmp_path, replace(TRAINER, epochs=1, ema_decay=None))
    state = load_state(tmp_path / "checkpoints" / "state.pt")
    final = load_weights(tmp_path / "model" / "model.safetensors")
    assert state["average"] is None and all(torch.equal(final[name], state["model"][name]) for name in final)


def test_test_part_takes_no_part_in_any_choice(alone, tmp_path):
    whole = data()
    other = replace(whole, test=ArrayImages(whole.test.images, 1 - whole.test.labels, whole.prepare))
    results = run(tmp_path, dataset=other)
    assert results["test_accuracy"] == pytest.approx(1 - alone[1]["test_accuracy"])
    for name in ("model/model.safetensors", "checkpoints/best.safetensors", "updates.csv"):
        ours, theirs = ((folder / name).read_bytes() for folder in (tmp_path, alone[0]))
        if name == "updates.csv":  # its last column is a speed
            ours, theirs = ([line.rsplit(b",", 1)[0] for line in text.splitlines()] for text in (ours, theirs))
        assert ours == theirs


def test_learning_rate_warms_up_and_falls(alone):
    lines = [line.split(",") for line in (alone[0] / "updates.csv").read_text().splitlines()]
    rates = [float(line[lines[0].index("lr")]) for line in lines[1:]]
    assert rates[0] == 0 and max(rates) <= 3e-3 and rates.index(max(rates)) == 2
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] < 3e-4


@pytest.mark.parametrize("after", [1, 2, 5, 6, 9])  # before, at and after checkpoints and the end of an epoch
def test_run_stopped_after_any_update_goes_on_to_the_same_end(after, alone, tmp_path):
    with pytest.raises(Stop):
        run(tmp_path, logger=partial(StoppingLogger, after=after, how=stop))
    results = run(tmp_path, replace(TRAINER, resume="auto", num_workers=0))
    assert not compare(alone[0], tmp_path)
    for name in ("test_accuracy", "test_loss", "val_accuracy"):
        assert results[name] == alone[1][name]


def test_signal_ends_the_run_after_its_update_with_a_checkpoint(alone, tmp_path):
    import signal

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as ended:
        run(tmp_path, logger=partial(StoppingLogger, after=3, how=lambda: signal.raise_signal(signal.SIGTERM)))
    assert ended.value.code == 128 + signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert load_state(tmp_path / "checkpoints" / "state.pt")["position"]["update"] == 4  # noticed by the next update
    run(tmp_path, replace(TRAINER, resume=str(tmp_path)))
    assert not compare(alone[0], tmp_path)


def test_finished_run_is_not_trained_again(alone, tmp_path):
    import shutil

    shutil.copytree(alone[0], tmp_path / "copy")
    assert run(tmp_path / "copy", replace(TRAINER, resume="auto"))["test_loss"] == alone[1]["test_loss"]
    assert not compare(alone[0], tmp_path / "copy")


def test_report_of_a_loss_that_is_not_finite(tmp_path):
    class Poisoned(ArrayImages):
        def __getitems__(self, keys):
            x, y = super().__getitems__(keys)
            return (x * torch.nan if keys[0][0] == 1 else x), y

    whole = data()
    train_part = whole.train
    poisoned = Poisoned(train_part.images, train_part.labels, train_part.prepare, train_part.augment)
    with pytest.raises(NonFinite) as told:
        run(tmp_path, replace(TRAINER, checkpoint_every=0), dataset=replace(whole, train=poisoned))
    words = str(told.value)
    assert "the loss is nan at update 6 (epoch 2, update 1 of 5)" in words and "images of the batch: " in words
    state = load_state(tmp_path / "checkpoints" / "state.pt")
    assert state["position"]["update"] == 5 and all(v.isfinite().all() for v in state["model"].values())
    assert str(tmp_path / "checkpoints" / "state.pt") in words


def test_seed_changes_the_run_and_nothing_else_does(alone, tmp_path):
    run(tmp_path / "same")
    assert not compare(alone[0], tmp_path / "same")
    run(tmp_path / "other", seed=1)
    assert "model.safetensors" in compare(alone[0], tmp_path / "other")


def test_settings_of_the_process_return(tmp_path):
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    run(tmp_path, replace(TRAINER, epochs=1, limit_updates=1, deterministic=True))
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before

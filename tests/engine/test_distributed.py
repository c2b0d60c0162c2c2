"""Two processes under torchrun (gloo) train as one does, copied or sharded, into one folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vmamba_npu.engine.checkpoints import load_weights

ROOT = Path(__file__).resolve().parents[2]
SMOKE = [
    "experiment=smoke", "logger=csv", "trainer.epochs=2", "trainer.limit_updates=3", "trainer.checkpoint_every=2",
    "trainer.clip_grad=0.5",
]  # fmt: skip


def launch(folder: Path, script: str, *arguments: str, processes: int = 1) -> list[str]:
    """Run a script in a folder by as many processes; the lines that they print."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / script), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("alone")
    lines = launch(folder, "train.py", *SMOKE, "hydra.run.dir=run")
    return folder / "run", json.loads(lines[-1])


def check_same(run: Path, results: dict, alone: tuple[Path, dict]) -> None:
    """The run of two processes is that of one, but for the order of sums."""
    texts = [(folder / "updates.csv").read_text() for folder in (run, alone[0])]
    curves = [[line.split(",")[:3] for line in text.splitlines()[1:]] for text in texts]
    assert len(curves[0]) == len(curves[1]) == 6
    for (update, epoch, loss), (same_update, same_epoch, expected) in zip(*curves, strict=True):
        assert (update, epoch) == (same_update, same_epoch) and float(loss) == pytest.approx(float(expected), rel=1e-5)
    for name in ("test_loss", "test_accuracy", "test_images", "parameters", "val_accuracy"):
        assert results[name] == pytest.approx(alone[1][name], rel=1e-5)
    ours, theirs = (load_weights(folder / "model" / "model.safetensors") for folder in (run, alone[0]))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=1e-3)


def test_two_processes_train_as_one_into_one_folder(alone, tmp_path):
    lines = launch(tmp_path, "train.py", *SMOKE, processes=2)
    (run,) = (tmp_path / "outputs" / "torchrun").iterdir()
    results = json.loads(lines[-1])
    assert sum('"test_accuracy"' in line for line in lines) == 1
    assert results["processes"] == 2 and results["output"] == str(run)
    assert (run / "train.log").read_text().count("device cpu") == 1
    check_same(run, results, alone)


def test_two_processes_with_shards_train_as_one_also_when_stopped_and_resumed(alone, tmp_path):
    options = [*SMOKE, "trainer.strategy=fsdp", "trainer.checkpoint_every=0"]
    lines = launch(tmp_path, "tests/engine/sharded_run.py", str(tmp_path / "run"), *options, processes=2)
    assert sorted(line for line in lines if line.startswith("process")) == [
        f"process {rank} ended with {128 + signal.SIGTERM}" for rank in range(2)
    ]
    check_same(tmp_path / "run", json.loads(lines[-1]), alone)

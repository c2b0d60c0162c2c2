"""Kill a training with SIGKILL at random moments, resume it each time, and compare with one that was left alone.

    python tests/engine/kill_and_resume.py [--kills 3] [--seed 0] [override ...]

Overrides are those of train.py; the default is a small model on scikit-learn's digits. The exit code is 0 if the final
weights, the moving average, the optimizer and the losses are equal bit for bit.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model=test", "data=digits", "trainer=cpu", "trainer.epochs=2", "trainer.limit_updates=12", "trainer.batch_size=16",
    "trainer.checkpoint_every=5", "trainer.log_every=1", "logger=csv", "data.img_size=16", "model.kwargs.drop_rate=0.1",
]  # fmt: skip


def command(output: Path, overrides: list[str]) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={output}", *overrides]


def updates(output: Path) -> int:
    """Updates in the loss curve so far."""
    curve = output / "updates.csv"
    return max(0, len(curve.read_text().splitlines()) - 1) if curve.exists() else 0


def kill_after(output: Path, overrides: list[str], wanted: int) -> bool:
    """Start or go on with a run, and kill it once its loss curve has so many updates; False if it ended before."""
    process = subprocess.Popen(command(output, [*overrides, "trainer.resume=auto"]), stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and updates(output) < wanted:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))  # anywhere within an update or a checkpoint
        return process.poll() is None
    finally:
        process.kill()
        process.wait()


def differences(a: object, b: object, name: str = "") -> list[str]:
    """Names of the parts of two states that are not equal bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{name}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{name}.{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [name]
    return [] if type(a) is type(b) and a == b else [name]


def compare(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs, clocks and options of resuming apart."""
    states = [torch.load(run / "checkpoints" / "state.pt", weights_only=True) for run in (one, other)]
    for state in states:
        del state["config"]
        state["position"].pop("elapsed")
        for row in state["position"]["history"]:
            del row["seconds"], row["images_per_second"]
    found = differences(*states)
    if (one / "model" / "model.safetensors").read_bytes() != (other / "model" / "model.safetensors").read_bytes():
        found.append("model.safetensors")
    curves = [[line.split(",")[:3] for line in (run / "updates.csv").read_text().splitlines()] for run in (one, other)]
    return found + (["updates.csv"] if curves[0] != curves[1] else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("overrides", nargs="*", default=SMALL)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        subprocess.run(command(alone, args.overrides), check=True, stdout=subprocess.DEVNULL)
        total = updates(alone)
        for moment in sorted(random.sample(range(1, total), min(args.kills, total - 1))):
            hit = kill_after(killed, args.overrides, moment)
            print(f"killed after update {updates(killed)}" if hit else "ended before the kill", flush=True)
        subprocess.run(command(killed, [*args.overrides, "trainer.resume=auto"]), check=True, stdout=subprocess.DEVNULL)
        found = compare(alone, killed)
    print(f"{total} updates; " + (f"DIFFERENT: {', '.join(found)}" if found else "equal bit for bit"))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

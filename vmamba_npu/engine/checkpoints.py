"""Files that survive a kill at any moment: weights as safetensors, the training state as one weights-only file."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from omegaconf import OmegaConf
from torch import Tensor

STATE = "checkpoints/state.pt"
BEST = "checkpoints/best.safetensors"
MODEL = "model"  # folder of the final model, in the layout that timm's `local-dir:` reads
FORMAT = 1

# A run may be resumed with other values of these: they change neither the updates nor their order.
FREE = {
    "trainer.resume", "trainer.num_workers", "trainer.checkpoint_every", "trainer.log_every", "trainer.eval_batch_size",
    "trainer.device", "data.cache_dir",
}  # fmt: skip


class CannotResume(ValueError):
    """A training state that does not belong to this run."""


def write(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that a reader finds the old one or the new one, whole, whenever the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """`write` of a text."""
    write(path, lambda file: file.write(text.encode()))


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened, and the rename is durable by itself
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Weights as safetensors; equal weights give equal bytes."""
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    blob = safetensors.torch.save(tensors, {"format": "pt"})  # two entries here would be written in any order
    write(path, lambda file: file.write(blob))


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a safetensors file."""
    return safetensors.torch.load(path.read_bytes())


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """A training state: plain containers, numbers, strings and tensors."""
    write(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load_state(path: Path) -> dict[str, Any]:
    """A training state; nothing but plain containers, numbers, strings and tensors is accepted from the file.

    Raises:
        CannotResume: the file is not a training state of this version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CannotResume(f"trainer.resume: {path} is not a training state: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CannotResume(f"trainer.resume: {path} is not a training state of format {FORMAT}")
    return state


def find_state(resume: str | None, output: Path) -> Path | None:
    """The training state to go on from, or None for a new run.

    Raises:
        CannotResume: there is none where `resume` says, or one is in the way of a new run.
    """
    here = output / STATE
    if resume is None:
        if here.exists():
            raise CannotResume(
                f"hydra.run.dir: {output} holds a run; trainer.resume=auto goes on with it, another folder starts anew"
            )
        return None
    if resume == "auto":
        return here if here.exists() else None
    path = Path(resume) / STATE
    if not path.exists():
        raise CannotResume(f"trainer.resume: no training state {path}")
    return path


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other values than the run began with.

    Raises:
        CannotResume: a value differs that changes the result; the message lists each.
    """
    before, after = _flat(saved), _flat(now)
    differing = [
        f"  {key}: {before.get(key, 'absent')} in the run, {after.get(key, 'absent')} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in FREE and not key.startswith("logger")
    ]
    if differing:
        raise CannotResume("\n".join(["trainer.resume: give the options that the run began with:", *differing]))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: list(tree) if isinstance(tree, tuple) else tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def save_config(path: Path, config: Mapping[str, Any]) -> None:
    """A resolved config as plain YAML."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(dict(config))))

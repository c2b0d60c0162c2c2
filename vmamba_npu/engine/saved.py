"""A trained model on disk: found by name or path, read without executing anything that is stored with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch.nn as nn

from ..data import Preparation
from .checkpoints import BEST, MODEL, load_weights
from .model import use_backend
from .refusals import one_of


@dataclass(frozen=True)
class Saved:
    """A trained model.

    Attributes:
        name: architecture.
        weights: safetensors file.
        classes: name of each class.
        prepare: how images are prepared.
        model_args: further arguments of timm.create_model.
        about: what the training wrote down: data, results.
    """

    name: str
    weights: Path
    classes: list[str]
    prepare: Preparation
    model_args: Mapping[str, Any]
    about: Mapping[str, Any]

    def build(self, backend: str) -> nn.Module:
        """The model with its weights, in eval mode.

        Raises:
            ValueError: the weights are not those of the architecture.
        """
        one_of("config.json: architecture", self.name, timm.list_models())
        args = {**self.model_args, "num_classes": len(self.classes), "in_chans": self.prepare.in_chans}
        model = timm.create_model(self.name, **args)
        try:
            model.load_state_dict(load_weights(self.weights))
        except RuntimeError as error:
            raise ValueError(f"checkpoint: {self.weights} does not fit {self.name}: {error}") from None
        use_backend(model, backend)
        return model.eval()


def find(checkpoint: str, weights: str, shipped: Path | None) -> Saved:
    """A trained model.

    Args:
        checkpoint: output directory of a run, a folder with config.json and model.safetensors, or a name in `shipped`.
        weights: "final", or "best" for those of the best epoch on the validation part, which a run keeps.
        shipped: folder of named models.

    Raises:
        FileNotFoundError: there is no such model; the message tells where it was looked for.
        ValueError: config.json does not describe an image classifier of ours.
    """
    one_of("weights", weights, ("final", "best"))
    path = Path(checkpoint).expanduser()
    places = [path, path / MODEL] + ([shipped / checkpoint] if shipped else [])
    folder = next((place for place in places if (place / "config.json").is_file()), None)
    if folder is None:
        names = sorted(p.parent.name for p in shipped.glob("*/config.json")) if shipped else []
        raise FileNotFoundError(
            f"checkpoint: no model at {path} (a run's output directory, or a folder with config.json); "
            f"shipped models: {', '.join(names) or 'none'}"
        )
    file = folder / "model.safetensors" if weights == "final" else folder.parent / BEST
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint: no {weights} weights: {file} is missing")
    try:
        return _read(json.loads((folder / "config.json").read_text()), file)
    except (KeyError, TypeError) as error:
        raise ValueError(f"checkpoint: {folder / 'config.json'} was not written by train.py: {error!r}") from None


def _read(config: Mapping[str, Any], file: Path) -> Saved:
    cfg = config["pretrained_cfg"]
    chans, *size = cfg["input_size"]
    prepare = Preparation(
        tuple(size), chans, tuple(cfg["mean"]), tuple(cfg["std"]), cfg["interpolation"], cfg["crop_pct"]
    )
    return Saved(
        config["architecture"], file, list(config["label_names"]), prepare, config.get("model_args", {}),
        config.get("vmamba_npu", {}),
    )  # fmt: skip

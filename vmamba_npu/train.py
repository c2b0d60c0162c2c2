"""`python -m vmamba_npu.train`, `vmamba-train`, `python train.py`: train a model by a config."""

import json
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from .engine.cli import is_first, output_directory, run
from .engine.refusals import need, refusing
from .engine.schema import check, check_keys
from .engine.training import train

# In this order: what is quickly refused comes before what takes time.
OBJECTS = ("model", "optim", "trainer", "logger", "data")


def train_from(cfg: DictConfig) -> float | None:
    """Train by a config; the results are the last line printed, as JSON. Returns the best accuracy, for sweepers."""
    with refusing():
        need("train", "torchmetrics", "matplotlib", "sklearn")
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        check_keys(config, ("seed", "backend", *OBJECTS))
        check_keys(config["backend"], ("name",), "backend")
        check(config)
        objects = {name: instantiate(config[name], _convert_="all") for name in OBJECTS}
    results = train(
        backend=config["backend"]["name"], seed=config["seed"], output=output_directory(), config=config, **objects
    )
    if is_first():
        print(json.dumps(results), flush=True)
    return results.get("val_accuracy")


def main() -> None:
    """Entry point."""
    run(train_from, "train")


if __name__ == "__main__":
    main()

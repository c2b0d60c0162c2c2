"""`python -m vmamba_npu.eval`, `vmamba-eval`, `python eval.py`: evaluate, use or time a trained model by a config."""

import json
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from .data.randomness import seed_all
from .engine.cli import output_directory, run, shared_folder
from .engine.evaluation import introduce, measure, name_images, speed
from .engine.options import PRECISIONS
from .engine.processes import Processes, processes
from .engine.refusals import need, one_of, refusing
from .engine.saved import Saved, find
from .engine.schema import BadConfig, check, check_keys, fits
from .engine.step import Precision

TYPES = {
    "backend": dict[str, Any], "data": dict[str, Any], "checkpoint": str, "weights": str, "part": str,
    "images": str | list[str] | None, "invert": bool, "benchmark": bool, "device": str, "precision": str,
    "batch_size": int, "num_workers": int, "warmup": int, "repeat": int, "seed": int,
}  # fmt: skip


def eval_from(cfg: DictConfig) -> float | None:
    """Evaluate by a config; the results are the last line printed, as JSON."""
    with refusing():
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        _check(config)
        if not (config["benchmark"] or config["images"]):
            need("train", "torchmetrics", "matplotlib", "sklearn")
        saved = find(config["checkpoint"], config["weights"], _shipped())
    with refusing(), processes(config["device"], "device") as here:
        results = _work(config, saved, here)
        if here.first:
            print(json.dumps(results), flush=True)
    return results.get(f"{config['part']}_accuracy")


def _check(config: dict[str, Any]) -> None:
    check_keys(config, TYPES)
    check_keys(config["backend"], ("name",), "backend")
    for key, kind in TYPES.items():
        if not fits(kind, config[key]):
            raise BadConfig(f"{key}: expected {kind}, got {config[key]!r}")
    one_of("precision", config["precision"], PRECISIONS)
    check(config)


def _work(config: dict[str, Any], saved: Saved, here: Processes) -> dict[str, Any]:
    backend, output = config["backend"]["name"], output_directory()
    precision = Precision(config["precision"], here.device)
    model = saved.build(backend).to(here.device)
    if here.first:
        introduce(saved, model, backend, here, config["precision"])
    if config["benchmark"]:
        return speed(saved, model, backend, config["batch_size"], here, precision, config["warmup"], config["repeat"])
    if config["images"]:
        return name_images(saved, model, config["images"], here, precision, config["invert"], output)
    seed_all(config["seed"])
    data = instantiate(_prepared(config["data"], saved), _convert_="all")
    part, batch_size, workers = config["part"], config["batch_size"], config["num_workers"]
    return measure(saved, model, data, part, batch_size, here, precision, workers, output)


def _prepared(data: dict[str, Any], saved: Saved) -> dict[str, Any]:
    """The data config with the model's preparation of images, where the command line does not say otherwise."""
    asked = {override.lstrip("+").partition("=")[0] for override in HydraConfig.get().overrides.task}
    prepare = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(saved.prepare).items()}
    return {**data, **{key: prepare[key] for key in prepare if key in data and f"data.{key}" not in asked}}


def _shipped() -> Path | None:
    try:
        return shared_folder("checkpoints")
    except FileNotFoundError:
        return None


def main() -> None:
    """Entry point."""
    run(eval_from, "eval")


if __name__ == "__main__":
    main()

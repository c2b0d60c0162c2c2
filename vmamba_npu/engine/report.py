"""What a run leaves behind to be read: the model with its card, metrics, figures and a short report."""

import json
import logging
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn as nn
from omegaconf import OmegaConf
from timm.models._hub import save_config_for_hf
from torch import Tensor

from ..data import Images, Preparation
from .checkpoints import MODEL, save_config, save_weights, write_text
from .loggers import read_csv
from .metrics import Scores
from .run import Run

log = logging.getLogger(__name__)


def write_run(run: Run, results: Mapping[str, Any], scores: Scores | None, weights: Mapping[str, Tensor]) -> None:
    """Write the final model, metrics, figures and report of a training."""
    from . import figures  # matplotlib is of the extra `train`

    output, history = run.output, run.position.history
    write_model(output / MODEL, run, results, weights)
    write_text(output / "metrics.json", json.dumps({**results, "history": history}, indent=2) + "\n")
    figures.curves(output / "figures" / "curves.png", history, read_csv(output / "updates.csv"))
    if scores is not None and run.data.test is not None and run.data.reports_accuracy:
        draw_scores(output / "figures", scores, run.data.test, run.data.classes, run.data.prepare)
    write_text(output / "report.md", _report(run, results, scores))


def write_model(folder: Path, run: Run, results: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Weights, timm's config.json, the resolved config, and the model card."""
    prepare, model = run.data.prepare, run.final
    told = {key: value for key, value in results.items() if key != "output"}
    ours = {"data": run.data.name, "results": told}
    text = _timm_config(model, run.data.classes, prepare, ours)
    save_weights(folder / "model.safetensors", weights)
    write_text(folder / "config.json", text)
    save_config(folder / "config.yaml", run.config)
    write_text(folder / "README.md", _card(run, results, json.loads(text)))


def _timm_config(model: nn.Module, classes: list[str], prepare: Preparation, ours: Mapping[str, Any]) -> str:
    data_config = {
        "input_size": (prepare.in_chans, *prepare.img_size), "mean": prepare.mean, "std": prepare.std,
        "crop_pct": prepare.crop_pct, "interpolation": prepare.interpolation,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        more = {"label_names": classes, "vmamba_npu": dict(ours)}
        save_config_for_hf(model, str(path), more, data_config=data_config)
        return path.read_text() + "\n"


def draw_scores(folder: Path, scores: Scores, dataset: Images, classes: list[str], prepare: Preparation) -> None:
    """Confusion matrix and page of wrong predictions."""
    from . import figures  # matplotlib is of the extra `train`

    figures.confusion(folder / "confusion_matrix.png", scores.confusion, classes)
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (prepare.mean, prepare.std))
    images = [dataset.__getitems__([(0, index)])[0][0] * std + mean for index, *_ in scores.wrong]
    titles = [f"{classes[y]} as {classes[p]} ({sure:.0%})" for _, y, p, sure in scores.wrong]
    total = int(scores.confusion.sum() - scores.confusion.trace())
    figures.wrong_predictions(folder / "wrong_predictions.png", images, titles, total)


def per_class_table(scores: Scores, classes: list[str]) -> str:
    """Markdown table of the accuracy of each class."""
    rows = ["| class | images | accuracy |", "|---|---|---|"]
    for name, count, share in zip(classes, scores.confusion.sum(1).tolist(), scores.per_class, strict=True):
        rows.append(f"| {name} | {count} | {'-' if share is None else f'{share:.4f}'} |")
    return "\n".join(rows)


def _report(run: Run, results: Mapping[str, Any], scores: Scores | None) -> str:
    counted = scores if run.data.reports_accuracy else None
    lines = [f"# {results['model']} on {run.data.name}", ""]
    if counted is not None:
        lines += [
            f"Test accuracy **{results['test_accuracy']:.4f}** on {results['test_images']} images that no choice was "
            f"made by (loss {results['test_loss']:.4f}); weights: {_which(run)}.", "",
        ]  # fmt: skip
    else:
        lines += ["Accuracy is not reported: " + ("the data are made up." if scores else "there is no test part."), ""]
    lines += [f"{run.data.source}.", ""] if run.data.source else []
    lines += [f"- {note}" for note in run.data.notes]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in results.items() if value is not None and key != "output"]
    lines += [f"| torch, timm | {torch.__version__}, {timm.__version__} |", ""]
    if run.position.best:
        best = run.position.best
        found = f"{best['top1']:.4f} after epoch {best['epoch']}"
        lines += [f"Best on the validation part: {found} (`checkpoints/best.safetensors`).", ""]
    lines += ["![curves](figures/curves.png)", ""]
    if counted is not None:
        lines += ["![confusion matrix](figures/confusion_matrix.png)", ""]
        lines += [per_class_table(counted, run.data.classes), ""]
        lines += ["![wrong predictions](figures/wrong_predictions.png)", ""]
    options = OmegaConf.to_yaml(OmegaConf.create(dict(run.config))).rstrip()
    lines += ["## Options", "", "```yaml", options, "```", ""]
    return "\n".join(lines)


def _which(run: Run) -> str:
    return "those of the last update" if run.average is None else "the moving average at the last update"


def _card(run: Run, results: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    prepare = run.data.prepare
    accuracy = results["test_accuracy"]
    figure = "not reported" if accuracy is None else f"{accuracy:.4f} on {results['test_images']} test images"
    sizes = " x ".join(map(str, (prepare.in_chans, *prepare.img_size)))
    return f"""---
license: apache-2.0
library_name: timm
pipeline_tag: image-classification
---
# {config["architecture"]}, {run.data.name}

| | |
|---|---|
| architecture | `{config["architecture"]}`, {results["parameters"]:,} parameters |
| input | {sizes}, mean {list(prepare.mean)}, std {list(prepare.std)} |
| classes | {len(run.data.classes)} |
| data | {run.data.source or run.data.name} |
| accuracy | {figure}; seed {results["seed"]}, weights: {_which(run)} |
| training | {results["epochs"]} epochs, {results["seconds"]} s, backend {results["backend"]}, {results["device"]}, \
{results["precision"]}, {results["processes"]} process(es) |
| made | {datetime.now(timezone.utc):%Y-%m-%d}, vmamba_npu {results["version"]}, torch {torch.__version__}, \
timm {timm.__version__} |

The test part took no part in any choice. The recipe is `config.yaml` in this folder.

```python
import timm
import vmamba_npu  # registers the architecture: without it timm does not know the name

model = timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True).eval()
```

`python eval.py checkpoint=PATH_OF_THIS_FOLDER` evaluates it; with `images=` it classifies files.

Limits: it knows the classes above and images like those it was trained on, and nothing else; its probabilities are not
calibrated. Sources: Mamba-2 (arXiv:2405.21060), VMamba (arXiv:2401.10166), timm.
"""

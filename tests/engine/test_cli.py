"""The two programs as a user calls them: what is printed, what is refused and in which words, where files go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import vmamba_npu.engine.cli as cli
from vmamba_npu import eval as eval_program
from vmamba_npu import train as train_program
from vmamba_npu.engine.schema import check

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ["experiment=smoke", "data.augment=null", "logger=csv"]


def call(main, folder: Path, *overrides: str, capsys, monkeypatch) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a program in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["program", *overrides])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    return lambda *overrides: call(train_program.main, tmp_path, *overrides, capsys=capsys, monkeypatch=monkeypatch)


@pytest.fixture
def evaluate(tmp_path, capsys, monkeypatch):
    return lambda *overrides: call(eval_program.main, tmp_path, *overrides, capsys=capsys, monkeypatch=monkeypatch)


REFUSED = [
    (["backend=foo"], "Available options in 'backend':\n\tauto\n\treference\n\ttorch"),
    (["model=vmamba2_tny"], "\tvmamba2_tiny\n"),
    (["modle=x"], "modle: no such key; did you mean model? Choices: backend, data,"),
    (["optim.lrr=1"], "optim.lrr: no such key; did you mean lr? Choices: "),
    (["+optim.lrr=1"], "optim.lrr: no such key; did you mean lr? Choices: "),
    (["model.kwargs.dephts=[1]"], "did you mean depths?"),
    (["optim.lr=fast"], "optim.lr: expected float, got 'fast'"),
    (["optim.lr=-1"], "optim.lr: expected a positive learning rate, got -1"),
    (["trainer.epochs=1.5"], "trainer.epochs: expected int, got 1.5"),
    (["trainer.epochs=0"], "trainer.epochs: expected at least 1, got 0"),
    (["trainer.precision=fp8"], "trainer.precision: expected one of fp32, bf16, fp16, got 'fp8'"),
    (["trainer.batch_size=15", "trainer.mixup=0.5"], "trainer.batch_size / accumulate must be even"),
    (["trainer.batch_size=2000"], "2000 images an update, but the training part has 1287"),
    (["trainer.device=tpu"], "trainer.device: expected one of auto, cpu, cuda, npu, got 'tpu'"),
    (["backend.name=foo"], "backend.name: expected one of auto, reference, torch, got 'foo'"),
    (["model=timm"], "model.name: it needs a value; give one with model.name=VALUE"),
    (["model.name=vmamba2_digit_npu"], "nearest: vmamba2_digits_npu"),
    (["model=timm", "model.name=test_resnet", "backend=torch"], "ResNet has no operator of vmamba_npu for 'torch'"),
    (["+model.kwargs.depth=3"], "unexpected keyword argument 'depth'"),
    (["optim.opt=adamv"], "nearest: adam"),
    (["optim.sched=onecycle"], "optim.sched: expected one of cosine"),
    (["data=imagefolder", "data.root=absent"], "data.root: no folder absent"),
    (["data.val_images=5"], "data.val_images: cannot hold out 5 of 1437 images"),
    (["seed=-1"], "seed: expected at least 0, got -1"),
    (["trainer.resume=absent"], "trainer.resume: no training state"),
    (["+new=1"], "new: no such key"),
]


@pytest.mark.parametrize(
    ("overrides", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_refused(overrides, message, train):
    code, _, err = train(*SMOKE, *overrides)
    assert code == 1 and message in err, err
    assert "Traceback" not in err and len(err) < 1500


def test_help(train, evaluate):
    for program, words in (
        (train, "python train.py backend=torch model=vmamba2_tiny"),
        (evaluate, "'images=[a.png,b.png]'"),
    ):
        code, out, _ = program("--help")
        assert code == 0 and words in out and "backend: auto, reference, torch" in out


def last_json(out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


def test_train_then_evaluate_classify_and_time(train, evaluate, tmp_path):
    code, out, _ = train(*SMOKE, "hydra.run.dir=run")
    results = last_json(out)
    assert code == 0 and results["test_images"] == 360 and results["epochs"] == 1 and results["seconds"] > 0
    assert results["output"] == str(tmp_path / "run")
    first = out.splitlines()[0]
    assert first.startswith("device cpu") and "backend auto: torch" in first
    for name in (
        "config.yaml", "metrics.json", "report.md", "summary.csv", "updates.csv", "train.log", ".hydra/overrides.yaml",
        "checkpoints/state.pt", "checkpoints/best.safetensors", "figures/curves.png", "figures/confusion_matrix.png",
        "figures/wrong_predictions.png", "model/model.safetensors", "model/config.json", "model/README.md",
    ):  # fmt: skip
        assert (tmp_path / "run" / name).stat().st_size > 0, name

    code, out, _ = evaluate("checkpoint=run", "data=digits", "hydra.run.dir=evaluation")
    assert code == 0 and "top-1" in out
    again = last_json(out)
    for key in ("test_accuracy", "test_images"):
        assert again[key] == results[key]
    assert again["loss"] == pytest.approx(results["test_loss"], rel=1e-5)
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert sum(metrics["per_class"].values()) / 10 == pytest.approx(results["test_accuracy"], abs=0.02)
    assert (tmp_path / "evaluation" / "figures" / "confusion_matrix.png").exists()
    assert last_json(evaluate("checkpoint=run", "data=digits", "backend=reference", "part=val")[1])["val_images"] == 150

    (tmp_path / "pictures").mkdir()
    for name in ("a", "b"):
        (tmp_path / "pictures" / f"{name}.png").write_bytes((tmp_path / "run/figures/curves.png").read_bytes())
    named = [
        last_json(evaluate("checkpoint=run", images)[1])["images"]
        for images in ("images=pictures", "images=pictures/*.png", "images=[pictures/a.png,pictures/b.png]")
    ]
    assert named[0] == named[1] == named[2] and [item["image"] for item in named[0]] == [
        "pictures/a.png",
        "pictures/b.png",
    ]
    shares = [share for _, share in named[0][0]["classes"]]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True)

    line = last_json(evaluate("checkpoint=run", "benchmark=true", "batch_size=3", "repeat=3", "warmup=1")[1])
    assert line["batch"] == 3 and line["size"] == [16, 16] and line["finite"] and line["ms_p50"] <= line["ms_p90"]

    for overrides, message in (
        (["checkpoint=nowhere"], "checkpoint: no model at nowhere"),
        (["checkpoint=run", "images=none*.png"], "images: nothing found at none*.png"),
        (["checkpoint=run", "images=run/config.yaml"], "run/config.yaml: not a readable image"),
        (["checkpoint=run", "part=trial"], "part: expected one of train, val, test, got 'trial'"),
        (["checkpoint=run", "data=synthetic"], "accuracy on synthetic data means nothing"),
        (["checkpoint=run", "batch_size=many"], "batch_size: expected"),
        (["checkpoint=run", "weights=worst"], "weights: expected one of final, best"),
        (["checkpoint=run", "backend=triton"], "Available options in 'backend'"),
    ):
        code, _, err = evaluate(*overrides)
        assert code == 1 and message in err and "Traceback" not in err, err

    code, _, err = train(*SMOKE, "hydra.run.dir=run")
    assert code == 1 and "holds a run; trainer.resume=auto goes on with it" in err
    code, _, err = train(*SMOKE, "trainer.resume=run", "optim.lr=0.5", "seed=3")
    assert code == 1 and "optim.lr: 0.002 in the run, 0.5 now" in err and "seed: 0 in the run, 3 now" in err
    assert last_json(train(*SMOKE, "trainer.resume=run")[1])["test_accuracy"] == results["test_accuracy"]


def test_jobs_of_a_multirun_do_not_touch_each_other(train, tmp_path):
    code, _, _ = train("-m", *SMOKE, "seed=0,1", "trainer.deterministic=true,false", "hydra.sweep.dir=sweep")
    assert code == 0
    assert train(*SMOKE, "seed=1", "hydra.run.dir=alone")[0] == 0
    weights = [(tmp_path / "sweep" / str(job) / "model" / "model.safetensors").read_bytes() for job in range(4)]
    assert weights[2] == weights[3] == (tmp_path / "alone" / "model" / "model.safetensors").read_bytes()
    assert weights[0] == weights[1] != weights[2]


def test_synthetic_data_report_no_accuracy(train, tmp_path):
    options = [
        "data=synthetic",
        "model=test",
        "trainer=debug",
        "trainer.batch_size=8",
        "data.images=40",
        "data.img_size=16",
    ]
    code, out, _ = train(*options, "logger=csv", "hydra.run.dir=run")
    results = last_json(out)
    assert code == 0 and results["test_accuracy"] is None and "is not reported" in out
    assert "top1" not in (tmp_path / "run" / "summary.csv").read_text()


def test_diverging_training_ends_with_a_report_and_keeps_the_checkpoint(train, tmp_path):
    options = [
        "optim=sgd",
        "optim.lr=1e30",
        "trainer.clip_grad=null",
        "trainer.checkpoint_every=1",
        "hydra.run.dir=run",
    ]
    code, _, err = train(*SMOKE, *options)
    assert code == 1 and "Traceback" not in err
    for words in (
        "the loss is nan at update 3",
        "learning rate: ",
        "losses before: 2.",
        "images of the batch: ",
        "state.pt",
    ):
        assert words in err, err
    assert (tmp_path / "run" / "checkpoints" / "state.pt").exists()


def test_program_runs_in_any_folder_and_says_so_with_its_exit_code(tmp_path):
    run = [sys.executable, str(ROOT / "train.py"), "backend=foo"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "Available options in 'backend'" in done.stderr
    module = [sys.executable, "-m", "vmamba_npu.eval", "checkpoint=nowhere"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(module, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "no model at nowhere" in done.stderr


def test_configs_of_an_installed_package_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "PACKAGE", tmp_path / "site" / "vmamba_npu")
    with pytest.raises(FileNotFoundError, match="configs"):
        cli.shared_folder("configs")
    (tmp_path / "site" / "configs").mkdir(parents=True)
    assert cli.shared_folder("configs") == tmp_path / "site" / "configs"
    (tmp_path / "site" / "vmamba_npu" / "configs").mkdir(parents=True)
    assert cli.shared_folder("configs") == tmp_path / "site" / "vmamba_npu" / "configs"


def test_output_directory_of_a_resumed_and_of_a_distributed_run(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert cli.run_dir(None, "dated") == cli.run_dir("auto", "dated") == "dated"
    assert cli.run_dir("outputs/one", "dated") == "outputs/one"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    assert cli.run_dir(None, "dated") == "outputs/torchrun/job7" and cli.run_dir("one", "dated") == "one"


CHOICES = [
    f"{folder.name}={file.stem}"
    for folder in sorted((ROOT / "configs").iterdir())
    if folder.is_dir() and folder.name != "hydra"
    for file in sorted(folder.glob("*.yaml"))
]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_fits_the_signatures(choice):
    needed = ["model.name=resnet18"] if choice == "model=timm" else []
    if choice.partition("=")[2] in ("imagefolder", "torchvision", "hf_dataset", "imagenet"):
        needed = ["data.root=somewhere"] + (["data.name=cifar10"] if choice.startswith("data") else [])
    if choice == "data=imagefolder":
        needed = ["data.root=somewhere"]
    cli.register_resolvers()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = OmegaConf.to_container(compose("train", [choice, *needed]), resolve=True)
    check(config)

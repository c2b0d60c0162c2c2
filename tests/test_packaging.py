"""What is shipped: versions that agree, ranges that hold the tested versions, a wheel that runs from anywhere."""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vmamba_npu

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as content:
        content.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def distribution(wheel) -> Distribution:
    (info,) = wheel.glob("*.dist-info")
    return PathDistribution(info)


def test_versions_agree(distribution):
    version = vmamba_npu.__version__
    assert distribution.version == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert json.loads((ROOT / "codemeta.json").read_text())["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_descriptions_and_licences_agree(distribution):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    codemeta = json.loads((ROOT / "codemeta.json").read_text())
    summary = distribution.metadata["Summary"]
    assert codemeta["description"] == summary and citation["abstract"] == f"{summary}."
    assert distribution.metadata["License-Expression"] == citation["license"] == "Apache-2.0"
    assert codemeta["license"].endswith("/Apache-2.0")
    assert codemeta["programmingLanguage"]["version"].replace(" ", "") in (">=3.10,<3.13", "<3.13,>=3.10")
    assert set(distribution.metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    assert "Apache License" in (ROOT / "LICENSE").read_text() and vmamba_npu.__name__ in (ROOT / "NOTICE").read_text()


def constraints() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [Requirement(line) for line in lines if line]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_each_dependency_is_pinned_to_one_version_inside_its_range(distribution, python):
    pins: dict[str, str] = {}
    for pin in constraints():
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert canonicalize_name(pin.name) not in pins, f"{pin.name} is pinned twice"
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            pins[canonicalize_name(pin.name)] = specifier.version
    checked = 0
    for text in distribution.requires or ():
        requirement = Requirement(text)
        installed_by_make = any(
            requirement.marker is None or requirement.marker.evaluate({"python_version": python, "extra": extra})
            for extra in ("", "train", "test")
        )
        if installed_by_make:
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text
            assert any(s.operator in (">=", "==", "~=") for s in requirement.specifier), f"{text}: no lowest version"
            checked += 1
    assert checked > 12


def test_only_optional_extras_name_accelerator_packages(distribution):
    optional = {"torch-npu", "triton", "triton-ascend", "mamba-ssm", "causal-conv1d", "datasets"}
    seen = set()
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) in optional:
            seen.add(canonicalize_name(requirement.name))
            for extra in ("", "train", "test"):
                assert requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}), text
    assert seen == optional


def test_the_wheel_holds_what_the_programs_need_and_no_more(wheel):
    files = {str(p.relative_to(wheel)) for p in wheel.rglob("*") if p.is_file()}
    assert "vmamba_npu/py.typed" in files
    for kind in ("configs", "checkpoints"):
        tracked = {f"vmamba_npu/{p.relative_to(ROOT)}" for p in (ROOT / kind).rglob("*") if p.is_file()}
        assert tracked and tracked <= files
    outside = {name.partition("/")[0] for name in files}
    assert all(name == "vmamba_npu" or name.endswith(".dist-info") for name in outside), outside
    assert not [name for name in files if name.endswith((".pyc", ".so")) or "/tests/" in name]
    assert {Path(name).name for name in files if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert sum((wheel / name).stat().st_size for name in files) < 4_000_000


def run_installed(wheel: Path, folder: Path, *command: str) -> str:
    """Output of `python -m ...` in another folder, with the unpacked wheel before everything else."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(wheel)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_train_finds_its_configs(wheel, tmp_path):
    config = yaml.safe_load(run_installed(wheel, tmp_path, "vmamba_npu.train", "--cfg", "job", "--resolve"))
    assert config["model"] and config["data"] and config["optim"]
    assert list(tmp_path.iterdir()) == []


def test_the_installed_eval_finds_its_checkpoint(wheel, tmp_path):
    out = run_installed(
        wheel, tmp_path, "vmamba_npu.eval", "benchmark=true", "batch_size=1", "warmup=1", "repeat=1", "device=cpu"
    )
    assert isinstance(json.loads(out.splitlines()[-1]), dict)


def test_console_scripts(distribution):
    scripts = {e.name: e.value for e in distribution.entry_points if e.group == "console_scripts"}
    assert scripts == {"vmamba-train": "vmamba_npu.train:main", "vmamba-eval": "vmamba_npu.eval:main"}
    assert all(callable(e.load()) for e in distribution.entry_points)


def test_the_sdist_can_be_built_into_the_same_wheel(tmp_path, wheel):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "xzf", archive], cwd=tmp_path, check=True)
    (source,) = (p for p in tmp_path.iterdir() if p.is_dir())
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=source, check=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as content:
        names = {name for name in content.namelist() if not name.endswith("/")}
    assert names == {str(p.relative_to(wheel)) for p in wheel.rglob("*") if p.is_file()}

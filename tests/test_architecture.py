"""The layout rules of CONTRIBUTING.md: who may import whom, what an operator's folder holds, how large files may be."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vmamba_npu import layers, ops
from vmamba_npu.backends import operators

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vmamba_npu"
OPERATORS = sorted(d for d in (PACKAGE / "ops").iterdir() if d.is_dir() and not d.name.startswith("_"))
SOURCES = sorted(PACKAGE.rglob("*.py"))
ALL_SOURCES = [p for folder in ("vmamba_npu", "tests", "benchmarks") for p in sorted((ROOT / folder).rglob("*.py"))]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / "pyproject.toml", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_import_rules():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


PLANTED = {
    "vmamba_npu/backends/tensors.py": ("import vmamba_npu.ops", "Layers of the package"),
    "vmamba_npu/ops/ssd/reference.py": ("from . import torch as other", "know neither each other"),
    "vmamba_npu/ops/ssd/torch/forward.py": ("from .. import library", "who is registered"),
    "vmamba_npu/layers/vision.py": ("from ..ops.ssd.reference import forward", "Layers call public operators alone"),
    "vmamba_npu/models/vision_mamba2.py": ("from ..ops import ssd", "Models call layers"),
    "vmamba_npu/engine/__init__.py": ("from ..layers.vision import VisionMamba2Mixer", "The engine calls models"),
    "vmamba_npu/ops/ssd/library.py": ("from ...testing import error_ratio", "Test helpers stay out"),
    "vmamba_npu/ops/ssd/api.py": ("import hydra", "needs torch and timm alone"),
}


def test_import_rules_find_what_breaks_them(tmp_path):
    """One forbidden import for each contract, all in one copy of the package: each contract must report."""
    for path in SOURCES:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        planted, _ = PLANTED.get(shown(path), ("", ""))
        copy.write_text(f"{path.read_text()}\n{planted}\n")
    assert all((tmp_path / name).exists() for name in PLANTED)
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    verdicts = [
        " ".join(line.split()) for line in done.stdout.splitlines() if line.strip().endswith(("KEPT", "BROKEN"))
    ]
    for _, contract in PLANTED.values():
        assert [line for line in verdicts if contract in line and line.endswith("BROKEN")], (contract, verdicts)


@pytest.mark.parametrize("folder", OPERATORS, ids=lambda d: d.name)
def test_an_operator_folder_holds_the_same_files(folder):
    entries = [impl for table in operators().values() for impl in table.values()]
    here = [impl for impl in entries if impl.module.startswith(f"vmamba_npu.ops.{folder.name}.")]
    backends = {impl.backend for impl in here}
    assert {"reference", "torch"} <= backends
    assert {impl.module for impl in here} == {f"vmamba_npu.ops.{folder.name}.{backend}" for backend in backends}
    modules = {f"{backend}.py" if (folder / f"{backend}.py").exists() else backend for backend in backends}
    kernels = {f"{backend}_kernels.py" for backend in backends}
    found = {p.name for p in folder.iterdir() if p.name != "__pycache__"}
    fixed = {"__init__.py", "api.py", "checks.py", "library.py", "README.md"}
    assert found - kernels == fixed | modules


def test_every_folder_of_operators_is_registered_and_public():
    folders = {impl.module.split(".")[2] for table in operators().values() for impl in table.values()}
    assert folders == {d.name for d in OPERATORS}
    assert {d.name for d in OPERATORS} <= set(ops.__all__)


@pytest.mark.parametrize("path", sorted({d / "api.py" for d in OPERATORS}), ids=lambda p: p.parent.name)
def test_an_api_file_is_signatures_docstrings_and_one_call(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            loops = [n for n in ast.walk(node) if isinstance(n, ast.For | ast.While | ast.With | ast.Try)]
            assert not loops, f"{shown(path)}: {node.name} computes; that belongs into a backend"


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - {"known_backends"}))
def test_a_public_operator_says_what_it_takes_and_gives(name):
    function = getattr(ops, name)
    text = inspect.getdoc(function) or ""
    for section in ("Args:", "Returns:", "Raises:"):
        assert section in text, f"{name}: no {section} in its docstring"
    parameters = inspect.signature(function).parameters
    described = text.partition("Args:")[2].partition("Returns:")[0]
    missing = [p for p in parameters if not re.search(rf"^\s*([\w, ]+, )?{p}(, [\w, ]+)?:", described, re.MULTILINE)]
    assert not missing, f"{name}: the docstring does not describe {missing}"
    untyped = [p.name for p in parameters.values() if p.annotation is p.empty]
    assert not untyped, f"{name}: no types for {untyped}"
    if name != "causal_conv1d_varlen_states":  # it copies tokens and computes nothing, so there is nothing to choose
        assert parameters["backend"].default == "auto"


@pytest.mark.parametrize("name", sorted(layers.__all__))
def test_a_public_layer_says_what_it_takes(name):
    layer = getattr(layers, name)
    text = inspect.getdoc(layer) or ""
    missing = [p for p in inspect.signature(layer).parameters if not re.search(rf"\b{p}\b", text)]
    assert "Args:" in text and not missing, f"{name}: the docstring does not describe {missing}"


@pytest.mark.parametrize("path", SOURCES, ids=shown)
def test_public_things_have_docstrings(path):
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), f"{shown(path)}: no first line that says what the file is for"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{shown(path)}: class {node.name} has no docstring"


@pytest.mark.parametrize("path", ALL_SOURCES, ids=shown)
def test_files_stay_readable(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400, f"{len(lines)} lines: split by phase"
    banners = [
        n for n, line in enumerate(lines, 1) if line.lstrip().startswith("# ---") or line.lstrip().startswith("# ===")
    ]
    assert not banners, f"banner comments in lines {banners}"


def test_optional_packages_are_tried_in_one_place():
    """`try: import` elsewhere hides a missing package; a handler that raises (with the remedy) does not hide it."""
    for path in SOURCES:
        if path == PACKAGE / "backends" / "probes.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Try) and any(isinstance(n, ast.Import | ast.ImportFrom) for n in node.body):
                for handler in node.handlers:
                    raised = any(isinstance(n, ast.Raise) for n in ast.walk(handler))
                    assert raised, f"{shown(path)}:{node.lineno}: an import is tried and its failure swallowed"


def test_no_environment_variable_selects_behaviour():
    """Operators, layers and models do not read the environment (the engine reads what torchrun sets)."""
    for folder in ("backends", "ops", "layers", "models", "compat", "data"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            text = path.read_text()
            assert "environ" not in text and "getenv" not in text, shown(path)


def test_no_catch_all_folders():
    names = {p.name for p in PACKAGE.rglob("*") if p.is_dir()}
    assert not names & {"utils", "util", "common", "misc", "core", "helpers"}


def test_no_empty_files():
    empty = [shown(p) for p in ALL_SOURCES if p.name != "__init__.py" and not p.read_text().strip()]
    assert not empty

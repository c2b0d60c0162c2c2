"""The documents are true: their code runs and prints what they show, their commands parse, their links lead on."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from vmamba_npu.engine.cli import register_resolvers

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "vmamba_npu").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:python|torchrun[^\n]*?) (train|eval)\.py(.*)")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


def programs(page: Path) -> str:
    """The python blocks of a page as one program; a text block right after one is what that one prints."""
    found = blocks(page)
    parts = ["import contextlib, io"]
    for (language, text), (after, wanted) in zip(found, [*found[1:], ("", "")], strict=True):
        if language == "python" and after == "text":
            parts.append(f"with contextlib.redirect_stdout(io.StringIO()) as _printed:\n    exec({text!r}, globals())")
            parts.append(f"assert _printed.getvalue() == {wanted!r}, _printed.getvalue()")
        elif language == "python":
            parts.append(text)
    return "\n".join(parts)


@pytest.mark.parametrize("page", [p for p in PAGES if any(kind == "python" for kind, _ in blocks(p))], ids=shown)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", programs(page)], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_to_files(page):
    text = BLOCK.sub("", page.read_text())
    for target in LINK.findall(text):
        if not target.startswith(("http://", "https://", "mailto:", "#")):
            path = page.parent / target.partition("#")[0]
            assert path.exists(), f"{shown(page)}: {target}"


def commands() -> list[tuple[str, str, str]]:
    """(page, program, arguments) of the train.py and eval.py commands that the pages show."""
    found = []
    for page in PAGES:
        for language, text in blocks(page):
            if language in ("bash", "sh", "console"):
                for match in COMMAND.finditer(text):
                    found.append((shown(page), match[1], match[2].partition("#")[0]))
    return found


def test_commands_name_options_that_exist():
    register_resolvers()
    assert commands()
    for page, program, arguments in commands():
        overrides = [word for word in shlex.split(arguments) if "=" in word]
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
            if "--multirun" in arguments or " -m " in arguments:
                overrides = [re.sub(r"=([^\[,]*),.*", r"=\1", word) for word in overrides]
            config = compose(program, overrides)
        assert OmegaConf.to_container(config, resolve=False), page


def test_modules_that_pages_run_exist():
    for page in PAGES:
        for name in re.findall(r"python -m ([\w.]+)", page.read_text()):
            if name.partition(".")[0] in ("vmamba_npu", "benchmarks"):
                path = ROOT / name.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{shown(page)}: {name}"


def test_make_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"train", "test"} <= targets
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z]+)[^`]*`", page.read_text()))
        assert named <= targets, f"{shown(page)}: {named - targets}"


def project_files() -> list[Path]:
    folders = ("vmamba_npu", "tests", "docs", "configs", "benchmarks", "checkpoints", ".ci")
    inside = [p for folder in folders for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    return [p for p in (*ROOT.glob("*"), *inside) if p.is_file() and p != Path(__file__)]


def test_no_file_names_a_machine():
    """Home folders, this checkout's own place, and hosts of package indexes do not belong into the project."""
    home = re.compile(r"/(?:root|home/\w+|Users/\w+)/")
    index = re.compile(r"\b(?:files\.pythonhosted|pypi\.python|registry\.npmjs)\.org")
    here = [str(p) for p in (ROOT, Path.home()) if len(p.parts) > 2]
    files = project_files()
    assert len(files) > 30
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        assert not home.search(text), f"{shown(path)}: {home.search(text)}"
        assert not index.search(text), shown(path)
        assert not [place for place in here if place in text], shown(path)

"""`install` and the program runner, in fresh interpreters: what resolves, what is refused, and what is left alone."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from vmamba_npu.compat.names import MODULES, NOT_COVERED, OBJECTS, refusal

ROOT = Path(__file__).resolve().parents[2]
BOTH = "vmamba_npu.compat: mamba_ssm is served by vmamba_npu; causal_conv1d is served by vmamba_npu\n"


def run(*arguments: str, cwd: Path, paths: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def python(code: str, tmp_path: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    code = "import vmamba_npu.compat as compat\n" + dedent(code)
    return run("-W", "error", "-c", code, cwd=tmp_path, paths=paths)


@pytest.fixture
def originals(tmp_path):
    """A folder with an installed mamba_ssm, and without causal_conv1d."""
    place = tmp_path / "site" / "mamba_ssm"
    (place / "ops").mkdir(parents=True)
    (place / "__init__.py").write_text("__version__ = 'original'\nclass Mamba2: pass\n")
    (place / "ops" / "__init__.py").write_text("")
    return place.parent


REFUSED = {
    "from mamba_ssm import Mamba": ("mamba_ssm.Mamba (Mamba-1)", "use Mamba2"),
    "from mamba_ssm import Mamba3": ("mamba_ssm.Mamba3 (Mamba-3)", "use Mamba2"),
    "from mamba_ssm.modules.mamba_simple import Mamba": ("mamba_ssm.modules.mamba_simple (Mamba-1)", "use Mamba2"),
    "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn": ("selective_scan_interface (Mamba-1)",),
    "from mamba_ssm.ops import selective_scan_interface": ("selective_scan_interface (Mamba-1)",),
    "from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel": ("mamba_ssm.models (language models)",),
    "from mamba_ssm.utils.generation import GenerationMixin": ("GenerationMixin (generation)", "InferenceParams"),
    "from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined": ("(Mamba-3)",),
    "from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd": ("(single stages of the scan)",),
    "import causal_conv1d.cpp_functions": ("causal_conv1d.cpp_functions",),
}


def test_resolution_and_refusals(tmp_path):
    """Nothing before the call; then modules by import and by attribute, specs, versions, pickles, refusals."""
    done = python(
        f"""
        import importlib, importlib.util, operator, pickle, sys
        assert importlib.util.find_spec("mamba_ssm") is None and importlib.util.find_spec("causal_conv1d") is None
        assert compat.install() == ["mamba_ssm", "causal_conv1d"]
        before = list(sys.meta_path)
        assert compat.install() == compat.install(override=True) == ["mamba_ssm", "causal_conv1d"]
        assert sys.meta_path == before

        for name in ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"):
            spec = importlib.util.find_spec(name)
            assert spec.name == name and spec.origin == "vmamba_npu.compat" and spec.loader is not None
        import mamba_ssm, causal_conv1d
        roots = {{"mamba_ssm": mamba_ssm, "causal_conv1d": causal_conv1d}}
        for name in {MODULES!r}:
            root, _, rest = name.partition(".")
            walked = operator.attrgetter(rest)(roots[root]) if rest else roots[root]
            assert walked is importlib.import_module(name), name
            assert importlib.util.find_spec(name) is walked.__spec__ and walked.__name__ == name
        for name, (module, attribute) in {OBJECTS!r}.items():
            root, _, rest = name.partition(".")
            wanted = getattr(importlib.import_module(module), attribute)
            assert operator.attrgetter(rest)(roots[root]) is wanted, name
            assert pickle.loads(pickle.dumps(wanted)) is wanted, name
        assert tuple(map(int, mamba_ssm.__version__.split("."))) >= (2, 3, 2)
        assert tuple(map(int, causal_conv1d.__version__.split("."))) >= (1, 6, 1)
        from mamba_ssm.modules.mamba2 import Mamba2
        from vmamba_npu.layers import Mamba2 as ours
        layer = Mamba2(16, d_state=4, headdim=8)
        assert Mamba2 is mamba_ssm.Mamba2 is ours and isinstance(pickle.loads(pickle.dumps(layer)), mamba_ssm.Mamba2)
        from mamba_ssm.ops.triton import layer_norm, layernorm
        assert layer_norm.RMSNorm is layernorm.RMSNorm
        assert not hasattr(mamba_ssm, "__wrapped__") and not hasattr(mamba_ssm, "_probe")

        for line, words in {REFUSED!r}.items():
            try:
                exec(line)
            except ImportError as error:
                missing = [w for w in (*words, "is not in this version of vmamba_npu.compat") if w not in str(error)]
                assert not missing, (line, str(error))
                assert str(error).startswith(error.name + " ("), (error.name, str(error))
            else:
                raise AssertionError(line)
        for line in ("from mamba_ssm import Foo", "import mamba_ssm.foo", "mamba_ssm.Foo"):
            try:
                exec(line)
            except ImportError as error:
                assert "is not a name that vmamba_npu.compat knows" in str(error)
            else:
                raise AssertionError(line)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", BOTH), done.stderr


def test_the_lists_of_covered_and_refused_names_are_disjoint():
    assert not set(NOT_COVERED) & set(OBJECTS)
    # only `utils.generation` is both a module that exists and a heading of refused names
    assert set(NOT_COVERED) & set(MODULES) == {"mamba_ssm.utils.generation"}
    assert refusal("mamba_ssm.Mamba") and not refusal("mamba_ssm.Mamba2") and not refusal("mamba_ssm")


def test_an_installed_original_wins_unless_overridden(tmp_path, originals):
    done = python(
        """
        import importlib.util, sys
        assert compat.install() == ["causal_conv1d"] == compat.install()
        import mamba_ssm, mamba_ssm.ops, causal_conv1d
        assert mamba_ssm.__version__ == "original" and mamba_ssm.Mamba2.__module__ == "mamba_ssm"
        assert causal_conv1d.causal_conv1d_fn.__module__ == "vmamba_npu.compat.causal_conv1d"

        for name in [name for name in sys.modules if name.startswith("mamba_ssm")]:
            del sys.modules[name]  # as before the first import
        assert compat.install(override=True) == ["causal_conv1d", "mamba_ssm"]
        import mamba_ssm
        assert mamba_ssm.__version__ != "original" and mamba_ssm.Mamba2.__module__.startswith("vmamba_npu.layers")
        """,
        tmp_path, originals,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where = originals / "mamba_ssm" / "__init__.py"
    assert done.stderr.splitlines() == [
        f"vmamba_npu.compat: mamba_ssm stays the installed one, {where} (override replaces it); "
        "causal_conv1d is served by vmamba_npu",
        "vmamba_npu.compat: mamba_ssm is served by vmamba_npu",
    ]


def test_an_imported_original_is_never_swapped(tmp_path, originals):
    done = python(
        """
        import mamba_ssm
        try:
            compat.install(override=True)
        except RuntimeError as error:
            assert "mamba_ssm has been imported already" in str(error) and "before anything imports it" in str(error)
        else:
            raise AssertionError("no error")
        assert compat.install() == ["causal_conv1d"]
        import mamba_ssm.ops
        assert mamba_ssm.__version__ == "original"
        """,
        tmp_path, originals,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_bare_folder_is_no_original_and_a_module_made_by_the_program_is_one(tmp_path):
    (tmp_path / "causal_conv1d").mkdir()
    done = python(
        """
        import sys, types
        sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")
        assert compat.install() == ["causal_conv1d"]
        import causal_conv1d
        assert causal_conv1d.causal_conv1d_fn
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "mamba_ssm stays the installed one, a module made by this program" in done.stderr


SCRIPT = """
import sys
from mamba_ssm import Mamba2
import beside
print(__name__, sys.argv, Mamba2.__module__, beside.WORD)
sys.exit(3)
"""


@pytest.fixture
def program(tmp_path):
    folder = tmp_path / "their code"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("WORD = 'found'\n")
    return folder / "script.py"


def test_runs_a_script(tmp_path, program):
    done = run("-m", "vmamba_npu.compat", str(program), "--lr", "1", "-m", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, BOTH), done.stderr
    assert done.stdout == f"__main__ {[str(program), '--lr', '1', '-m']} vmamba_npu.layers.mamba2 found\n"


def test_runs_a_module(program):
    done = run("-m", "vmamba_npu.compat", "-m", "script", "--help", cwd=program.parent)
    assert (done.returncode, done.stderr) == (3, BOTH), done.stderr
    assert done.stdout == f"__main__ {[str(program), '--help']} vmamba_npu.layers.mamba2 found\n"


def test_runs_over_an_original_on_request(tmp_path, program, originals):
    done = run("-m", "vmamba_npu.compat", "--override", str(program), cwd=tmp_path, paths=(originals,))
    assert done.returncode == 3 and " vmamba_npu.layers.mamba2 found" in done.stdout, done.stderr


def test_runner_says_what_is_wrong(tmp_path):
    absent = run("-m", "vmamba_npu.compat", "absent.py", cwd=tmp_path)
    assert absent.returncode == 2 and "program: no file absent.py" in absent.stderr

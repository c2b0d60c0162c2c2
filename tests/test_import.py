"""`import vmamba_npu` in fresh interpreters: without optional packages, beside broken ones, quietly, twice."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[1]

REFERENCE = """
import torch
from vmamba_npu.ops import ssd
x = torch.arange(6, dtype=torch.float64).reshape(1, 3, 1, 2)
one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
y, state = ssd(x, one[..., 0], -one[0, 0, 0], one, one, backend="reference")
decay, S, wanted = torch.tensor(-1.0, dtype=torch.float64).exp(), 0, []
for t in range(3):
    S = decay * S + x[0, t, 0]
    wanted.append(S)
torch.testing.assert_close(y[0, :, 0], torch.stack(wanted))
"""


def python(code: str, *options: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds the package from anywhere."""
    paths = os.pathsep.join(str(p) for p in (path, ROOT) if p is not None)
    clean = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run(
        [sys.executable, *options, "-c", dedent(code)],
        env={**clean, "PYTHONPATH": paths, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_works_with_torch_and_timm_alone():
    done = python(
        dedent("""
        import sys
        from importlib.machinery import PathFinder

        ABSENT = {"triton", "torch_npu", "mamba_ssm", "causal_conv1d", "hydra", "omegaconf", "mlxtend", "sklearn",
                  "matplotlib", "tensorboard", "torchmetrics", "datasets", "onnx", "einops"}

        class Finder(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

        sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
        import timm
        import vmamba_npu
        """)
        + REFERENCE
        + """
model = timm.create_model("test_vmamba2_npu").eval()
assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
assert not ABSENT & set(sys.modules)
"""
    )
    assert done.returncode == 0, done.stderr


def test_imports_nothing_that_torch_and_timm_have_not():
    """Instead of a time, which depends on the machine: the modules that the import adds to those of torch and timm."""
    done = python(
        """
        import sys
        import timm, torch
        before = set(sys.modules)
        import vmamba_npu
        added = {name.partition(".")[0] for name in set(sys.modules) - before} - {"vmamba_npu", "torch", "timm"}
        print(sorted(added - set(sys.stdlib_module_names)))
        ours = {name for name in sys.modules if name.startswith("vmamba_npu")}
        programs = {f"vmamba_npu.{name}" for name in ("engine", "data", "testing", "compat", "info", "train", "eval")}
        print(sorted(ours & programs))
        print(len(ours))
        """
    )
    assert done.returncode == 0, done.stderr
    packages, programs, count = done.stdout.splitlines()
    assert packages == "[]"
    assert programs == "[]"
    assert int(count) < 80


def test_is_silent_and_registers_once_under_w_error():
    done = python(
        """
        import importlib, timm, vmamba_npu
        names = timm.list_models("*vmamba2*")
        assert "vmamba2_tiny_npu" in names and len(names) == len(set(names))
        importlib.import_module("vmamba_npu")
        import vmamba_npu.models
        """,
        "-W", "error", "-W", "ignore::ResourceWarning",  # torch 2.6 leaves a temporary folder to the interpreter
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


@pytest.fixture
def broken_plugins(tmp_path):
    """Three installed device plugins, found by torch's autoload; each leaves a mark when something imports it."""
    bodies = {
        "torch_npu": "raise ImportError('libhccl.so: cannot open shared object file')",
        "torch_warns": "import warnings; warnings.warn('driver is old')",
        "torch_sleeps": "import time; time.sleep(60)",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / f'{name}.imported')!r}, 'w').close()\n{body}\ndef _autoload():\n    pass\n"
        )
        info = tmp_path / f"{name}-2.6.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 2.6.0\n")
        (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:_autoload\n")
    return tmp_path


def imported(folder: Path) -> set[str]:
    return {p.stem for p in folder.glob("*.imported")}


def test_broken_device_plugins_are_not_touched(broken_plugins):
    done = python("import vmamba_npu" + REFERENCE, "-W", "error", "-W", "ignore::ResourceWarning", path=broken_plugins)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr
    assert imported(broken_plugins) == set()


def test_those_plugins_do_break_a_plain_import_of_torch(broken_plugins):
    """The check above can fail: the same folder breaks `import torch` by itself."""
    (broken_plugins / "torch_sleeps-2.6.0.dist-info" / "entry_points.txt").unlink()
    done = python("import torch", "-W", "error", "-W", "ignore::ResourceWarning", path=broken_plugins)
    assert done.returncode != 0
    assert imported(broken_plugins) & {"torch_npu", "torch_warns"}


def test_a_broken_plugin_is_explained_when_asked(broken_plugins):
    done = python(
        """
        import os, runpy, sys
        import vmamba_npu
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
        sys.argv = ["info", "ssd"]
        runpy.run_module("vmamba_npu.info", run_name="__main__")
        """,
        path=broken_plugins,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("npu "))
    assert "does not start: libhccl.so: cannot open shared object file" in line
    assert "uninstall torch_npu" in line
    assert imported(broken_plugins) == {"torch_npu"}


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_the_users_autoload_switch_is_left_as_it_was(wanted):
    done = python(
        "import os, vmamba_npu; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])",
        TORCH_DEVICE_BACKEND_AUTOLOAD=wanted,
    )
    assert (done.returncode, done.stdout) == (0, f"{wanted}\n"), done.stderr


def test_compat_is_an_attribute_that_is_imported_on_use():
    program = (
        "import sys, vmamba_npu; assert 'vmamba_npu.compat' not in sys.modules; "
        "vmamba_npu.compat.install; assert 'vmamba_npu.compat' in sys.modules; assert not hasattr(vmamba_npu, 'compta')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

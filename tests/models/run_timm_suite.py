"""Run timm's own tests/test_models.py on the models of this package.

    python tests/models/run_timm_suite.py                                  every model of the family (some minutes)
    python tests/models/run_timm_suite.py test_vmamba2_npu -- -k fx -x     one model; after `--` arguments of pytest
    python tests/models/run_timm_suite.py --sdist timm-1.0.31.tar.gz       without network

The tests are part of timm's source distribution only, which pip downloads here for the installed version. They ask
timm for the names of all models; here they get ours alone. Tests that timm wrote for a fixed list of models, though the
rule holds for any, are run on ours too (`GENERAL`; they draw images of 3 channels); those of one architecture are not.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import timm

import vmamba_npu  # noqa: F401  (registers the models)

FAMILY = "vision_mamba2"
GENERAL = {
    "test_reset_classifier_keeps_pool",
    "test_features_only_grad_checkpointing_backward",
    "test_feature_getter_stage_ends_torchscript",
    "test_prune_intermediate_layers_params_used",
    "test_forward_after_prune_intermediate_layers",
}
MARKERS = "base forward backward cfg cfg_nonstd torchscript features fxforward fxbackward timeout".split()


class OurModels:
    """Pytest plugin: timm's tests see these model names and no others."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.of_three_channels = [name for name in names if timm.get_pretrained_cfg_value(name, "input_size")[0] == 3]
        self.list_all = timm.list_models
        timm.list_models = self.list_models

    def list_models(self, filter="", module="", *args, **kwargs) -> list[str]:  # names as in timm
        if isinstance(module, list):  # the families that have forward_intermediates: ours has it too
            module = [*module, FAMILY]
        found = self.list_all(filter, module, *args, **kwargs)
        return [name for name in found if name.split(".")[0] in self.names]

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = metafunc.definition.own_markers
        for i, mark in enumerate(marks):
            if mark.name == "parametrize" and mark.args[0] == "model_name" and metafunc.definition.name in GENERAL:
                marks[i] = pytest.mark.parametrize("model_name", self.of_three_channels).mark

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        def is_ours(item: pytest.Item) -> bool:
            params = getattr(item, "callspec", None)
            return params is not None and str(params.params.get("model_name")).split(".")[0] in self.names

        config.hook.pytest_deselected(items=[item for item in items if not is_ours(item)])
        items[:] = [item for item in items if is_ours(item)]


def download(folder: Path) -> Path:
    """The source distribution of the installed timm, by pip."""
    command = ["pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", f"timm=={timm.__version__}"]
    subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True)
    return next(folder.glob("timm-*.tar.gz"))


def extract(sdist: Path, folder: Path) -> Path:
    """The test file alone, beside a pytest.ini that knows its markers."""
    wanted = f"timm-{timm.__version__}/tests/test_models.py"
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        if wanted not in names:
            raise SystemExit(f"--sdist: expected a source distribution with {wanted}, got {sdist} with {names[:1]}")
        archive.extract(wanted, folder, filter="data")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {marker}\n" for marker in MARKERS))
    return folder / wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; all of the family if absent")
    parser.add_argument("--sdist", type=Path, help="timm's source distribution, already downloaded")
    own, pytest_args = sys.argv[1:], []
    if "--" in own:
        own, pytest_args = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    known = timm.list_models(module=FAMILY)
    if unknown := set(args.names) - set(known):
        raise SystemExit(f"names: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tests = extract(args.sdist or download(folder), folder)
        fixed = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "-p", "no:cacheprovider", "-W", "ignore"]
        return pytest.main([*fixed, str(tests), *pytest_args], plugins=[OurModels(args.names or known)])


if __name__ == "__main__":
    sys.exit(main())

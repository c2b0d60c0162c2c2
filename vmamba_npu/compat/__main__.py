"""Run a program with mamba_ssm and causal_conv1d served: ``python -m vmamba_npu.compat [--override] script.py ...``."""

import argparse
import runpy
import sys
from pathlib import Path

from . import install


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vmamba_npu.compat",
        usage="%(prog)s [--override] (script.py | -m module) [arguments of the program ...]",
        description="Run a program in which `import mamba_ssm` and `import causal_conv1d` resolve to vmamba_npu.",
        allow_abbrev=False,
    )
    parser.add_argument("--override", action="store_true", help="serve the names although the originals are installed")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, not a file")
    parser.add_argument("program", help="path of a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")
    return parser


def main() -> None:
    """Install the names, then run the program as `python` would."""
    parser = _parser()
    given = parser.parse_args()
    if not given.module and not Path(given.program).exists():
        parser.error(f"program: no file {given.program}")
    install(given.override)
    sys.argv = [given.program, *given.arguments]
    if given.module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.program).resolve().parent)
        runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()

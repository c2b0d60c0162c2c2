"""Around Hydra: where the configs are, names of output directories, one process that logs, and short error messages."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

import vmamba_npu

from ..backends import BackendUnavailable
from ..data import CorruptImage
from .refusals import Refused
from .schema import unknown_key
from .step import NonFinite

TRACE = "HYDRA_FULL_ERROR"  # Hydra's own switch: 1 shows the trace of every error
PACKAGE = Path(vmamba_npu.__file__).parent


def shared_folder(name: str) -> Path:
    """A folder of the project: inside an installed package, else beside the package in a checkout.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    for folder in (PACKAGE / name, PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name}: no such folder in {PACKAGE} or beside it; the installation is not complete")


def run_dir(resume: str | None, dated: str) -> str:
    """Output directory: that of the run to go on with; under torchrun one for all processes, by the name of the job."""
    if resume and resume != "auto":
        return resume
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"outputs/torchrun/{job}" if job else dated


def register_resolvers() -> None:
    """Make `${run_dir:resume,dated}` known to configs."""
    OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)


def is_first() -> bool:
    """True in the one process of those that torchrun started which speaks; and without torchrun."""
    return int(os.environ.get("RANK", 0)) == 0


def output_directory() -> Path:
    """Absolute output directory of the job."""
    return Path(HydraConfig.get().runtime.output_dir)


def run(task: Callable[[DictConfig], object], name: str) -> None:
    """Run a task with a config and the overrides of the command line; errors of the user end with code 1."""
    register_resolvers()
    argv, wanted = list(sys.argv), os.environ.get(TRACE)
    if not is_first():  # one process keeps the log and Hydra's folder
        sys.argv += ["hydra/job_logging=none", "hydra.output_subdir=null"]
    os.environ[TRACE] = "1"  # errors come here, to be told in one way
    try:
        hydra.main(version_base="1.3", config_path=str(shared_folder("configs")), config_name=name)(task)()
    except Exception as error:
        message = _message(error)
        if wanted == "1" or message is None:
            raise
        print(f"{message}\n\n{TRACE}=1 shows where this came from; --help shows the options.", file=sys.stderr)
        sys.exit(1)
    finally:
        sys.argv = argv
        if wanted is None:
            del os.environ[TRACE]
        else:
            os.environ[TRACE] = wanted


def _message(error: BaseException) -> str | None:
    """What to tell about an error of the user; None for an error of ours."""
    if isinstance(error, Refused | BackendUnavailable | NonFinite | CorruptImage):
        return str(error)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _composition(error)
    return None


def _composition(error: BaseException) -> str:
    text, cause = str(error), error.__cause__
    parent = getattr(cause, "parent_node", None)
    if isinstance(cause, ConfigKeyError | AttributeError) and parent is not None:
        full = getattr(cause, "full_key", None) or getattr(cause, "key", "")
        choices = sorted(str(key) for key in parent if key not in ("hydra", "_target_"))
        return f"{unknown_key(str(full), choices)}\nA new key is added with +{full}=VALUE."
    return f"{text}\n{cause}" if isinstance(cause, OmegaConfBaseException) else text

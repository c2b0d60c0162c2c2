"""Vision-Mamba2 and Mamba-2 layers for Ascend NPUs, NVIDIA GPUs and CPUs."""

import os as _os
import sys as _sys
from pathlib import Path as _Path


def _import_torch() -> None:
    """Import torch without its autoload of device plugins, which makes ``import torch`` fail where torch_npu is broken.

    Where an Ascend driver is present the plugin is then loaded as the autoload would have done; a plugin that fails
    is reported by ``python -m vmamba_npu.info``, not here.
    """
    if "torch" in _sys.modules:
        return
    key = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    wanted = _os.environ.get(key)
    _os.environ[key] = "0"
    try:
        import torch  # noqa: F401
    finally:
        if wanted is None:
            del _os.environ[key]
        else:
            _os.environ[key] = wanted
    if wanted != "0" and _Path("/dev/davinci_manager").exists():
        from .backends.probes import torch_npu

        torch_npu()


_import_torch()

from . import backends, ops  # noqa: E402  (registers the operators)
from .backends import BackendUnavailable, use_backend  # noqa: E402
from .models import VisionMamba2  # noqa: E402  (registers the timm models)

__version__ = "0.1.0"
__all__ = ["BackendUnavailable", "VisionMamba2", "__version__", "backends", "ops", "use_backend"]


def __getattr__(name: str):  # `compat` is imported by those who use it, and not by the rest
    if name == "compat":
        from importlib import import_module

        return import_module(f"{__name__}.compat")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

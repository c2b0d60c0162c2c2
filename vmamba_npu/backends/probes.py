"""What this machine offers: each function tries a technology once and says what is missing and how to get it."""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


def always() -> str | None:
    """For implementations that need nothing but torch."""
    return None


@cache
def torch_npu() -> str | None:
    """None if torch_npu imports and sees an NPU, else what is missing."""
    try:
        version("torch-npu")
    except PackageNotFoundError:
        return "torch_npu is not installed (on an Ascend machine: pip install torch_npu of your torch's version)"
    try:
        import_module("torch_npu")
        import torch

        if torch.get_device_module("npu").is_available():
            return None
        return "torch_npu imports but sees no NPU (check `npu-smi info` and the driver)"
    except Exception as error:  # a plugin without its toolkit fails in many ways; each of them means "absent"
        return f"torch_npu is installed but does not start: {error} (source CANN's set_env.sh, or uninstall torch_npu)"

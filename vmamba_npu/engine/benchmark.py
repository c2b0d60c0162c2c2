"""Time of a model's forward: warmed up, events on devices, percentiles, one line."""

import sys
import time
from typing import Any

import torch
import torch.nn as nn

from .step import Precision


@torch.no_grad()
def time_forward(
    model: nn.Module, shape: tuple[int, ...], device: torch.device, precision: Precision, warmup: int = 10,
    repeat: int = 30,
) -> dict[str, Any]:  # fmt: skip
    """Time the forward of a model in eval mode on random images that are on the device before the first call.

    Args:
        model: the model, on `device`.
        shape: [B, C, H, W] of the images.
        device, precision: what it runs on.
        warmup, repeat: calls before the timed ones, and timed calls.

    Returns:
        ms_p50, ms_p90, ms_mean, ms_min, ms_max, images_per_second (of the median), finite, and peak_memory_mb: of the
        device, or of the whole process on a CPU.
    """
    for name, value, least in (("warmup", warmup, 0), ("repeat", repeat, 1), ("batch_size", shape[0], 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    accelerator = None if device.type == "cpu" else getattr(torch, device.type)
    if accelerator is not None:
        accelerator.reset_peak_memory_stats(device)
    with precision.autocast():
        for _ in range(warmup):
            model(x)
        times = sorted(_timed(model, x, repeat) if accelerator is None else _timed_on(accelerator, model, x, repeat))
        finite = bool(model(x).isfinite().all())
    return {
        "ms_p50": _at(times, 0.5), "ms_p90": _at(times, 0.9), "ms_mean": round(sum(times) / len(times), 4),
        "ms_min": round(times[0], 4), "ms_max": round(times[-1], 4),
        "images_per_second": round(shape[0] / times[int(0.5 * (len(times) - 1))] * 1e3, 1),
        "peak_memory_mb": _peak_memory(accelerator, device), "finite": finite,
    }  # fmt: skip


def _at(times: list[float], share: float) -> float:
    return round(times[int(share * (len(times) - 1))], 4)


def _timed(model: nn.Module, x: torch.Tensor, repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        began = time.perf_counter_ns()
        model(x)
        times.append((time.perf_counter_ns() - began) / 1e6)
    return times


def _timed_on(accelerator: Any, model: nn.Module, x: torch.Tensor, repeat: int) -> list[float]:
    pairs = [[accelerator.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    accelerator.synchronize()
    for begin, end in pairs:
        begin.record()
        model(x)
        end.record()
    accelerator.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def _peak_memory(accelerator: Any, device: torch.device) -> float | None:
    if accelerator is not None:
        return round(accelerator.max_memory_allocated(device) / 2**20, 1)
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)

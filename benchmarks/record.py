"""Timing of alternatives side by side in one process, and results with machine and versions."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

import vmamba_npu

RESULTS = Path(__file__).parent / "results"


def milliseconds(
    alternatives: dict[str, Callable[[], object]], rounds: int = 15, seconds: float = 0.05
) -> dict[str, float]:
    """Median over rounds of the mean time of a call. In each round every alternative runs for about `seconds`, so that
    all see the same state of the machine."""
    repeats = {}
    for name, call in alternatives.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, round(seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds):
        for name, call in alternatives.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name] * 1e3)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def environment() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS, check=False)
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vmamba_npu": vmamba_npu.__version__,
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def save(name: str, rows: list[dict], protocol: str) -> Path:
    """Write benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"protocol": protocol, "environment": environment(), "rows": rows}, indent=1) + "\n")
    return path

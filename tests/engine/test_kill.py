"""A process killed by SIGKILL, resumed, ends where one that was left alone does."""

import subprocess
import sys
from pathlib import Path

import torch

from tests.engine.kill_and_resume import differences

SCRIPT = Path(__file__).with_name("kill_and_resume.py")


def test_killed_run_ends_as_one_left_alone():
    done = subprocess.run([sys.executable, str(SCRIPT), "--kills", "1"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed after update" in done.stdout and "equal bit for bit" in done.stdout


def test_comparison_sees_a_difference():
    one = {"a": [torch.ones(2), {"b": 1}], "c": None}
    assert differences(one, {"a": [torch.ones(2), {"b": 1}], "c": None}) == []
    other = {"a": [torch.tensor([1.0, 1.0 + 1e-7]), {"b": 2}], "c": 0}
    assert differences(one, other) == [".a.0", ".a.1.b", ".c"]
    assert differences(one, {"a": one["a"]}) == [""]

"""`python -m vmamba_npu.info`: the table says what the registry says, and why not."""

import subprocess
import sys

import pytest
import torch

from vmamba_npu import backends, info
from vmamba_npu.backends import Implementation, operators, registry


def rows(text: str, op: str) -> dict[str, str]:
    """backend -> the rest of its row, for an operator on the CPU."""
    found = {}
    for line in text.splitlines():
        device, name, backend, *rest = (*line.split(maxsplit=3), "", "", "")[:4]
        if (device, name) == ("cpu", op):
            found[backend] = rest[0]
    return found


def test_every_operator_and_backend_has_a_row(capsys):
    info.main([])
    text = capsys.readouterr().out
    assert operators()
    for op, table in operators().items():
        assert rows(text, op).keys() == table.keys()


def test_one_operator_alone(capsys):
    info.main(["ssd"])
    text = capsys.readouterr().out
    assert rows(text, "ssd") and not any(rows(text, op) for op in operators() if op != "ssd")


def test_reasons_dtypes_and_what_auto_picks(capsys, monkeypatch):
    def entry(backend, devices=None, dtypes=(torch.float32,), missing=None):
        return Implementation("planted", backend, "no.such.module", devices, dtypes, lambda: missing)

    monkeypatch.setitem(registry._TABLE, "planted", {
        impl.backend: impl
        for impl in (
            entry("torch", dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)),
            entry("fast"),
            entry("elsewhere", devices=("npu",)),
            entry("broken", missing="its driver does not start (run: start-driver)"),
        )
    })  # fmt: skip
    monkeypatch.setitem(registry.AUTO, "cpu", ("broken", "fast"))
    info.main(["planted"])
    found = rows(capsys.readouterr().out, "planted")
    assert found["torch"].split() == ["float64,", "bfloat16,", "float16", "every", "float", "dtype"]
    assert found["fast"].split() == ["float32", "float32"]
    assert found["elsewhere"].split(maxsplit=1) == ["-", "no: it serves npu tensors, got cpu"]
    # not the reason of a dtype that it never serves
    assert found["broken"].split(maxsplit=1) == ["-", "no: its driver does not start (run: start-driver)"]


def test_devices_that_are_absent_say_why(capsys, monkeypatch):
    monkeypatch.setattr(info.probes, "torch_npu", lambda: "no plugin (pip install one)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    info.main([])
    text = capsys.readouterr().out
    assert "npu   no: no plugin (pip install one)" in text
    assert "cuda  no: " in text
    assert backends.explain("ssd", torch.empty(1)).keys() == rows(text, "ssd").keys()


@pytest.mark.parametrize("name", ["vmamba2_tiny_npu", "vmamba2_tiny"])
def test_stages_of_tiny(capsys, name):
    info.main([f"model={name}"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "38,698,268 parameters" in lines["vmamba2_tiny_npu"]
    heads = [e // 64 for e in (192, 384, 768, 1536)]
    table = zip((96, 192, 384, 768), (2, 2, 6, 2), (323_468, 1_336_792, 15_257_616, 21_005_152), heads, strict=True)
    for i, (width, blocks, parameters, h) in enumerate(table):
        side = 56 >> i
        chunk = 64 if i == 3 else 128
        ssd = f"[{side * side}, {4 * h}, 64, 128], {4 << i}, {chunk}"
        assert (
            lines[f"stages.{i}"].split()
            == f"stages.{i} [{side}, {side}, {width}] {blocks} {parameters:,} {ssd}".split()
        )


def test_image_size_changes_the_maps(capsys):
    info.main(["model=vmamba2_tiny_npu", "--img-size", "100"])
    assert "[25, 25, 96]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["sdd"], "ssd"), (["model=vmamba2_teeny"], "vmamba2_tiny_npu"), (["--img-size", "0"], "at least 1")],
)
def test_a_typo_lists_the_choices(capsys, arguments, named):
    with pytest.raises(SystemExit) as stop:
        info.main(arguments)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_as_a_program():
    done = subprocess.run([sys.executable, "-m", "vmamba_npu.info", "ssd"], capture_output=True, text=True, check=True)
    assert rows(done.stdout, "ssd").keys() == operators()["ssd"].keys()
    assert done.stderr == ""

"""The registry: who serves a call, what `auto` means, what a refusal says; and that the measures of error can fail."""

import math
import sys
import threading
from types import ModuleType

import pytest
import torch

from vmamba_npu.backends import (
    BackendUnavailable,
    Implementation,
    choose,
    explain,
    known,
    operators,
    register,
    registry,
    resolve,
    use_backend,
)
from vmamba_npu.ops import ssd
from vmamba_npu.testing import OUTPUTS, assert_within, error_ratio, serving
from vmamba_npu.testing.ssd import draw

X64, X32 = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float32)


@pytest.fixture
def table(monkeypatch):
    """A copy of the table, dropped after the test."""
    monkeypatch.setattr(registry, "_TABLE", operators())


@pytest.fixture
def toy(table):
    """An operator with two backends that serve, one that is absent and one with a limit."""
    every = (torch.float64, torch.float32)
    register(
        Implementation("toy", "reference", "vmamba_npu.ops.ssd.reference", None, every, lambda: None),
        Implementation("toy", "torch", "vmamba_npu.ops.ssd.torch", None, every, lambda: None),
        Implementation("toy", "absent", "no.such.module", None, every, lambda: "no driver; install one"),
        Implementation("toy", "npu_only", "no.such.module", ("npu",), every, lambda: "not asked on a CPU"),
        Implementation("toy", "narrow", "no.such.module", None, (torch.float32,), lambda: None, limit),
    )
    return "toy"


def limit(x, size=0):
    return f"size: at most 4, got {size}" if size > 4 else None


class Recorder(ModuleType):
    """A backend of ssd that counts its calls and answers with those of the reference."""

    def __init__(self):
        super().__init__("recorder")
        self.forwards = self.backwards = 0

    def forward(self, *call):
        self.forwards += 1
        return resolve("ssd", "reference", *call).forward(*call)

    def backward(self, dy, dfinal, *call):
        self.backwards += 1
        return resolve("ssd", "reference", *call).backward(dy, dfinal, *call)


@pytest.fixture
def recorder(table, monkeypatch):
    module = Recorder()
    monkeypatch.setitem(sys.modules, "recorder", module)
    register(Implementation("ssd", "recorder", "recorder", None, (torch.float64,), lambda: None))
    return module


def test_auto_is_torch_on_a_cpu(toy):
    assert choose("toy", "auto", X64) == "torch"
    assert resolve("toy", "auto", X64).__name__ == "vmamba_npu.ops.ssd.torch"


def test_auto_takes_the_first_of_the_devices_order_that_serves(toy, monkeypatch):
    monkeypatch.setitem(registry.AUTO, "cpu", ("missing_entry", "absent", "narrow", "reference"))
    assert choose("toy", "auto", X64) == "reference"  # narrow does not take float64
    assert choose("toy", "auto", X32) == "narrow"
    assert choose("toy", "auto", X32, 5) == "reference"  # narrow refuses this size
    monkeypatch.setitem(registry.AUTO, "cpu", ("absent",))
    assert choose("toy", "auto", X64) == "torch"


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_a_named_backend_keeps_its_name(toy, name):
    assert choose("toy", name, X64) == name
    with use_backend("reference"):
        assert choose("toy", name, X64) == name


def test_explain_gives_the_reason_of_each(toy):
    assert explain("toy", X64) == {
        "reference": None,
        "torch": None,
        "absent": "no driver; install one",
        "npu_only": "it serves npu tensors, got cpu",
        "narrow": "it serves torch.float32, got torch.float64",
    }
    assert explain("toy", X32)["narrow"] is None
    assert explain("toy", X32, 9)["narrow"] == "size: at most 4, got 9"


def test_explain_of_an_unknown_operator_names_those_there_are(toy):
    with pytest.raises(ValueError, match=r"op: .*ssd.*toy.*'nothing'"):
        explain("nothing", X64)


@pytest.mark.parametrize(
    ("backend", "x", "size", "reason"),
    [
        ("absent", X64, 0, "no driver; install one"),
        ("npu_only", X64, 0, "it serves npu tensors, got cpu"),
        ("narrow", X64, 0, "it serves torch.float32, got torch.float64"),
        ("narrow", X32, 9, "size: at most 4, got 9"),
    ],
)
def test_refusal_names_operator_backend_reason_and_who_serves(toy, backend, x, size, reason):
    for ask in (choose, resolve):
        with pytest.raises(BackendUnavailable) as refused:
            ask("toy", backend, x, size)
        message = str(refused.value)
        assert message.startswith("toy: ") and f"'{backend}'" in message and reason in message
        assert message.endswith("Serving it here: reference, torch.")


def test_refusal_says_when_nobody_serves(toy):
    with pytest.raises(BackendUnavailable, match=r"Serving it here: none\."):
        choose("toy", "torch", X64.half())


def test_auto_that_nobody_serves_is_torch(toy):
    """Which then fails by itself; no other name is picked."""
    assert choose("toy", "auto", X64.half()) == "torch"


@pytest.mark.parametrize("name", ["cuda", "Torch", "", "torch "])
def test_unknown_backend_is_an_error_that_lists_the_known(toy, name):
    with pytest.raises(ValueError, match=r"backend: .*auto, reference, torch, absent") as unknown:
        choose("toy", name, X64)
    assert repr(name) in str(unknown.value) and not isinstance(unknown.value, BackendUnavailable)
    with pytest.raises(ValueError, match=r"backend: .*auto, reference, torch") as unknown, use_backend(name):
        pytest.fail("the block must not run")
    assert repr(name) in str(unknown.value)


def test_known_names_have_no_doubles(toy):
    assert known()[0] == "auto" and len(set(known())) == len(known())
    assert {"reference", "torch", "absent", "npu_only", "narrow"} < set(known())


def test_operators_hands_out_a_copy():
    operators()["ssd"].clear()
    operators().clear()
    assert {"reference", "torch"} <= set(operators()["ssd"])


def test_use_backend_nests_and_ends(toy):
    assert choose("toy", "auto", X64) == "torch"
    with use_backend("reference"):
        assert choose("toy", "auto", X64) == "reference"
        with use_backend("auto"):
            assert choose("toy", "auto", X64) == "torch"
        assert choose("toy", "auto", X64) == "reference"
    assert choose("toy", "auto", X64) == "torch"


def test_use_backend_ends_with_an_exception_too(toy):
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert choose("toy", "auto", X64) == "torch"


def test_use_backend_is_the_setting_of_one_thread(toy):
    seen = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(choose("toy", "auto", X64)))
        thread.start()
        thread.join()
    assert seen == ["torch"]


def test_use_backend_that_cannot_serve_is_refused_at_the_call(toy):
    with use_backend("absent"), pytest.raises(BackendUnavailable, match=r"toy: backend 'absent'.*no driver"):
        choose("toy", "auto", X64)


def test_backward_outside_the_block_is_by_the_backend_of_the_forward(recorder):
    call = draw(L=5)
    with use_backend("recorder"):
        y, _ = ssd(**call)
    y.sum().backward()
    assert (recorder.forwards, recorder.backwards) == (1, 1)
    plain = draw(L=5)
    y, _ = ssd(**plain)
    with use_backend("recorder"):
        y.sum().backward()
    assert (recorder.forwards, recorder.backwards) == (1, 1)
    torch.testing.assert_close(call["x"].grad, plain["x"].grad)


def test_an_error_inside_a_backend_comes_out(recorder, monkeypatch):
    def fail(*call):
        raise RuntimeError("kernel launch failed")

    monkeypatch.setattr(recorder, "forward", fail)
    with pytest.raises(RuntimeError, match="kernel launch failed"):
        ssd(**draw(), backend="recorder")


def test_serving_agrees_with_explain(toy):
    for op in operators():
        for dtype in (torch.float64, torch.float32, torch.float16, torch.int32):
            reasons = explain(op, torch.empty(1, dtype=dtype))
            assert serving(op, dtype) == [name for name, reason in reasons.items() if reason is None], op


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_fail_every_gate(bad):
    actual, expected = torch.ones(5), torch.ones(5, dtype=torch.float64)
    assert error_ratio(actual, expected) == 0
    actual[3] = bad
    assert not error_ratio(actual, expected) <= 1e30
    with pytest.raises(AssertionError, match="y: error ratio"):
        assert_within("y", actual, expected, OUTPUTS[torch.bfloat16])


def test_error_ratio_is_relative_and_rounds_the_expected_value():
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert math.isclose(error_ratio(torch.tensor([3.0, 4.5]), expected), 0.1)
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert error_ratio(third.bfloat16(), third) == 0
    assert error_ratio(torch.zeros(2), torch.zeros(2)) == 0
    assert error_ratio(torch.full((2,), 1e-3), torch.zeros(2)) > 1


def test_assert_within_fails_on_one_bad_element_and_on_shapes():
    expected = torch.full((10_000,), 1e-3, dtype=torch.float64)
    expected[0] = 1000.0
    actual = expected.float()
    assert_within("y", actual, expected, OUTPUTS[torch.float32])
    even = torch.ones(1_000_000, dtype=torch.float64)
    spike = even.float()
    spike[17] += 0.01
    assert error_ratio(spike, even) <= OUTPUTS[torch.float32].ratio
    with pytest.raises(AssertionError, match="y: elementwise"):
        assert_within("y", spike, even, OUTPUTS[torch.float32])
    with pytest.raises(AssertionError, match="y: shape"):
        assert_within("y", actual[:, None], expected, OUTPUTS[torch.float32])

"""Configs against signatures: types, missing values, unknown keys."""

from typing import Any

import pytest

from vmamba_npu.engine.refusals import Refused, need, one_of, refusing
from vmamba_npu.engine.schema import BadConfig, check, fits

FITS = [
    (int, 3, True), (int, True, False), (int, 3.0, False), (int, "3", False), (int, None, False),
    (float, 3, True), (float, 2.5, True), (float, False, False), (float, "x", False),
    (str, "x", True), (str, 3, False), (bool, True, True), (bool, 1, False),
    (int | None, None, True), (int | None, 3, True), (int | None, "x", False),
    (list[int], [1, 2], True), (list[int], [1, 2.5], False), (list[int], 1, False), (list[float], [1, 2.5], True),
    (int | list[int] | None, 28, True), (int | list[int] | None, [28, 32], True), (int | list[int] | None, "28", False),
    (tuple[int, int], [1, 2], True), (tuple[int, int], [1], False), (tuple[float, ...], [1.0], True),
    (dict[str, Any], {"a": 1}, True), (dict[str, Any], [1], False), (Any, b"x", True),
    (ValueError, {"_target_": "builtins.ValueError"}, True), (ValueError, "x", False), (ValueError | None, None, True),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "expected"), FITS, ids=str)
def test_fits(kind, value, expected):
    assert fits(kind, value) is expected


def node(**values: Any) -> dict[str, Any]:
    return {"a": {"_target_": "vmamba_npu.engine.model.Model", **values}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            node(name="x", pretraind=True),
            r"a.pretraind: no such key; did you mean pretrained\? Choices: name, pretrained",
        ),
        (node(name=3), "a.name: expected str, got 3"),
        (node(name="x", pretrained="yes"), "a.pretrained: expected bool, got 'yes'"),
        (node(pretrained=True), "a.name: it needs a value; give one with a.name=VALUE"),
        (node(name="???"), "a.name: it needs a value"),
        ({"list": [node(name="x"), node(name=None)]}, r"list.1.a.name: expected str, got None"),
        (
            {"b": {"_target_": "vmamba_npu.engine.optim.Optim", "opt": "sgd", "lr": 1, "layer_decay": "x"}},
            r"float \| None|Optional\[float\]",  # the second on Python 3.10
        ),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(BadConfig, match=message):
        check(config)


def test_good_configs():
    check(node(name="x", kwargs={"depths": [1, 2]}))
    check(node(_partial_=True))
    check({"plain": {"anything": [1, {"b": None}]}})


def test_one_of_lists_few_choices_and_the_nearest_of_many():
    assert one_of("it", "b", ["a", "b"]) == "b"
    with pytest.raises(ValueError, match=r"it: expected one of a, b, got 'c'"):
        one_of("it", "c", ["a", "b"])
    many = [f"model{i}" for i in range(100)]
    with pytest.raises(ValueError, match=r"'modle7' is none of the 100 known names; nearest: model7"):
        one_of("it", "modle7", many)


def test_refusing_tells_the_first_cause():
    with pytest.raises(Refused, match=r"^inner$"), refusing():
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error
    with pytest.raises(Refused, match=r"^TypeError: bad argument$"), refusing():
        raise TypeError("bad argument")


def test_absent_packages_are_named_with_the_command_that_installs_them():
    need("train", "torch")
    with pytest.raises(ModuleNotFoundError, match=r"not installed: no_such_package; pip install 'vmamba-npu\[train\]'"):
        need("train", "torch", "no_such_package")

"""Strict configs: every value that becomes an argument must be known there, and have the argument's type."""

import inspect
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object

HYDRAS = {"_target_", "_partial_", "_convert_", "_recursive_"}
MISSING = "???"


class BadConfig(ValueError):
    """A config with an unknown key, a value of a wrong type, or none where one is needed."""


def check(node: Any, path: str = "") -> None:
    """Check each part of a plain config that has a `_target_` against the signature of what it names.

    Raises:
        BadConfig: the message names the key, what was expected and what came.
    """
    if isinstance(node, list):
        for i, value in enumerate(node):
            check(value, f"{path}.{i}")
    if not isinstance(node, Mapping):
        return
    if "_target_" in node:
        _check_call(node, path)
    for key, value in node.items():
        check(value, f"{path}.{key}" if path else str(key))


def check_keys(given: Collection[str], known: Collection[str], path: str = "") -> None:
    """Refuse keys that are not known.

    Raises:
        BadConfig: the message names the key and lists the choices.
    """
    for key in given:
        if key not in known:
            raise BadConfig(unknown_key(f"{path}.{key}" if path else key, known))


def unknown_key(path: str, choices: Collection[str]) -> str:
    """Message about a key that does not exist."""
    near = get_close_matches(path.rpartition(".")[2], choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{path}: no such key{hint}" + (f" Choices: {', '.join(choices)}" if choices else "")


def _check_call(node: Mapping[str, Any], path: str) -> None:
    target = get_object(node["_target_"])
    types = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    parameters = inspect.signature(target).parameters
    check_keys([key for key in node if key not in HYDRAS], list(parameters), path)
    for key, parameter in parameters.items():
        absent = parameter.default is parameter.empty and key not in node and not node.get("_partial_")
        if absent or node.get(key) == MISSING:
            raise BadConfig(f"{path}.{key}: it needs a value; give one with {path}.{key}=VALUE")
        kind = types.get(key, Any)
        if key in node and not fits(kind, node[key]):
            name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise BadConfig(f"{path}.{key}: expected {name}, got {node[key]!r}")


def fits(kind: Any, value: Any) -> bool:
    """True if a plain value is of a type, as written in a signature; what a `_target_` will make fits any class."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(part, value) for part in parts)
    if kind in (None, NoneType):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple):
        if not isinstance(value, list):
            return False
        kinds = parts if origin is tuple and Ellipsis not in parts else [parts[0]] * len(value)
        return len(kinds) == len(value) and all(map(fits, kinds, value))
    if (origin or kind) in (dict, Mapping):
        return isinstance(value, Mapping)
    if kind in (str, bool):
        return isinstance(value, kind)
    return isinstance(value, Mapping) and "_target_" in value

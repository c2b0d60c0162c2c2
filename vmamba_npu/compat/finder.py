"""The import hook behind `install`: modules named mamba_ssm and causal_conv1d, filled from the table of names."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .names import MODULES, OBJECTS, VERSIONS, refusal

ORIGIN = "vmamba_npu.compat"


def _children(module: str) -> list[str]:
    return [m for m in MODULES if m.rpartition(".")[0] == module]


def _unknown(dotted: str) -> str:
    return refusal(dotted) or f"{dotted} is not a name that vmamba_npu.compat knows; docs/drop_in.md lists those it has"


def _missing_attribute(module: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        dotted = f"{module}.{name}"
        if (name.startswith("_") and refusal(dotted) is None) or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")  # probing by tools
        raise ImportError(_unknown(dotted), name=dotted)  # callers choose their own slow path on ImportError

    return __getattr__


class AliasFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of the packages in `packages`."""

    def __init__(self) -> None:
        self.packages: list[str] = []

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(_unknown(fullname), name=fullname)
        return ModuleSpec(fullname, self, origin=ORIGIN, is_package=bool(_children(fullname)))

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"{name}, as {ORIGIN} offers it; docs/drop_in.md of vmamba_npu lists what is covered."
        if name in VERSIONS:
            vars(module)["__version__"] = VERSIONS[name]
        found = {dotted: at for dotted, at in OBJECTS.items() if dotted.rpartition(".")[0] == name}
        for dotted, (target, attribute) in found.items():
            setattr(module, dotted.rpartition(".")[2], getattr(importlib.import_module(target), attribute))
        vars(module)["__all__"] = [dotted.rpartition(".")[2] for dotted in found]
        vars(module)["__getattr__"] = _missing_attribute(name)
        for child in _children(name):
            importlib.import_module(child)  # reachable by attribute access too


_FINDER = AliasFinder()
_SAID: dict[str, str] = {}


def _original(package: str) -> str | None:
    """Where another package of this name is; None if there is none (a bare folder of that name is none)."""
    module = sys.modules.get(package)
    if module is not None and module.__spec__ is None:
        return "a module made by this program"
    spec = importlib.util.find_spec(package)
    return None if spec is None else spec.origin


def _say(decisions: dict[str, str]) -> None:
    """One line on the standard error stream, of what is new."""
    news = [text for package, text in decisions.items() if _SAID.get(package) != text]
    _SAID.update(decisions)
    if news:
        print(f"vmamba_npu.compat: {'; '.join(news)}", file=sys.stderr)


def install(override: bool = False) -> list[str]:
    """Make ``import mamba_ssm`` and ``import causal_conv1d``, with all below them, resolve to this package.

    Each of the two is served unless it is installed itself. What was decided is said in one line on the standard error
    stream; a second call changes nothing and says nothing. It lasts as long as the process.

    Args:
        override: serve a name although its original is installed. The original must not have been imported yet.

    Returns:
        The packages that resolve to vmamba_npu from now on.

    Raises:
        RuntimeError: an original that should be overridden has been imported already.
    """
    originals = {package: _original(package) for package in VERSIONS if package not in _FINDER.packages}
    for package, place in originals.items():
        if place is not None and override and package in sys.modules:
            raise RuntimeError(
                f"override: {package} has been imported already ({place}); "
                "call vmamba_npu.compat.install(override=True) before anything imports it"
            )
    decisions = {}
    for package, place in originals.items():
        if place is None or override:
            _FINDER.packages.append(package)
            sys.modules.pop(package, None)  # a bare folder of that name, if any
            decisions[package] = f"{package} is served by vmamba_npu"
        else:
            decisions[package] = f"{package} stays the installed one, {place} (override replaces it)"
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)  # ahead of the originals, for override
    _say(decisions)
    return list(_FINDER.packages)

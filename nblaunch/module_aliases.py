"""Modules that only have another name here: ``nblaunch.utils.operations`` is ``nblaunch.utils``.

Scripts written for Hugging Face Accelerate import from the files that its names happen to lie in. Those modules have
every public name of the one that they stand for. They come from a finder at the end of Python's list, which is asked
for nothing that another finder has; imports of nblaunch, and of anything else, take as long as without it.
The same finder says why a name is not there, which Python asks it for as ``from nblaunch import name`` fails.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nblaunch.not_offered import explanation

_UTILS = (
    "constants",
    "dataclasses",
    "deepspeed",
    "environment",
    "fsdp_utils",
    "imports",
    "launch",
    "memory",
    "modeling",
    "operations",
    "other",
    "random",
    "torch_xla",
    "versions",
)

ALIASES = {
    "nblaunch.big_modeling": "nblaunch",
    "nblaunch.checkpointing": "nblaunch.utils",
    "nblaunch.memory_utils": "nblaunch.utils",
    **{f"nblaunch.utils.{name}": "nblaunch.utils" for name in _UTILS},
}
"""Module -> the one whose names it has."""


def install() -> None:
    """Have Python find these modules. A second call does nothing."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def attributes_of(package: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package``, under which its aliases need no import of their own."""

    def find(name: str) -> Any:
        if f"{package}.{name}" in ALIASES:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(without(package, name))

    return find


def without(module: str, name: str) -> str:
    """The text of an error: ``module`` has no ``name``, and why where there is a reason to tell."""
    return explanation(name) or f"module {module!r} has no attribute {name!r}"


class _Finder:
    """Asked last for what is to be imported; knows the aliases, and the names that are left out."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("nblaunch."):
            return None
        if fullname in ALIASES:
            # As a package, for which Python comes here with the names that it lacks.
            return ModuleSpec(fullname, _Loader(ALIASES[fullname]), is_package=True)
        reason = explanation(fullname.rpartition(".")[2])
        if reason:
            raise ImportError(reason, name=fullname)
        return None


class _Loader(Loader):
    """Makes a module whose names are those of ``source``."""

    def __init__(self, source: str) -> None:
        self.source = source

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make a plain module."""

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(self.source)
        names = source.__all__
        module.__doc__ = f"Another name of ``{self.source}``."
        module.__dict__.update(__all__=names, __dir__=lambda: names, __getattr__=partial(getattr, source))

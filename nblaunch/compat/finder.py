"""The import hook for module names of Hugging Face Accelerate, by the table in :mod:`nblaunch.compat.names`.

``nblaunch.utils.operations`` is a module without a file. Its attributes are imported from their homes at their first
use. Names of :mod:`nblaunch.compat.delegated` are found in every module. An unsupported name raises an error that says
what to use instead, as a module and as an attribute.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nblaunch.compat import delegated, systems
from nblaunch.compat.names import HOMES
from nblaunch.compat.unsupported import explanation
from nblaunch.errors import LaunchError


def install() -> None:
    """Add the finder to ``sys.meta_path``. A second call does nothing.

    It is the first finder: a folder of an older version (``nblaunch/utils`` with only compiled files) would otherwise
    be imported as an empty package.
    """
    if not any(_name_of(type(finder)) == _name_of(_Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _name_of(kind: type) -> str:
    # By name, since a module that is imported anew has a new class; in full, since others call theirs _Finder, too.
    return f"{kind.__module__}.{kind.__qualname__}"


def submodules_of(package: str) -> list[str]:
    """Return the modules of the table directly below ``package``, without its name."""
    below = (name.removeprefix(f"{package}.") for name in HOMES if name.startswith(f"{package}."))
    return sorted(name for name in below if "." not in name)


def missing_attribute(module: str, name: str) -> str:
    """Return the error message for a missing ``name`` of ``module``."""
    return explanation(name) or f"module {module!r} has no attribute {name!r}"


class _ForwardingModule(ModuleType):
    """A module whose public names are defined in other modules."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        home = HOMES[module].get(name)
        if home is not None:
            value = getattr(importlib.import_module(home), name)
            self.__dict__[name] = value
            return value
        if f"{module}.{name}" in HOMES:
            return importlib.import_module(f"{module}.{name}")
        if name in delegated.HOMES:
            self.__dict__[name] = delegated.find(name)
            return self.__dict__[name]
        raise AttributeError(missing_attribute(module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported submodule as attribute of its parent, but ``utils.tqdm`` must stay the function.
        if not (isinstance(value, ModuleType) and name in HOMES[self.__name__]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*HOMES[self.__name__], *submodules_of(self.__name__)})

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # cloudpickle handles plain modules only


class _Finder:
    """Finds the modules of the table, and raises an explanation for unsupported modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("nblaunch.") and systems.refusal() is not None:
            raise LaunchError(systems.refusal())  # rather than that some module of Python is missing
        if fullname in HOMES:
            # As packages, because Python then calls the finders for missing submodules, which raise the explanation.
            return ModuleSpec(fullname, _Loader(), is_package=True)
        reason = explanation(fullname.rpartition(".")[2]) if fullname.startswith("nblaunch.") else ""
        if reason:
            raise ImportError(reason, name=fullname)
        return None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ForwardingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = HOMES[module.__name__]
        homes = ", ".join(f"``{home}``" for home in sorted(set(names.values())))
        module.__doc__ = (
            f"Names of ``{module.__name__.replace('nblaunch', 'accelerate', 1)}``; defined in {homes}."
        )
        module.__dict__["__all__"] = sorted(names)

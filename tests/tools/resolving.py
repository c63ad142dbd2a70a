"""Resolve ``import accelerate`` to nblaunch, for libraries that import Accelerate themselves.

    from tests.tools import resolving
    resolving.install()
    from transformers import Trainer        # its Accelerator is nblaunch's

A module ``accelerate.x`` has only the names of ``nblaunch.x``, so a name that nblaunch lacks fails where the library
uses it. The version is the installed Accelerate's, because libraries check it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import Any


def install() -> None:
    """Resolve imports from now on."""
    if "accelerate" in sys.modules:
        raise RuntimeError("Accelerate is imported already: resolve its name first")
    sys.meta_path.insert(0, _Finder())


def _own_name(name: str) -> str:
    return name.replace("accelerate", "nblaunch", 1)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return metadata.version("accelerate")
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(_own_name(self.__name__)), name)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (
            fullname.partition(".")[0] != "accelerate"
            or importlib.util.find_spec(_own_name(fullname)) is None
        ):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="nblaunch", is_package=True)

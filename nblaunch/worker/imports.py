"""Changing a library the moment it is imported, for libraries that the user's function may import first."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], None]


def when_imported(name: str, change: Change) -> None:
    """Call ``change(module)`` now if the module is loaded, otherwise right after it has been. Imports nothing."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, through the other finders, and wraps its loader."""

    def __init__(self, name: str, change: Change) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # before the search, which would come here again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._change)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, with a change to the module once its code has run."""

    def __init__(self, inner: importlib.abc.Loader, change: Change) -> None:
        self._inner = inner
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # as importlib.resources and others expect it
        self._inner.exec_module(module)
        self._change(module)

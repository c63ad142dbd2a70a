"""Classes that claim a module that does not contain them, such as pytest's ``Skipped``, which claims ``builtins``.

cloudpickle copies such a class. The copy in the kernel is a different class, which no ``except`` names, and whose
``super().__init__`` fails. This module instead finds a module that holds the class under its name, as pickle does for
functions without a module.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_HEAP_TYPE = 1 << 9  # made by a class statement; source: Py_TPFLAGS_HEAPTYPE, Include/object.h


def reduction(cls: Any) -> tuple[Any, ...] | None:
    """Return how to pickle a class by its true module; None if it claims that module, or has none."""
    if not isinstance(cls, type) or not cls.__flags__ & _HEAP_TYPE or "." in cls.__qualname__:
        return None
    name = cls.__qualname__
    if cls.__module__ == "__main__" or _holds(sys.modules.get(cls.__module__), name, cls):
        return None
    for module_name, module in tuple(sys.modules.items()):
        if module_name != "__main__" and _holds(module, name, cls):
            return _class_of, (module_name, name)
    return None


def _holds(module: Any, name: str, cls: type) -> bool:
    """Return whether ``module`` has ``cls``, without calling its ``__getattr__``, which may import other modules."""
    return getattr(module, "__dict__", {}).get(name) is cls


def _class_of(module_name: str, name: str) -> Any:
    return getattr(importlib.import_module(module_name), name)

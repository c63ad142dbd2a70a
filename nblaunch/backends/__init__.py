"""Device families: one file each, found by name. See ``base.py`` for what a backend has to say."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from nblaunch.backends.base import Backend


@cache
def discover() -> dict[str, Backend]:
    """Every module of this folder that has a ``BACKEND``, by its name. None of them imports its device library yet."""
    found: dict[str, Backend] = {}
    for module_info in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        backend = getattr(importlib.import_module(module_info.name), "BACKEND", None)
        if backend is not None:
            found[backend.name] = backend
    return found


def names() -> list[str]:
    """What may be given as ``backend=``."""
    return ["auto", *sorted(discover())]


def choose(name: str) -> Backend:
    """The backend called ``name``, or for ``"auto"`` the one that suits this machine best.

    Raises:
        ValueError: no backend has this name; lists those that exist.
        RuntimeError: the backend exists but can't be used on this machine; says why.
    """
    found = discover()
    if name == "auto":
        return max(found.values(), key=lambda backend: backend.affinity())
    if name not in list(found):  # a list: what was given as name need not be hashable
        raise ValueError(f"backend={name!r} is unknown; valid are {', '.join(map(repr, names()))}")
    if found[name].affinity() <= 0:
        raise RuntimeError(f"backend={name!r} can't be used here: {found[name].unavailable_reason()}")
    return found[name]

"""Names of weights without the prefixes that wrappers inside a module add.

    block = torch.compile(block)                  block._orig_mod.0.weight ──> block.0.weight
    block = DistributedDataParallel(block)        block.module.0.weight    ──> block.0.weight

Files and other processes use the names without wrappers. States are therefore read from and loaded into
:func:`without_wrappers_inside`, which has the same parameters under plain names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

_COMPILED = "_orig_mod"
_ADDED = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names that only wrappers add: torch.compile, FSDP version 1, activation checkpointing."""


def plain_name(name: str) -> str:
    """Return the name of a weight without the parts that wrappers add; files of other programs may contain them."""
    return _ADDED.sub("", name)


def without_wrappers_inside(module: Any) -> Any:
    """Return a module with the same tensors, in which no part is compiled or wrapped for communication.

    Modules on the way to such a part are shallow copies: they share parameters, buffers, hooks and all other attributes
    with the user's. If no part is compiled or wrapped, the result is ``module`` itself.
    """
    parts = {id(part) for part in module.modules() if part is not module and _inside(part) is not part}
    return _copied(module, parts, {}) if parts else module


def _copied(module: Any, wrappers: set[int], made: dict[int, Any]) -> Any:
    """Return ``module``, or a copy of it if it contains wrappers."""
    inner = module
    while id(inner) in wrappers:
        inner = _inside(inner)
    if id(inner) not in made:
        made[id(inner)] = inner  # for modules that contain themselves
        children = {name: _copied(child, wrappers, made) for name, child in _children(inner)}
        if any(child is not inner._modules[name] for name, child in children.items()):
            copy = object.__new__(type(inner))
            copy.__dict__.update(inner.__dict__)
            copy.__dict__["_modules"] = {**inner._modules, **children}
            made[id(inner)] = copy
    return made[id(inner)]


def _children(module: Any) -> Iterator[tuple[str, Any]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _inside(module: Any) -> Any:
    """Return the module inside a wrapper; any other module unchanged."""
    torch: Any = sys.modules["torch"]
    if _COMPILED in module._modules and type(module).__name__ == "OptimizedModule":
        return module._modules[_COMPILED]
    parallel = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return module._modules["module"] if isinstance(module, parallel) else module

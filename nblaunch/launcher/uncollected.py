"""Modules that a function trains without getting them in its arguments, so that their weights are not collected."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nblaunch.launcher.weights import trainable_bytes
from nblaunch.user_code import captured_variables


def describe_uncollected_modules(function: Callable[..., Any], name: str) -> str:
    """Describe the modules that a function takes from the notebook without getting them in its arguments.

    Workers train such a module like any other, but its weights were not asked for, and end with the workers. Only what
    is in plain sight is found: closures, global names, the object of a bound method, the arguments of a ``partial``.

    Args:
        function: what the workers ran.
        name: by which the user knows it.

    Returns:
        A sentence; empty where there is no such module.
    """
    modules = _modules(function)
    if not modules:
        return ""
    named = ", ".join(f"{where} ({type(module).__name__})" for where, module in modules.items())
    verb, them = ("was", "it") if len(modules) == 1 else ("were", "them")
    return (
        f"{named} of the notebook {verb} used by {name} without being in args: what workers changed in {them} is gone "
        f"with them. For trained weights pass {them} as an argument, as in "
        f"notebook_launcher({name.rpartition('.')[2]}, (model,))"
    )


def _modules(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the trainable modules that ``function`` uses by itself, each once, by the name it has there."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[str, Any] = {}
    for where, value in _reached(function):
        is_module = issubclass(type(value), torch.nn.Module)  # a proxy's own idea of its class may raise
        if is_module and not any(value is other for other in found.values()) and trainable_bytes(value):
            found[where] = value
    return found


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        for position, value in enumerate(function.args):
            yield f"argument {position} of the partial", value
        yield from function.keywords.items()
        yield from _reached(function.func)
        return
    owner = getattr(function, "__self__", None) if inspect.ismethod(function) else function
    if owner is not None and not inspect.isroutine(owner) and not inspect.isclass(owner):
        yield "self", owner
        yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(plain):
        yield from captured_variables(plain)

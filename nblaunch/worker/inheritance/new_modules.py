"""Modules that a function puts into objects of the notebook, as the ``fit`` of many libraries does.

    class Classifier:
        def fit(self, samples):
            self.network = Network()    # a new one at every call

If an object in the arguments has a module of the same class and shapes in this place, the kernel's module gets the
weights of the new one (:mod:`nblaunch.worker.delivery`). Other new modules stay in the worker, and a note names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

from nblaunch.user_code import module_of
from nblaunch.weights.state_dicts import shape_mismatches
from nblaunch.wire.argument_paths import ArgPath, modules_in

_FIRST = "args[0]"
_DEFINITIONS = (type, ModuleType, FunctionType, MethodType)


def replacements(args: Sequence[Any], modules: Mapping[ArgPath, Any]) -> dict[ArgPath, Any]:
    """Return the modules in ``args`` that have taken the places of ``modules``, by path."""
    if not any(isinstance(path, str) for path in modules):
        return {}
    present = modules_in(args)
    return {
        path: present[path]
        for path, module in modules.items()
        if path in present and _replaces(present[path], module)
    }


class HeldModules:
    """The modules that objects hold before the function is called.

    Args:
        values: names and values of variables of the notebook. The names of arguments begin with ``args[``.
    """

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        self._objects: dict[int, tuple[str, Any, dict[ArgPath, Any]]] = {}
        for name, value in values:
            with suppress(Exception):  # raised by a property or proxy of the user's
                if module_of(type(value)) != "builtins" and not isinstance(value, _DEFINITIONS):
                    self._objects.setdefault(id(value), (name, value, modules_in((value,))))

    def new(self, kept: set[int]) -> list[str]:
        """Return the names of new modules whose weights the kernel does not get.

        Args:
            kept: ids of the objects that the kernel gets.
        """
        names: list[str] = []
        modules = [module for _, _, before in self._objects.values() for module in before.values()]
        held = {id(part) for module in modules for part in (*module.modules(), *module.parameters())}
        for name, value, before in self._objects.values():
            with suppress(Exception):
                for path, module in modules_in((value,)).items():
                    # The delivery sends a replacement, or another note names it.
                    is_reported = name.startswith("args[") and path in before
                    if not is_reported and id(module) not in kept and _is_new(module, held):
                        names.append(f"{name}{str(path).removeprefix(_FIRST)}")
        return names


def _replaces(module: Any, other: Any) -> bool:
    """Return whether a module is another one of the same class, with tensors of the same shapes."""
    if module is other or type(module) is not type(other) or any(part is other for part in module.modules()):
        return False
    state, others = module.state_dict(), other.state_dict()
    return state.keys() == others.keys() and not any(shape_mismatches(other, others, state))


def _is_new(module: Any, held: set[int]) -> bool:
    """Return whether a module with parameters contains none of the ``held`` modules and parameters."""
    tensors = [id(parameter) for parameter in module.parameters()]
    return bool(tensors) and held.isdisjoint(tensors) and held.isdisjoint(map(id, module.modules()))

"""Notebook variables that a function fills or assigns. A worker's changes are lost, and a note says so.

    losses = []
    def train():
        global best
        losses.append(0.5)
        best = 0.5

In one process, both variables would have the new values after the call, but each worker changes its own copies. A
function may change other variables for its own use, as in ``args.rank = rank``. Therefore, only changes whose purpose
is to keep values are reported:

    values in which results were kept (``watched_values.py``), including attributes of objects, classes, functions and
        the user's modules (``result_variables.py``); library objects that were trained
    assignments to global variables, and to variables of an enclosing function
    modules that are not in the arguments, if other modules are; modules in args come back
    new modules in objects, which many libraries' ``fit`` creates on every call, if they do not come back states of
    optimizers
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from nblaunch import formatting
from nblaunch.user_code import module_of, used_by
from nblaunch.wire.argument_paths import (
    ArgPath,
    is_scheduler,
    modules_at,
    modules_in,
    optimizers_in,
    path_name,
)
from nblaunch.worker.delivery import replacements
from nblaunch.worker.inheritance import called_code, result_variables
from nblaunch.worker.inheritance.watched_values import Variable

_MAX_RETURNED = 20_000
_FIRST = "args[0]"
_DEFINITIONS = (type, ModuleType, FunctionType, MethodType)
_LOST = (
    "the function changes {names} only in the workers, and the notebook's variables keep their values. Return the "
    "new values from the function"
)
_OUTSIDE = (
    "the function changes {names} only in the workers, because only modules in args come back. To get the new weights, "
    "pass {them} as an argument"
)
_REPLACED = (
    "the function replaces {names} with other modules, whose weights do not come back. Return their state_dict() from "
    "the function, and load it in the notebook"
)
_STEPPED = (
    "the function steps {names} only in the workers: the notebook's optimizers keep their old states and do not "
    "get the new moments and learning rates. {advice}"
)
_OPTIMIZERS_OUTSIDE = (
    "To continue training with another launch, pass {them} in args, and sync_optimizers=True"
)
IN_A_LAUNCH = "To continue training with another launch, pass sync_optimizers=True"
IN_A_SESSION = (
    "To continue training, build the optimizer in a command of the session, whose ranks then keep it"
)


class Changes:
    """Watches the notebook's variables from the start of a function to its end.

    Args:
        function: the function; None if its variables belong to the worker, as in a session.
        args: its arguments.
        is_forked: whether this worker may share memory with the kernel.
        advice: how to keep optimizers' states; empty if the kernel gets them.
        collected: argument path -> module whose weights the kernel gets; if there are none, the launcher describes the
            modules whose weights are lost.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        *,
        is_forked: bool,
        advice: str,
        collected: Mapping[ArgPath, Any] = MappingProxyType({}),
    ) -> None:
        self._args, self._before = args, dict(collected)
        self._advice = advice
        in_args = {id(each) for each in optimizers_in(args).values()}
        self._optimizers = list(_optimizers(optimizers_in(args))) if advice else []
        values = [(f"args[{position}]", value) for position, value in enumerate(args)]
        definitions = [] if function is None else called_code.reached_by([function, *args])
        functions = [each for each in definitions if isinstance(each, FunctionType)]
        values += [] if function is None else list(used_by(function))
        values += [each for reached in functions for each in called_code.variables(reached)]
        operations = {each for reached in functions for each in called_code.assignments_in(reached.__code__)}
        counted = {name for operation, name in operations if operation == called_code.COUNT}
        reads = {name for reached in functions for name in called_code.reads_in(reached.__code__)}
        self._finder = finder = result_variables.Finder(is_forked, collected.values(), counted, reads)
        self._variables = [each for name, value in values for each in finder.variables(name, value)]
        for reached in functions:
            self._variables += result_variables.assigned(reached, reads)
            self._variables += finder.of_modules(called_code.modules(reached))
        outside = {name: each for name, each in finder.optimizers.items() if id(each) not in in_args}
        self._optimizers_outside = list(_optimizers(outside))
        self._modules = finder.modules
        self._held = _HeldModules(values)

    def describe(self, returned: Any) -> list[str]:
        """Return sentences about the changes that do not reach the kernel.

        Args:
            returned: the function's return value, which is sent to the kernel.
        """
        kept = _kept_in(returned)
        texts = []
        results = [*_changed(self._variables, kept), *self._finder.new_attributes(kept)]
        if names := list(dict.fromkeys([*results, *self._held.new(kept)])):
            texts.append(_LOST.format(names=formatting.joined(names)))
        if names := _changed(self._modules, kept):
            texts.append(_OUTSIDE.format(names=formatting.joined(names), them=_pronoun(names)))
        if names := self._replaced():
            texts.append(_REPLACED.format(names=formatting.joined(names)))
        if names := _changed(self._optimizers, set()):
            texts.append(_STEPPED.format(names=formatting.joined(names), advice=self._advice))
        if names := _changed(self._optimizers_outside, set()):
            advice = _OPTIMIZERS_OUTSIDE.format(them=_pronoun(names))
            texts.append(_STEPPED.format(names=formatting.joined(names), advice=advice))
        return texts

    def _replaced(self) -> list[str]:
        """Return the names of collected modules that the function has replaced with modules that are not sent."""
        present = modules_at(self._args, list(self._before))
        sent = replacements(self._args, self._before)
        return [
            f"{path_name(path)} ({type(module).__name__})"
            for path, module in self._before.items()
            if path in present and path not in sent
            if not any(part is module for part in present[path].modules())
        ]


def _pronoun(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "each of them"


def _changed(variables: Sequence[Variable], kept: set[int]) -> list[str]:
    """Return the names of the variables that have changed and whose values are not among ``kept``, each once."""
    return list(dict.fromkeys(each.name for each in variables if _has_changed(each, kept)))


def _has_changed(variable: Variable, kept: set[int]) -> bool:
    try:
        value = variable.get()
        return not variable.is_kept(value, kept) and variable.has_changed(value)
    except Exception:  # a user's container may raise an error after a change
        return False


# --- new modules -----------------------------------------------------------------------------------------------------


class _HeldModules:
    """The modules that objects hold before the function is called.

    Args:
        values: names and values of notebook variables. The names of arguments begin with ``args[``.
    """

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        self._objects: dict[int, tuple[str, Any, dict[ArgPath, Any]]] = {}
        for name, value in values:
            with suppress(Exception):  # raised by one of the user's properties or proxies
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


def _is_new(module: Any, held: set[int]) -> bool:
    """Return whether a module with parameters contains none of the ``held`` modules and parameters."""
    tensors = [id(parameter) for parameter in module.parameters()]
    return bool(tensors) and held.isdisjoint(tensors) and held.isdisjoint(map(id, module.modules()))


# --- optimizers ------------------------------------------------------------------------------------------------------


def _optimizers(named: Mapping[Any, Any]) -> Iterator[Variable]:
    for name, value in named.items():
        if not is_scheduler(value):
            with suppress(Exception):  # an optimizer from another library may have no state
                yield Variable(f"{name} ({type(value).__name__})", lambda: None, _watched_optimizer(value))


def _watched_optimizer(optimizer: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether the state or the learning rates of an optimizer have changed."""

    def state() -> list[Any]:
        tensors = [part for of_one in optimizer.state.values() for part in _tensors_in(of_one)]
        return [*(each._version for each in tensors), *(group.get("lr") for group in optimizer.param_groups)]

    before = state()
    return lambda _: state() != before


def _tensors_in(state: Any) -> Iterator[Any]:
    """Yield the tensors in one parameter's ``state``, which is a tensor or a container."""
    parts = (
        state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else [state]
    )
    yield from (part for part in parts if hasattr(part, "_version"))


def _kept_in(returned: Any) -> set[int]:
    """Return the identities of the objects in a function's return value, which is sent to the kernel."""
    pending, kept = deque([returned]), set[int]()
    while pending and len(kept) < _MAX_RETURNED:
        value = pending.popleft()
        if id(value) in kept:
            continue
        kept.add(id(value))
        kind = type(value)
        with suppress(Exception):  # raised by the user's classes
            if issubclass(kind, (list, tuple, dict)):
                parts = dict.values(value) if issubclass(kind, dict) else iter(value)
                pending.extend(islice(parts, _MAX_RETURNED))
            if not issubclass(kind, (type, ModuleType, FunctionType)):
                pending.extend(result_variables.held_by(value).values())
    return kept

"""Variables of the notebook that a function fills or assigns. A worker's changes are lost, and a note says so.

    losses = []
    def train():
        global best
        losses.append(0.5)
        best = 0.5

In one process, both variables would have the new values after the call, but each worker changes its own copies. A
function may change other variables for its own use, as in ``args.rank = rank``. Therefore, only changes whose purpose
is to keep values are reported:

    values in which results were kept (``watched_values.py``), including attributes of objects and classes
    assignments to global variables, and to variables of an enclosing function
    modules that are not in the arguments, if other modules are; modules in args come back
    states of optimizers in the arguments
"""

from __future__ import annotations

import argparse
import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import islice
from types import (
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

from nblaunch import formatting
from nblaunch.user_code import captured_variables, module_of, used_by
from nblaunch.wire.argument_paths import ArgPath, is_scheduler, modules_at, optimizers_in, path_name
from nblaunch.worker.inheritance import new_modules, watched_values
from nblaunch.worker.inheritance.plain_values import has_own_class
from nblaunch.worker.inheritance.watched_values import Watcher

_MAX_FUNCTIONS = 200
_MAX_RETURNED = 20_000
_MAX_DEPTH = 2
"""Maximum number of attributes in a name, such as the two in ``trainer.average.weights``."""
_FOR_ITSELF = re.compile(
    r"_|.*(cache|memo|lock|seen)|(device|rank|model|scaler|pool|logger|batch|inputs?|labels?|targets?)$",
    re.IGNORECASE,
)
"""Names of variables that a function keeps for itself, so the kernel does not need their values."""

_NO_VALUE = object()
_LOST = (
    "the function changes {names} only in the workers, and the notebook's variables keep their values. Return the "
    "new values from the function"
)
_OUTSIDE = (
    "the function changes {names} only in the workers, because only modules in args come back. To get the new weights, "
    "pass {them} as an argument"
)
_REPLACED = (
    "the function replaces {names} by other modules, whose weights do not come back. Return their state_dict() from "
    "the function, and load it in the notebook"
)
_STEPPED = (
    "the function steps {names} only in the workers: the notebook's optimizers keep their old states and do not "
    "get the new moments and learning rates. {advice}"
)
IN_A_LAUNCH = "To continue training with another launch, pass sync_optimizers=True"
IN_A_SESSION = (
    "To continue training, build the optimizer in a command of the session, whose ranks then keep it"
)


class _Variable(NamedTuple):
    """A variable in which a function may keep results.

    Args:
        name: its name, as in ``tracker.values``.
        get: returns its value.
        has_changed: whether a value differs from the value before the call.
    """

    name: str
    get: Callable[[], Any]
    has_changed: Callable[[Any], bool]


class Changes:
    """Watches the notebook's variables from the start of a function to its end.

    Args:
        function: the function; None if its variables belong to the worker, as in a session.
        args: its arguments.
        is_forked: whether this worker may share memory with the kernel.
        advice: how to keep the states of optimizers; empty if the kernel gets them.
        collected: argument path -> module whose weights the kernel gets; if there are none, the launcher describes
            the others.
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
        self._optimizers = list(_optimizers(args)) if advice else []
        values = [(f"args[{position}]", value) for position, value in enumerate(args)]
        functions = [] if function is None else list(_functions([function, *args]))
        values += [] if function is None else list(used_by(function))
        values += [each for reached in functions for each in captured_variables(reached)]
        finder = _Finder(is_forked, collected.values())
        self._variables = [each for name, value in values for each in finder.variables(name, value)]
        self._variables += [each for reached in functions for each in _assigned(reached)]
        self._modules = finder.modules
        self._held = new_modules.HeldModules(values)

    def describe(self, returned: Any) -> list[str]:
        """Return sentences about the changes that do not reach the kernel.

        Args:
            returned: the function's value, which is sent to the kernel.
        """
        kept = _kept_in(returned)
        texts = []
        if names := [*_changed(self._variables, kept), *self._held.new(kept)]:
            texts.append(_LOST.format(names=formatting.joined(names)))
        if names := _changed(self._modules, kept):
            texts.append(
                _OUTSIDE.format(
                    names=formatting.joined(names), them="it" if len(names) == 1 else "each of them"
                )
            )
        if names := self._replaced():
            texts.append(_REPLACED.format(names=formatting.joined(names)))
        if names := _changed(self._optimizers, set()):
            texts.append(_STEPPED.format(names=formatting.joined(names), advice=self._advice))
        return texts

    def _replaced(self) -> list[str]:
        """Return the names of collected modules in whose places the function has put modules that are not sent."""
        present = modules_at(self._args, list(self._before))
        sent = new_modules.replacements(self._args, self._before)
        return [
            f"{path_name(path)} ({type(module).__name__})"
            for path, module in self._before.items()
            if path in present and path not in sent
            if not any(part is module for part in present[path].modules())
        ]


def _changed(variables: Sequence[_Variable], kept: set[int]) -> list[str]:
    """Return the names of the variables that have changed and whose values are not among ``kept``, each once."""
    return list(dict.fromkeys(each.name for each in variables if _has_changed(each, kept)))


def _has_changed(variable: _Variable, kept: set[int]) -> bool:
    try:
        value = variable.get()
        return id(value) not in kept and variable.has_changed(value)
    except Exception:  # a user's container may raise an error after it was changed
        return False


# --- assigned variables ----------------------------------------------------------------------------------------------

_PLAIN = (int, float, complex, str, bytes, tuple, list, dict, set, deque)


def _assigned(function: FunctionType) -> Iterator[_Variable]:
    """Yield the variables that a function assigns but that are defined outside it."""
    stored = set(_stored(function.__code__))
    names = {name for operation, name in stored if operation == "STORE_GLOBAL"}
    for name in sorted(names):
        if not _FOR_ITSELF.match(name):
            yield _assignable(name, functools.partial(_notebook().get, name, _NO_VALUE))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if ("STORE_DEREF", name) in stored and not _FOR_ITSELF.match(name):
            yield _assignable(name, functools.partial(_content, cell))


def _assignable(name: str, get: Callable[[], Any]) -> _Variable:
    before = get()

    def has_changed(value: Any) -> bool:
        return value is not before and type(value) is not bool and issubclass(type(value), _plain_types())

    return _Variable(name, get, has_changed)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return _NO_VALUE


def _stored(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the operations that store variables, and the variables' names, including those in nested functions."""
    for instruction in dis.get_instructions(code):
        # A nested function names the variables of the outer one among its free variables.
        if instruction.opname == "STORE_GLOBAL" or instruction.argval in code.co_freevars:
            yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored(constant)


def _notebook() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _plain_types() -> tuple[type, ...]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (*_PLAIN, *([torch.Tensor] if torch else []), *([numpy.ndarray, numpy.number] if numpy else []))


# --- values in which a function may keep results ---------------------------------------------------------------------


def _functions(values: Sequence[Any]) -> Iterator[FunctionType]:
    """Yield the notebook's functions that values are or may call: functions, methods, hooks of modules."""
    pending = list(values)
    seen: set[int] = set()
    while pending and len(seen) < _MAX_FUNCTIONS:
        value = pending.pop()
        if not has_own_class(value):
            continue
        pending.extend(_hooks(value))
        while isinstance(value, (MethodType, functools.partial)):
            value = value.__func__ if isinstance(value, MethodType) else value.func
        definition = value if isinstance(value, (type, FunctionType)) else type(value)
        module = module_of(definition) if isinstance(definition, type) else definition.__module__
        if id(definition) in seen or module != "__main__":
            continue
        seen.add(id(definition))
        if isinstance(definition, FunctionType):
            yield definition
            pending.extend(each for _, each in captured_variables(definition))
        else:
            pending.extend(each for each in vars(definition).values() if isinstance(each, FunctionType))


def _hooks(value: Any) -> Iterator[Any]:
    """Yield the hooks of a module, if it is one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        for part in value.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks):
                yield from hooks.values()


class _Finder:
    """Finds the variables that may keep values, and yields each once.

    Args:
        is_forked: as in :class:`Changes`.
        collected: as in :class:`Changes`.

    Attributes:
        modules: variables that hold modules whose weights the kernel does not get.
    """

    def __init__(self, is_forked: bool, collected: Iterable[Any]) -> None:
        self.modules: list[_Variable] = []
        self._watcher = Watcher(is_forked)
        self._collected = {id(tensor) for module in collected for tensor in _tensors_of(module)}
        self._seen: set[int] = set()
        self._torch: Any = sys.modules.get("torch")

    def variables(self, name: str, value: Any, depth: int = 0) -> Iterator[_Variable]:
        """Yield a variable if a function may fill it; otherwise, its attributes that a function may fill."""
        with suppress(Exception):  # for example, a proxy whose object is missing, or a property that raises
            yield from self._variables(name, value, depth)

    def _variables(self, name: str, value: Any, depth: int) -> Iterator[_Variable]:
        if not has_own_class(value) or id(value) in self._seen or id(value) in self._collected:
            return
        if self._torch is not None and isinstance(value, self._torch.nn.Module):
            yield from self._of_module(name, value)
        if _FOR_ITSELF.match(name.rpartition(".")[2]):
            return
        self._seen.add(id(value))
        has_changed = self._watcher.watch(value, is_attribute=depth > 0)
        if has_changed is not None:
            yield _Variable(name, lambda: value, has_changed)
        elif depth < _MAX_DEPTH:
            for attribute, part in list(self._attributes(value).items()):
                yield from self._of_attribute(name, value, attribute, part, depth)

    def _of_attribute(
        self, name: str, value: Any, attribute: str, part: Any, depth: int
    ) -> Iterator[_Variable]:
        where = f"{name}.{attribute}"
        # The names of a library's attributes say nothing about their purpose.
        if not _has_own_attributes(value):
            yield from self._tensors(where, part)
            return
        # A dataset may load its data or cache samples.
        is_dataset = self._torch is not None and isinstance(value, self._torch.utils.data.Dataset)
        if not (is_dataset and type(part) is dict):
            yield from self.variables(where, part, depth + 1)
        if not is_dataset and not _FOR_ITSELF.match(attribute):
            yield _attribute(where, value, attribute, part)

    def _of_module(self, name: str, module: Any) -> Iterator[_Variable]:
        """Watch a module's tensors if the kernel does not get them; yield other attributes that may keep results."""
        self._seen.add(id(module))
        if _has_own_attributes(module):
            for attribute, part in list(vars(module).items()):
                # A module may keep other objects for its own use, such as the tensors of its last call.
                if isinstance(part, watched_values.CONTAINERS):
                    yield from self.variables(f"{name}.{attribute}", part, depth=1)
                elif not _FOR_ITSELF.match(attribute):
                    yield _attribute(f"{name}.{attribute}", module, attribute, part, kind=float)
        if hasattr(module, "_update_count"):  # a metric of torchmetrics
            num_updates = module._update_count
            yield _Variable(name, lambda: module, lambda _: module._update_count > num_updates)
        elif self._collected and not name.startswith("_"):
            has_changed = self._watcher.watch_module(module, self._collected)
            if has_changed is not None:
                text = f"{name} ({type(module).__name__})"
                self.modules.append(_Variable(text, lambda: module, lambda _: has_changed()))

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object or of the user's class; none for modules, optimizers and functions."""
        left_out: tuple[type, ...] = (ModuleType, FunctionType, MethodType, Enum)
        if self._torch is not None:
            left_out += (self._torch.nn.Module, self._torch.optim.Optimizer)
        kind = value if isinstance(value, type) else type(value)
        if isinstance(value, left_out) or issubclass(kind, left_out):
            return {}
        attributes: dict[str, Any] = {}
        for each in reversed(kind.__mro__):
            if module_of(each) == "__main__":
                attributes |= _attributes_of_class(each, value)
        held = None if value is kind else getattr(value, "__dict__", None)
        return attributes | held if isinstance(held, dict) else attributes

    def _tensors(self, name: str, value: Any) -> Iterator[_Variable]:
        with suppress(Exception):  # for example, a sparse tensor has no memory to ask about
            is_own = _FOR_ITSELF.match(name.rpartition(".")[2])
            has_changed = None if is_own else self._watcher.watch_tensors(value)
            if has_changed is not None:
                yield _Variable(name, lambda: value, has_changed)


def _tensors_of(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


def _has_own_attributes(value: Any) -> bool:
    """Return whether the user has named the attributes of a value."""
    kind = value if isinstance(value, type) else type(value)
    return module_of(kind) == "__main__" or kind in (SimpleNamespace, argparse.Namespace)


def _attributes_of_class(kind: type, value: Any) -> dict[str, Any]:
    """Return the variables of a class, and those attributes of one of its objects that are stored in slots."""
    attributes = {}
    for name, part in list(vars(kind).items()):
        if isinstance(part, MemberDescriptorType):
            if value is not kind and not isinstance(value, type) and hasattr(value, name):
                attributes[name] = getattr(value, name)
        elif not name.startswith("__") and not hasattr(part, "__get__"):
            attributes[name] = part
    return attributes


def _attribute(where: str, owner: Any, attribute: str, before: Any, kind: type = object) -> _Variable:
    """Watch an attribute for another value, which must be of a kind."""

    def has_changed(value: Any) -> bool:
        is_new = value is not before and isinstance(value, kind)
        return is_new and watched_values.is_kept(attribute, before, value)

    return _Variable(where, lambda: getattr(owner, attribute, None), has_changed)


# --- optimizers ------------------------------------------------------------------------------------------------------


def _optimizers(args: tuple[Any, ...]) -> Iterator[_Variable]:
    for path, value in optimizers_in(args).items():
        if not is_scheduler(value):
            with suppress(Exception):  # an optimizer of another library may have no state
                yield _Variable(f"{path} ({type(value).__name__})", lambda: None, _watched_optimizer(value))


def _watched_optimizer(optimizer: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether the state or the learning rates of an optimizer have changed."""

    def state() -> list[Any]:
        tensors = [part for of_one in optimizer.state.values() for part in _tensors_in(of_one)]
        return [*(each._version for each in tensors), *(group.get("lr") for group in optimizer.param_groups)]

    before = state()
    return lambda _: state() != before


def _tensors_in(state: Any) -> Iterator[Any]:
    """Yield the tensors in the state of one parameter, which is a tensor or a container."""
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
                pending.extend(object.__getattribute__(value, "__dict__").values())
    return kept

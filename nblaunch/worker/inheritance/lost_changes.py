"""Variables of the notebook that a function fills or assigns. A worker's changes are lost, and a note says so.

    losses = []
    def train():
        global best
        losses.append(0.5)
        best = 0.5

In one process, both variables would have the new values after the call, but each worker changes its own copies. A
function may change other variables for its own use, as in ``args.rank = rank``. Therefore, only changes whose purpose
is to keep values are reported:

    containers that have grown              including those in attributes and in dictionaries
    arrays that were zero
    parameters, and tensors of objects      for example, of an average of weights; modules in args come back
    attributes that became floats           for example, the best loss
    assignments to global variables
    states of optimizers in the arguments
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from nblaunch.user_code import captured_variables, module_of, used_by
from nblaunch.wire.argument_paths import is_scheduler, optimizers_in
from nblaunch.worker.inheritance import comparisons
from nblaunch.worker.inheritance.comparisons import CONTAINERS, Comparisons, HasChanged, is_unset
from nblaunch.worker.inheritance.plain_values import has_own_class

_MAX_FUNCTIONS = 200
_MAX_RETURNED = 20_000
_MAX_DEPTH = 2
"""How many attributes a name may have, as in ``trainer.average.weights``."""
_FOR_ITSELF = re.compile(r"_|.*(cache|memo|lock|seen)|(device|rank|model|scaler|pool|logger)$", re.IGNORECASE)
"""Names of variables that a function keeps for itself, so the kernel does not need their values."""
_CLOCK = re.compile(r"(^|_)(t\d|tic|clock|time|start|started)(_|$)", re.IGNORECASE)
"""Names of attributes that hold a time."""

_NO_VALUE = object()
_LOST = (
    "the function changes {names} in its worker only, and the notebook's variables keep their values. Return the new "
    "values from the function"
)
_STEPPED = (
    "the function steps {names} in its worker only, and the notebook's optimizers keep their states, without the new "
    "moments and learning rates. {advice}"
)
IN_A_LAUNCH = "To continue training with another launch, pass sync_optimizers=True"
IN_A_SESSION = (
    "To continue training, build the optimizer in a command of the session, whose ranks then keep it"
)


class _Variable(NamedTuple):
    """A variable that may keep values.

    Args:
        name: its name, as in ``tracker.values``.
        get: returns its value.
        has_changed: whether a value differs from the value before the call.
    """

    name: str
    get: Callable[[], Any]
    has_changed: HasChanged


class Changes:
    """Watches the notebook's variables from the start of a function to its end.

    Args:
        function: the function; None if its variables belong to the worker, as in a session.
        args: its arguments.
        is_forked: whether this worker may share memory with the kernel.
        advice: how to keep the states of optimizers; empty if the kernel gets them.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], *, is_forked: bool, advice: str) -> None:
        self._advice = advice
        self._optimizers = list(_optimizers(args)) if advice else []
        values = [(f"args[{position}]", value) for position, value in enumerate(args)]
        functions = [] if function is None else list(_functions(function))
        values += [] if function is None else list(used_by(function))
        values += [each for reached in functions for each in captured_variables(reached)]
        finder = _Finder(is_forked)
        self._variables = [each for name, value in values for each in finder.variables(name, value)]
        names = {name for reached in functions for name in _assigned(reached.__code__)}
        self._variables += [_global(name) for name in sorted(names)]

    def describe(self, returned: Any) -> list[str]:
        """Return sentences about the changes that the kernel does not get.

        Args:
            returned: the function's value, which the kernel gets.
        """
        kept = _kept_in(returned)
        names = [each.name for each in self._variables if id(each.get()) not in kept and _has_changed(each)]
        stepped = [each.name for each in self._optimizers if _has_changed(each)]
        texts = [_LOST.format(names=", ".join(dict.fromkeys(names)))] if names else []
        return texts + ([_STEPPED.format(names=", ".join(stepped), advice=self._advice)] if stepped else [])


def _has_changed(variable: _Variable) -> bool:
    try:
        return variable.has_changed(variable.get())
    except Exception:  # a user's container may raise an error after it was changed
        return False


_PLAIN = (int, float, complex, str, bytes, tuple, *CONTAINERS)


def _notebook() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _global(name: str) -> _Variable:
    before = _notebook().get(name, _NO_VALUE)
    return _Variable(
        name,
        lambda: _notebook().get(name, _NO_VALUE),
        lambda value: (
            value is not before and type(value) is not bool and issubclass(type(value), _plain_types())
        ),
    )


def _plain_types() -> tuple[type, ...]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (*_PLAIN, *([torch.Tensor] if torch else []), *([numpy.ndarray, numpy.number] if numpy else []))


def _functions(function: Any) -> Iterator[FunctionType]:
    """Yield the notebook's functions that a function may call, itself included."""
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_FUNCTIONS:
        value = pending.pop()
        if not has_own_class(value):
            continue
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


class _Finder:
    """Finds variables that may keep values, each once.

    Args:
        is_forked: as in :class:`Changes`.
    """

    def __init__(self, is_forked: bool) -> None:
        self._comparisons = Comparisons(is_forked)
        self._seen: set[int] = set()
        self._torch: Any = sys.modules.get("torch")

    def variables(self, name: str, value: Any, depth: int = 0) -> Iterator[_Variable]:
        """Yield a variable that a function may fill, or the attributes of the variable that it may fill."""
        with suppress(Exception):  # for example, a proxy whose object is missing, or a property that raises
            yield from self._variables(name, value, depth)

    def _variables(self, name: str, value: Any, depth: int) -> Iterator[_Variable]:
        if _FOR_ITSELF.match(name.rpartition(".")[2]) or not has_own_class(value) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        has_changed = self._comparisons.of(value, is_attribute=depth > 0)
        if has_changed is not None:
            yield _Variable(name, lambda: value, has_changed)
        elif depth < _MAX_DEPTH and (attributes := self._attributes(value)):
            is_users = module_of(type(value)) == "__main__"
            is_dataset = self._torch is not None and isinstance(value, self._torch.utils.data.Dataset)
            for attribute, part in list(attributes.items()):
                where = f"{name}.{attribute}"
                if not is_users:  # the names of a library's attributes say nothing about their purpose
                    yield from self._tensors(where, part)
                elif is_unset(part):
                    if not _CLOCK.search(attribute):
                        yield _number(where, attributes, attribute)
                # A dictionary in a dataset may only cache the samples that it has loaded.
                elif not (is_dataset and type(part) is dict):
                    yield from self.variables(where, part, depth + 1)

    def _attributes(self, value: Any) -> dict[str, Any] | None:
        """Return the attributes of an object; None for modules, optimizers and definitions, which others report."""
        left_out: tuple[type, ...] = (type, ModuleType, FunctionType, MethodType)
        if self._torch is not None:
            left_out += (self._torch.nn.Module, self._torch.optim.Optimizer)
        attributes = getattr(value, "__dict__", None)
        return attributes if isinstance(attributes, dict) and not isinstance(value, left_out) else None

    def _tensors(self, name: str, value: Any) -> Iterator[_Variable]:
        with suppress(Exception):  # for example, a sparse tensor has no memory to ask about
            is_own = _FOR_ITSELF.match(name.rpartition(".")[2])
            has_changed = None if is_own else self._comparisons.of_tensors(value)
            if has_changed is not None:
                yield _Variable(name, lambda: value, has_changed)


def _number(name: str, attributes: dict[str, Any], attribute: str) -> _Variable:
    """Watch for a new float in an attribute. A function may set an integer, such as a rank, for its own use."""
    before = attributes[attribute]
    return _Variable(
        name,
        lambda: attributes.get(attribute),
        lambda value: isinstance(value, float) and value != before,
    )


def _optimizers(args: tuple[Any, ...]) -> Iterator[_Variable]:
    for path, value in optimizers_in(args).items():
        if not is_scheduler(value):
            with suppress(Exception):  # an optimizer of another library may have no state
                yield _Variable(
                    f"{path} ({type(value).__name__})", lambda: None, comparisons.of_optimizer(value)
                )


def _kept_in(returned: Any) -> set[int]:
    """Return the ids of the objects that the kernel receives with a function's return value."""
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


def _assigned(code: CodeType) -> Iterator[str]:
    """Yield the global variables that a function assigns."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL" and not _FOR_ITSELF.match(instruction.argval):
            yield instruction.argval

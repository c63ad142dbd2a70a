"""Finds variables that may hold a function's results, including attributes of objects and classes.

The search starts from the names in the code of the function and of the functions that it may call (``called_code.py``).
It follows attributes of the user's objects and items of lists and dictionaries. The attribute names of a library's
objects say nothing about their purpose, so for these objects, the search watches only tensors and training.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from enum import Enum
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from nblaunch import packages
from nblaunch.user_code import NO_VALUE, content_of, is_users, module_of
from nblaunch.worker.inheritance import called_code, watched_values
from nblaunch.worker.inheritance.plain_values import has_own_class
from nblaunch.worker.inheritance.watched_values import Variable, Watcher, is_for_itself

_MAX_DEPTH = 2
"""Maximum number of attributes and items in a name, such as the two in ``trainer.average.weights``."""
_MAX_ITEMS = 100
"""A container with more items counts as data, and the objects in it are not examined."""
_OF_TORCH = ("torch.nn.Module", "torch.optim.Optimizer")
_DATASET = "torch.utils.data.Dataset"
_ARRAYS = ("torch.Tensor", "numpy.ndarray", "numpy.number")
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_PLAIN = (int, float, complex, str, bytes, tuple, list, dict, set, deque)


class Finder:
    """Finds the variables that may keep results, and yields each once.

    Args:
        is_forked: whether this worker may share memory with the kernel.
        collected: modules whose weights are sent back to the kernel.
        counted: names of attributes that the code uses as counters, as in ``self.n += 1``.
        reads: names that the code reads, not only to count.

    Attributes:
        modules: variables that hold modules whose weights the kernel does not get.
        optimizers: name -> optimizer, for each that was found.
    """

    def __init__(
        self,
        is_forked: bool,
        collected: Iterable[Any],
        counted: Iterable[str] = (),
        reads: Set[str] = frozenset(),
    ) -> None:
        self.modules: list[Variable] = []
        self.optimizers: dict[str, Any] = {}
        self._watcher = Watcher(is_forked)
        self._collected = {id(tensor) for module in collected for tensor in _tensors_of(module)}
        self._counted = set(counted)
        self._reads = reads
        self._seen: set[int] = set()
        self._examined: set[int] = set()
        self._owners: list[tuple[str, Any, set[str]]] = []

    def variables(self, name: str, value: Any, depth: int = 0) -> Iterator[Variable]:
        """Yield a variable if a function may fill it; otherwise, yield its attributes that a function may fill."""
        with suppress(Exception):  # for example, a proxy whose object is missing, or a property that raises
            yield from self._variables(name, value, depth)

    def of_modules(self, modules: Iterable[tuple[str, ModuleType, set[str]]]) -> Iterator[Variable]:
        """Yield the variables that code assigns in the user's modules, as in ``records.best = 0.5``.

        Args:
            modules: for each module, its name, the module, and the attributes that the code assigns.
        """
        for name, module, assigned in modules:
            self._owners.append((name, module, set(vars(module))))
            for attribute in sorted(assigned & vars(module).keys()):
                if not is_for_itself(attribute):
                    before = vars(module)[attribute]
                    is_counted = attribute in self._counted
                    yield self._attribute(f"{name}.{attribute}", module, before, is_counted=is_counted)

    def new_attributes(self, kept: set[int]) -> Iterator[str]:
        """Yield the names of attributes that hold results and did not exist before the call.

        Args:
            kept: ids of the objects that are sent back to the kernel.
        """
        for name, owner, before in self._owners:
            is_function = isinstance(owner, FunctionType)
            for attribute, value in held_by(owner).items():
                if (
                    attribute in before
                    or is_for_itself(attribute)
                    or not kept.isdisjoint((id(value), id(owner)))
                ):
                    continue
                with suppress(Exception):  # raised by the user's classes
                    # If the class defines this name, the attribute is a cached_property or the like, or a slot.
                    defined = getattr(type(owner), attribute, NO_VALUE)
                    is_new = defined is NO_VALUE or isinstance(defined, MemberDescriptorType)
                    if is_new and watched_values.is_new_result(attribute, value, is_of_function=is_function):
                        yield f"{name}.{attribute}"

    def _variables(self, name: str, value: Any, depth: int) -> Iterator[Variable]:
        if not has_own_class(value) or id(value) in self._seen or id(value) in self._collected:
            return
        if packages.is_subclass(type(value), "torch.nn.Module"):
            yield from self._of_module(name, value)
        if packages.is_subclass(type(value), "torch.optim.Optimizer"):
            self._seen.add(id(value))
            self.optimizers[name] = value
            return
        has_learnt = watched_values.watch_training(value)
        if has_learnt is not None:
            self._seen.add(id(value))
            yield Variable(f"{name} ({type(value).__name__})", lambda: value, has_learnt)
        if is_for_itself(name.rpartition(".")[2]):
            return
        self._seen.add(id(value))
        has_changed = self._watcher.watch(value, is_attribute=depth > 0)
        if has_changed is not None:
            yield Variable(name, lambda: value, has_changed)
        if depth < _MAX_DEPTH:
            yield from self._of_items(name, value, depth)
        if has_changed is None and depth < _MAX_DEPTH:
            self._remember(name, value)
            self._examined.add(id(value))
            for attribute, part in list(self._attributes(value).items()):
                yield from self._of_attribute(name, value, attribute, part, depth)

    def _of_items(self, name: str, value: Any, depth: int) -> Iterator[Variable]:
        """Yield the variables of the user's objects in a list, tuple or dictionary."""
        if type(value) not in (list, tuple, dict) or len(value) > _MAX_ITEMS:
            return
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if has_own_class(part) and _has_own_attributes(part):
                yield from self.variables(f"{name}[{key!r}]", part, depth + 1)

    def _remember(self, name: str, value: Any) -> None:
        """Remember which attributes the user's object, class or function has now."""
        is_left_out = isinstance(value, (MethodType, Enum)) or packages.is_subclass(type(value), _DATASET)
        if _has_own_attributes(value) and not is_left_out:
            self._owners.append((name, value, set(held_by(value))))

    def _of_attribute(
        self, name: str, value: Any, attribute: str, part: Any, depth: int
    ) -> Iterator[Variable]:
        where = f"{name}.{attribute}"
        # The names of a library's attributes say nothing about their purpose.
        if not _has_own_attributes(value):
            yield from self._tensors(where, part)
            return
        # A dataset may load its data or cache samples.
        is_dataset = packages.is_subclass(type(value), _DATASET)
        if not (is_dataset and type(part) is dict):
            yield from self.variables(where, part, depth + 1)
        if not is_dataset and not is_for_itself(attribute):
            # An iterator, sampler or loader counts its positions and epochs for itself.
            is_counted = attribute in self._counted and not hasattr(type(value), "__iter__")
            yield self._attribute(where, value, part, is_counted=is_counted)

    def _of_module(self, name: str, module: Any) -> Iterator[Variable]:
        """Watch a module's tensors if the kernel does not get them; yield other attributes that may keep results."""
        self._seen.add(id(module))
        if _has_own_attributes(module):
            self._remember(name, module)
            for attribute, part in list(vars(module).items()):
                # A module may keep other objects for its own use, such as the tensors from its last call.
                if isinstance(part, watched_values.CONTAINERS):
                    yield from self.variables(f"{name}.{attribute}", part, depth=1)
                elif not is_for_itself(attribute):
                    yield self._attribute(f"{name}.{attribute}", module, part, kind=float)
        if hasattr(module, "_update_count"):  # a torchmetrics metric
            num_updates = module._update_count
            yield Variable(name, lambda: module, lambda _: module._update_count > num_updates)
        elif self._collected and not name.startswith("_"):
            has_changed = self._watcher.watch_module(module, self._collected)
            if has_changed is not None:
                text = f"{name} ({type(module).__name__})"
                self.modules.append(Variable(text, lambda: module, lambda _: has_changed()))

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object, a function or the user's class; none for other definitions."""
        if isinstance(value, FunctionType):
            return dict(vars(value)) if _has_own_attributes(value) else {}
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, (ModuleType, MethodType, Enum)) or packages.is_subclass(kind, *_OF_TORCH):
            return {}
        attributes: dict[str, Any] = {}
        for each in reversed(kind.__mro__):
            if is_users(module_of(each)):
                attributes |= _attributes_of_class(each, value)
        held = None if value is kind else getattr(value, "__dict__", None)
        return attributes | held if isinstance(held, dict) else attributes

    def _attribute(
        self, where: str, owner: Any, before: Any, *, kind: type = object, is_counted: bool = False
    ) -> Variable:
        """Watch an attribute, whose name ends ``where``, for another value, which must be of a kind."""
        attribute = where.rpartition(".")[2]

        def get() -> Any:
            # The variable of a class is also an attribute of its objects and subclasses, but it is named only once.
            holder = _class_with(owner, attribute)
            return (
                before
                if holder is not None and id(holder) in self._examined
                else getattr(owner, attribute, None)
            )

        def has_changed(value: Any) -> bool:
            is_new = value is not before and isinstance(value, kind)
            return is_new and watched_values.is_kept(attribute, before, value, is_counted=is_counted)

        is_only_counted = is_counted and self._reads.isdisjoint((attribute, called_code.ANY_NAME))
        return Variable(where, get, has_changed, owner, is_only_counted)

    def _tensors(self, name: str, value: Any) -> Iterator[Variable]:
        with suppress(Exception):  # for example, a sparse tensor has no memory to ask about
            is_own = is_for_itself(name.rpartition(".")[2])
            has_changed = None if is_own else self._watcher.watch_tensors(value)
            if has_changed is not None:
                yield Variable(name, lambda: value, has_changed)


def _tensors_of(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


def _has_own_attributes(value: Any) -> bool:
    """Return whether the user has named a value's attributes."""
    if isinstance(value, FunctionType):
        return is_users(value.__module__)
    kind = value if isinstance(value, type) else type(value)
    return kind in _NAMESPACES or is_users(module_of(kind))


def held_by(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself stores, in its dictionary or in slots of the user's classes."""
    held = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        if is_users(module_of(kind)):
            slots = (name for name, part in vars(kind).items() if isinstance(part, MemberDescriptorType))
            held |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return held


def _class_with(owner: Any, attribute: str) -> type | None:
    """Return the class whose variable an attribute of an object, or of another class, is; None if it is its own."""
    if attribute in getattr(owner, "__dict__", ()):
        return None
    kinds = owner.__mro__[1:] if isinstance(owner, type) else type(owner).__mro__
    holder = next((kind for kind in kinds if attribute in vars(kind)), None)
    is_slot = holder is not None and isinstance(vars(holder)[attribute], MemberDescriptorType)
    return None if is_slot else holder


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


# --- assigned variables ----------------------------------------------------------------------------------------------


def assigned(function: FunctionType, reads: Set[str]) -> Iterator[Variable]:
    """Yield the variables that a function assigns but that are defined outside it.

    Args:
        function: the function.
        reads: names that it and other code read, not only to count.
    """
    stored = called_code.assignments_in(function.__code__)
    counted = {name for operation, name in stored if operation == called_code.COUNT_VARIABLE}
    only_counted = counted - reads if called_code.ANY_NAME not in reads else set()
    names = {name for operation, name in stored if operation == "STORE_GLOBAL"}
    is_in_notebook = function.__module__ == "__main__"
    variables = vars(sys.modules["__main__"]) if is_in_notebook else function.__globals__
    for name in sorted(names):
        if not is_for_itself(name):
            yield _assignable(
                called_code.full_name(function, name),
                functools.partial(variables.get, name, NO_VALUE),
                name in only_counted,
            )
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if ("STORE_DEREF", name) in stored and not is_for_itself(name):
            yield _assignable(name, functools.partial(content_of, cell), name in only_counted)


def _assignable(name: str, get: Callable[[], Any], is_only_counted: bool) -> Variable:
    before = get()

    def has_changed(value: Any) -> bool:
        is_plain = issubclass(type(value), _PLAIN) or packages.is_subclass(type(value), *_ARRAYS)
        return value is not before and type(value) is not bool and is_plain

    return Variable(name, get, has_changed, is_only_counted=is_only_counted)

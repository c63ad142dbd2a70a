"""Objects of the user's modules that cells may have changed through calls.

    cfg.merge({"lr": 0.1})             ``from config import cfg``: an object that a module has created
    config.set_lr(0.1)                 a function that assigns a global variable of its module
    @registry.register                 a dictionary in an object of a module

If a cell calls code in the user's modules, this code may change the global variables that it names. The
current values of all these variables are sent. For an unchanged variable this makes no difference, because a
worker would create an equal value. A value that code only reads, such as ``RANK = int(os.environ["RANK"])``,
is not sent, because each worker computes its own.
"""

from __future__ import annotations

import ast
import dis
import re
import sys
import tokenize
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from nblaunch.user_code import is_user_module
from nblaunch.worker.inheritance import cell_text
from nblaunch.worker.inheritance.plain_values import has_own_class, is_changeable

_MAX_VISITED = 2000
_ASSIGNS = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")}
_SETS = re.compile("set_|enable|disable")
_SETTING = (bool, int, float, str, type(None))
_SIMPLE = (int, float, complex, str, bytes, bool, type(None), tuple, list, dict, set, frozenset)

OF_PROCESS = ("sys", "threading", "nblaunch", "IPython", "ipykernel")
"""Modules and packages whose attributes belong to the process: streams, arguments, the shell."""


class Place(NamedTuple):
    """The location of a value.

    Args:
        module: name of the module.
        owner: the class in the module, as its qualified name; "" for an attribute of the module.
        name: name of the attribute.
    """

    module: str
    owner: str
    name: str


def find(cells: Iterable[cell_text.CellText]) -> tuple[dict[Place, Any], set[Place]]:
    """Return the values that cells may have changed, and those that a cell has certainly changed.

    Args:
        cells: the texts of the cells that this process has run.
    """
    search = _Search()
    for cell in cells:
        search.follow_settings(cell)
        if search.modules:
            search.follow(cell)
    return search.found, search.changed


class _Search:
    """Follows calls from cells into the user's modules."""

    def __init__(self) -> None:
        self.modules = {
            name: module
            for name, module in list(sys.modules.items())
            if isinstance(module, ModuleType) and _is_of_user(module) and name == module.__name__
        }
        self.found: dict[Place, Any] = {}
        self.changed: set[Place] = set()
        self._seen: set[int] = set()
        self._homes: dict[int, Place] = {}
        for name, module in self.modules.items():
            for attribute, value in list(vars(module).items()):
                is_new = id(value) not in self._homes or name == type(value).__module__
                if (
                    is_new
                    and has_own_class(value)
                    and not isinstance(value, (ModuleType, type, FunctionType))
                    and is_changeable(value)
                ):
                    self._homes[id(value)] = Place(name, "", attribute)

    def follow_settings(self, cell: cell_text.CellText) -> None:
        """Add the global variables in which libraries keep settings, such as the one that
        ``torch.hub.set_dir("models")`` sets.
        """
        for _, strings in cell.named:
            self._follow_names(strings)
        for path in cell.for_effect:
            function = cell_text.value_at(path)
            if not isinstance(function, FunctionType) or not _SETS.match(function.__name__):
                continue
            module = _module_of(function)
            if module is None or module.__name__.partition(".")[0] in OF_PROCESS:
                continue
            for name in _stored(function.__code__).names & vars(module).keys():
                if type(vars(module)[name]) in _SETTING:
                    self._add(Place(module.__name__, "", name), vars(module)[name])

    def follow(self, cell: cell_text.CellText) -> None:
        """Add what a cell may have changed in the user's modules."""
        for path in cell.used:
            for value in cell_text.values_on(path):
                self._visit(value)
        for path, is_content in cell.assigned:
            base = cell_text.value_at(path if is_content else path[:-1])
            if id(base) in self._homes:
                self.changed.add(self._homes[id(base)])
        for path in cell.for_effect:
            function = cell_text.value_at(path)
            if isinstance(function, FunctionType) and _is_user_function(function):
                module = function.__globals__["__name__"]
                self.changed.update(Place(module, "", name) for name in _stored(function.__code__).names)
        for owners, strings in cell.named:
            self._follow_strings(owners, strings)

    def _follow_strings(self, owners: Iterable[cell_text.Path], strings: Iterable[str]) -> None:
        """Add all constants of each module that is an argument, unless a string names one of its attributes."""
        for path in owners:
            module = cell_text.value_at(path)
            if not isinstance(module, ModuleType) or module.__name__ not in self.modules:
                continue
            if any(name in vars(module) for name in strings):
                continue  # an assignment
            for name in _constants(module.__file__ or ""):
                if name in vars(module):
                    self._add(Place(module.__name__, "", name), vars(module)[name])

    def _follow_names(self, names: Iterable[str]) -> None:
        """Add attributes whose full names are strings, as in ``patch("torch.nn.functional.relu", my_relu)``."""
        for text in names:
            name, _, attribute = text.rpartition(".")
            module = sys.modules.get(name)
            if not isinstance(module, ModuleType) or attribute not in vars(module) or name == "__main__":
                continue
            if name.partition(".")[0] not in OF_PROCESS:
                self._add(Place(name, "", attribute), vars(module)[attribute])
                self.changed.add(Place(name, "", attribute))

    def _add(self, place: Place, value: Any) -> None:
        self.found[place] = value

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or len(self._seen) > _MAX_VISITED or not has_own_class(value):
            return
        self._seen.add(id(value))
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._visit(getattr(value, "__self__", None))
            self._visit(value.__func__)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            for kind in value.__mro__:
                self._visit_class(kind)
        elif not isinstance(value, ModuleType):
            if id(value) in self._homes:
                self._add(self._homes[id(value)], value)
            self._visit(type(value))

    def _visit_class(self, kind: type) -> None:
        module = self.modules.get(kind.__module__)
        if module is None or issubclass(kind, Enum) or "<locals>" in kind.__qualname__:
            return
        for name, value in list(vars(kind).items()):
            if not has_own_class(value):
                continue
            if isinstance(value, property):
                self._visit(value.fget)
            elif isinstance(value, (FunctionType, staticmethod, classmethod)):
                self._visit(value)
            elif not name.startswith("__") and (isinstance(value, _SIMPLE) or is_changeable(value)):
                self._add(Place(kind.__module__, kind.__qualname__, name), value)

    def _visit_function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it has no value yet
                self._visit(cell.cell_contents)
        self._visit(getattr(function, "__wrapped__", None))
        if not _is_user_function(function):
            return
        module = self.modules[function.__globals__["__name__"]]
        stored = _stored(function.__code__)
        for name in stored.read:
            value = vars(module).get(name)
            if not has_own_class(value):
                continue
            if isinstance(value, ModuleType):
                if value.__name__ in self.modules:
                    for attribute in stored.read & vars(value).keys():
                        self._visit_member(value, attribute, attribute in stored.attributes)
            elif name in vars(module):
                self._visit_member(module, name, name in stored.names)

    def _visit_member(self, module: ModuleType, name: str, is_stored: bool) -> None:
        value = vars(module)[name]
        if is_stored:
            self._add(Place(module.__name__, "", name), value)
        self._visit(value)


def _constants(file: str) -> Iterator[str]:
    """Yield the names of global variables that a module sets to constants; these are the same in each worker."""
    try:
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        with suppress(ValueError, TypeError):
            ast.literal_eval(getattr(node, "value", None))  # type: ignore[arg-type]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


class _Stored(NamedTuple):
    """Names in a function's code, including nested functions.

    Args:
        names: global variables that it assigns.
        attributes: attributes that it assigns.
        read: all global variables and attributes that it names.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    read: frozenset[str]


@lru_cache(maxsize=4096)
def _stored(code: CodeType) -> _Stored:
    codes = list(_codes(code))
    instructions = [
        (instruction.opname, instruction.argval)
        for each in codes
        if not _ASSIGNS.isdisjoint(each.co_code[::2])
        for instruction in dis.get_instructions(each)
    ]
    return _Stored(
        frozenset(name for operation, name in instructions if operation in ("STORE_GLOBAL", "DELETE_GLOBAL")),
        frozenset(name for operation, name in instructions if operation == "STORE_ATTR"),
        frozenset(name for each in codes for name in each.co_names),
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _module_of(function: FunctionType) -> ModuleType | None:
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    return module if isinstance(module, ModuleType) and vars(module) is function.__globals__ else None


def _is_user_function(function: FunctionType) -> bool:
    module = _module_of(function)
    return module is not None and _is_of_user(module)


def _is_of_user(module: ModuleType) -> bool:
    """Return whether a module is one of the user's files; the notebook itself is not."""
    return module.__name__ != "__main__" and is_user_module(module)

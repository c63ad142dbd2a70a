"""Attributes of modules and classes that cells have changed, for workers that import these modules again.

    config.lr = 0.1                    a setting in one of the user's modules
    config.options["width"] = 8        an entry of a dictionary, list or set in one of the user's modules
    Config.width = 8                   a setting in a module's class
    F.gelu = my_gelu                   a library's function, replaced by one of the notebook's
    cfg.merge({"lr": 0.1})             an object in one of the user's modules, as in ``from config import cfg``
    config.set_lr(0.1)                 a function that assigns a global variable of its module
    @registry.register                 a dictionary in an object of a module

A forked worker has the kernel's modules. A fresh process imports them, and would silently compute with their original
values. The text of the cells shows what they have changed; the values are read from the modules at launch.

If a cell calls code in the user's modules, this code may change the global variables that it names. The
current values of all these variables are sent. For an unchanged variable, this makes no difference, because a worker
would create an equal value. A value that code only reads, such as ``RANK = int(os.environ["RANK"])``, is not sent,
because each worker computes its own.

Plain values are sent (``plain_values.py``). A note names other values that a cell has assigned.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar, copy_context
from enum import Enum
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from nblaunch.user_code import is_user_module, names_in
from nblaunch.worker.inheritance import called_code, cell_text, plain_values
from nblaunch.worker.inheritance.plain_values import has_own_class, is_changeable
from nblaunch.worker.inheritance.sent_changes import Place, SentChange

MAX_BYTES = 1 << 20
"""Larger values are only named in a note, because every worker would load them even if it did not use them."""

_MAX_REACHED = 2000
"""Maximum number of functions and classes that are followed."""
_SETS = re.compile("set_|enable|disable")
_SETTING = (bool, int, float, str, type(None))
_METHODS = (property, FunctionType, staticmethod, classmethod)
_SIMPLE = (int, float, complex, str, bytes, bool, type(None), tuple, list, dict, set, frozenset)

OF_PROCESS = ("sys", "threading", "nblaunch", "IPython", "ipykernel")
"""Modules and packages whose attributes belong to the process: streams, arguments, the shell."""


class _StateOfThread(NamedTuple):
    """The value of a ``ContextVar``, or the attributes of a ``threading.local``, in the thread that launches."""

    value: Any


def read(sources: Iterable[str]) -> tuple[list[SentChange], list[str]]:
    """Return the attributes that cells have changed, with their current values, and messages about changes that can't
    be sent.

    Args:
        sources: the text of the cells.
    """
    cells = [cell_text.read(text) for text in sources]
    search = _Search()
    for cell in cells:
        search.follow_settings(cell)
    if search.modules:
        search.follow(cells)
    values, changed = search.found, search.changed
    for path, is_content in dict.fromkeys(each for cell in cells for each in cell.assigned):
        resolved = _resolve(path, is_content)
        if resolved is not None:
            place, value = resolved
            values[place] = value
            changed.add(place)
    sent: list[SentChange] = []
    left: dict[str, None] = {}
    for place, value in values.items():
        try:
            content = _content(value)
            if content is not _DEFAULT:
                sent.append(
                    SentChange.of(str(place), place.module, content, partial(_write, place), MAX_BYTES)
                )
        except Exception as error:
            if place in changed and value is not None:
                why = str(error) if isinstance(error, _NotPlain) else f"{type(error).__name__}: {error}"
                left[f"{place} ({why})"] = None
    return sent, list(left)


_DEFAULT = object()


class _NotPlain(Exception):
    """A value can't be replaced by a copy; the message describes the value."""


def _content(value: Any) -> Any:
    """Return what to send for a value; :data:`_DEFAULT` if a fresh process has it anyway.

    Raises:
        _NotPlain: a copy can't replace the value.
    """
    content = value
    if issubclass(type(value), ContextVar):
        if value not in copy_context():
            return _DEFAULT
        content = _StateOfThread(value.get(None))
    elif issubclass(type(value), threading.local):
        content = _StateOfThread(dict(vars(value)))
    if not plain_values.is_plain(content.value if isinstance(content, _StateOfThread) else content):
        raise _NotPlain(f"an object of the class {type(value).__name__}")
    return content


def _write(place: Place, module: Any, value: Any) -> None:
    path, _, name = place.path.rpartition(".")
    owner = attrgetter(path)(module) if path else module
    present = vars(owner).get(name)
    if isinstance(value, _StateOfThread):
        _set_state_of_thread(present, value.value)
    elif not plain_values.take_over(present, value):  # other modules may have imported the object itself
        setattr(owner, name, value)


def _set_state_of_thread(present: Any, value: Any) -> None:
    if isinstance(present, ContextVar):
        present.set(value)
    else:
        vars(present).clear()
        vars(present).update(value)


def _resolve(path: cell_text.Path, is_container: bool) -> tuple[Place, Any] | None:
    """Return the attribute at the end of a path that starts with a name in the notebook, and its value.

    Return None if the attribute does not belong to a module or a module's class. The attribute itself must exist,
    because the cell may assign it in a function that has not run. Properties of a module, such as torch's flags, are
    handled in ``settings.py``.
    """
    owner, last = cell_text.value_at(path[:-1]), path[-1]
    if isinstance(owner, type):
        module, qualified = sys.modules.get(owner.__module__), f"{owner.__qualname__}."
        is_found = module is not None and _found(module, owner.__qualname__) is owner
    else:
        module, qualified = owner, ""
        is_found = isinstance(owner, ModuleType) and sys.modules.get(owner.__name__) is owner
    if not is_found or module is None or last not in vars(owner) or module.__name__ == "__main__":
        return None
    if module.__name__.partition(".")[0] in OF_PROCESS or (not qualified and last.startswith("__")):
        return None
    value = vars(owner)[last]
    if is_container and not (is_changeable(value) and is_user_module(module)):
        return None
    return Place(module.__name__, f"{qualified}{last}"), value


def _found(module: ModuleType, qualified: str) -> Any:
    try:
        return attrgetter(qualified)(module)
    except AttributeError:
        return None


# --- calls of code in the user's modules ------------------------------------------------------------------------------


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
                    self._homes[id(value)] = Place(name, attribute)

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
            for name in _assigned_by(function) & vars(module).keys():
                if type(vars(module)[name]) in _SETTING:
                    self.found[Place(module.__name__, name)] = vars(module)[name]

    def follow(self, cells: Iterable[cell_text.CellText]) -> None:
        """Add what cells may have changed in the user's modules."""
        paths = dict.fromkeys(path for cell in cells for path in cell.used)
        self._follow_calls(value for path in paths for value in cell_text.values_on(path))
        for cell in cells:
            for path, is_content in cell.assigned:
                base = cell_text.value_at(path if is_content else path[:-1])
                if id(base) in self._homes:
                    self.changed.add(self._homes[id(base)])
            for path in cell.for_effect:
                function = cell_text.value_at(path)
                if isinstance(function, FunctionType) and _is_user_function(function):
                    module = function.__globals__["__name__"]
                    self.changed.update(Place(module, name) for name in _assigned_by(function))
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
                    self.found[Place(module.__name__, name)] = vars(module)[name]

    def _follow_names(self, names: Iterable[str]) -> None:
        """Add attributes whose full names are strings, as in ``patch("torch.nn.functional.relu", my_relu)``."""
        for text in names:
            name, _, attribute = text.rpartition(".")
            module = sys.modules.get(name)
            if not isinstance(module, ModuleType) or attribute not in vars(module) or name == "__main__":
                continue
            if name.partition(".")[0] not in OF_PROCESS:
                self.found[Place(name, attribute)] = vars(module)[attribute]
                self.changed.add(Place(name, attribute))

    def _follow_calls(self, values: Iterable[Any]) -> None:
        """Add what the code that these values lead to may have changed."""
        values = list(values)
        self._add_objects(values)
        for reached in called_code.reached_by(values, _MAX_REACHED):
            if isinstance(reached, type):
                self._add_attributes(reached)
            elif _is_user_function(reached):
                self._add_variables(reached)

    def _add_objects(self, values: Iterable[Any]) -> None:
        """Add those values that a module has created, and the objects whose methods are among the values."""
        for value in values:
            for each in (value, value.__self__ if type(value) is MethodType else None):
                if id(each) in self._homes:
                    self.found[self._homes[id(each)]] = each

    def _add_attributes(self, kind: type) -> None:
        if kind.__module__ not in self.modules or issubclass(kind, Enum) or "<locals>" in kind.__qualname__:
            return
        for name, value in list(vars(kind).items()):
            if name.startswith("__") or issubclass(type(value), _METHODS) or not has_own_class(value):
                continue
            if isinstance(value, _SIMPLE) or is_changeable(value):
                self.found[Place(kind.__module__, f"{kind.__qualname__}.{name}")] = value

    def _add_variables(self, function: FunctionType) -> None:
        """Add the global variables that a function assigns, and the objects among those that it names."""
        module = self.modules[function.__globals__["__name__"]]
        names, assigned = set(names_in(function.__code__)), called_code.assignments_in(function.__code__)
        named = {Place(module.__name__, name): vars(module)[name] for name in names & vars(module).keys()}
        for value in list(named.values()):
            if has_own_class(value) and isinstance(value, ModuleType) and value.__name__ in self.modules:
                for name in names & vars(value).keys():
                    named[Place(value.__name__, name)] = vars(value)[name]
        self._add_objects(named.values())
        for place, value in named.items():
            is_own = place.module == module.__name__
            if (("STORE_GLOBAL" if is_own else "STORE_ATTR"), place.path) in assigned:
                self.found[place] = value


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


def _assigned_by(function: FunctionType) -> set[str]:
    """Return the names of the global variables that a function assigns or deletes."""
    stored = called_code.assignments_in(function.__code__)
    return {name for operation, name in stored if operation in ("STORE_GLOBAL", "DELETE_GLOBAL")}


def _module_of(function: FunctionType) -> ModuleType | None:
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    return module if isinstance(module, ModuleType) and vars(module) is function.__globals__ else None


def _is_user_function(function: FunctionType) -> bool:
    module = _module_of(function)
    return module is not None and _is_of_user(module)


def _is_of_user(module: ModuleType) -> bool:
    """Return whether a module is one of the user's files; the notebook itself is not."""
    return module.__name__ != "__main__" and is_user_module(module)

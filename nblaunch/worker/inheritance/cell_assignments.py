"""Attributes of modules and classes that cells have assigned, for workers that import these modules again.

    config.lr = 0.1                    a setting in a module of the user
    config.options["width"] = 8        an entry of a dictionary, list or set in a module of the user
    Config.width = 8                   a setting in a class of a module
    F.gelu = my_gelu                   a function of a library, replaced by one of the notebook

A forked worker has the kernel's modules. A fresh process imports them, and would compute with their original values
without a word. What cells have assigned is known from their text; the values are read from the modules at the launch.

Plain values, functions and classes are sent. Other objects are named instead: a worker would get a copy of a model that
differs from the model that the function trains.
"""

from __future__ import annotations

import ast
import functools
import pickle
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from operator import attrgetter
from pathlib import PurePath
from types import ModuleType
from typing import Any, NamedTuple

from nblaunch import packages
from nblaunch.user_code import is_user_file
from nblaunch.wire.pickling import payload

_MAX_BYTES = 1 << 20
"""Larger values are named instead: functions may not use them, and every worker would load them."""

_MAX_DEPTH = 5
_PLAIN = (
    *(type(None), Number, str, bytes, range, re.Pattern, PurePath, Enum, type, ModuleType),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
)
_CONSTANTS = ("Tensor", "Size", "device", "dtype", "layout", "memory_format", "ndarray")

_CONTAINERS = (dict, list, set)
_CHANGES = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"),
}
_OF_PROCESS = ("sys", "threading", "nblaunch", "IPython", "ipykernel")
"""Modules and packages whose attributes belong to the process: streams, arguments, the shell."""

_Path = tuple[str, ...]


class AssignedAttribute(NamedTuple):
    """An attribute that a cell has assigned, or a container that a cell has changed.

    Args:
        module: name of the module.
        owner: the class in the module, as its qualified name; "" for an attribute of the module.
        name: name of the attribute.
        value: its value, pickled.
    """

    module: str
    owner: str
    name: str
    value: bytes

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


def read(sources: Iterable[str]) -> tuple[list[AssignedAttribute], list[str]]:
    """Return what cells have assigned, with the present values, and as text what can't be sent to another process.

    Args:
        sources: the text of the cells.
    """
    paths: dict[tuple[_Path, bool], None] = {}
    for text in sources:
        paths.update(dict.fromkeys(_assignments(text)))
    sent: dict[str, AssignedAttribute] = {}
    left: dict[str, None] = {}
    for path, is_container in paths:
        resolved = _resolve(path, is_container)
        if resolved is None:
            continue
        attribute, value = resolved
        if not _is_plain(value, _MAX_DEPTH):
            left[f"{attribute} (an object of the class {type(value).__name__})"] = None
            continue
        try:
            content = payload.to_bytes(value, main_by_reference=False, max_bytes=_MAX_BYTES)
        except Exception as error:
            left[f"{attribute} ({type(error).__name__}: {error})"] = None
        else:
            sent[str(attribute)] = attribute._replace(value=content)
    return list(sent.values()), list(left)


def write(attributes: Sequence[AssignedAttribute]) -> None:
    """Assign these attributes in this process, each once its module is imported."""
    for attribute in attributes:
        packages.when_imported(attribute.module, partial(_write, attribute))


def _write(attribute: AssignedAttribute, module: Any) -> None:
    try:
        value = _load(attribute.value)
        owner = attrgetter(attribute.owner)(module) if attribute.owner else module
        present = vars(owner).get(attribute.name)
        if type(value) in _CONTAINERS and type(present) is type(value):
            _replace_content(present, value)  # other modules may have imported the container itself
        else:
            setattr(owner, attribute.name, value)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        print(f"{attribute} of the kernel can't be set in this worker: {message}", file=sys.stderr)


def _load(content: bytes) -> Any:
    """Unpickle a value. Names that a function of the notebook uses come from the call, if it has sent them."""
    names = vars(sys.modules["__main__"])
    before = dict(names)
    value = pickle.loads(content)
    names.update(before)
    return value


def _replace_content(container: Any, value: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(value)


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a copy of a value is as good as the value."""
    if isinstance(value, types.FunctionType):
        parts = [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, (staticmethod, classmethod)):
        parts = [value.__func__]
    elif isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif type(value) is dict:
        parts = [*value, *value.values()]
    elif type(value) in (tuple, list, set, frozenset):
        parts = list(value)
    else:
        return isinstance(value, _PLAIN) or _is_constant_of_library(value)
    return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def _is_constant_of_library(value: Any) -> bool:
    """Return whether a value is an array, or a tensor, type or device of torch, that no optimizer changes."""
    kind = type(value)
    if kind.__module__ not in ("torch", "numpy"):
        return False
    return kind.__name__ in _CONSTANTS and not getattr(value, "requires_grad", False)


@lru_cache(maxsize=4096)
def _assignments(text: str) -> tuple[tuple[_Path, bool], ...]:
    """Return the attributes that a cell assigns, each as its names, and whether the cell changes a container."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    changed = [
        (path, is_container)
        for node in ast.walk(tree)
        for expression, is_container in _targets(node)
        if (path := _path(expression)) is not None
    ]
    return tuple(dict.fromkeys(changed))


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the expressions that a node assigns or changes, and whether they are containers."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield node.func.value, True
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        match node.args:
            case [owner, ast.Constant(value=str(name)), _]:
                yield ast.Attribute(owner, name, ast.Store()), False
    for target in targets:
        for part in ast.walk(target) if isinstance(target, (ast.Tuple, ast.List)) else (target,):
            if isinstance(part, ast.Subscript):
                yield part.value, True
            elif isinstance(part, ast.Attribute):
                yield part, False


def _path(expression: ast.expr) -> _Path | None:
    """Return ``("a", "b", "c")`` for the expression ``a.b.c``; None for other expressions and for a name alone."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    if not names or not isinstance(expression, ast.Name):
        return None
    return (expression.id, *reversed(names))


def _resolve(path: _Path, is_container: bool) -> tuple[AssignedAttribute, Any] | None:
    """Return the attribute that a path from the notebook's names leads to, and its value.

    None if it belongs to something other than a module or a module's class. The attribute itself must exist: a cell
    may define a function that has not run, and properties of a module, such as torch's flags, are other settings.
    """
    root, *names, last = path
    owner = vars(sys.modules["__main__"]).get(root)
    for name in names:
        owner = vars(owner).get(name) if isinstance(owner, (ModuleType, type)) else None
    if isinstance(owner, type):
        module, qualified = sys.modules.get(owner.__module__), owner.__qualname__
        is_found = module is not None and _found(module, qualified) is owner
    else:
        module, qualified = owner, ""
        is_found = isinstance(owner, ModuleType) and sys.modules.get(owner.__name__) is owner
    if not is_found or module is None or last not in vars(owner) or module.__name__ == "__main__":
        return None
    if module.__name__.partition(".")[0] in _OF_PROCESS or (not qualified and last.startswith("__")):
        return None
    value = vars(owner)[last]
    if is_container and not (
        type(value) in _CONTAINERS and is_user_file(getattr(module, "__file__", None) or "<")
    ):
        return None
    return AssignedAttribute(module.__name__, qualified, last, b""), value


def _found(module: ModuleType, qualified: str) -> Any:
    try:
        return attrgetter(qualified)(module)
    except AttributeError:
        return None

"""The functions that a call may reach, and the variables that their code names and assigns.

The search covers functions, methods and classes of the notebook and of the user's modules that a function
names or gets as arguments, and hooks on torch modules.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from nblaunch.user_code import captured_variables, is_user_module, module_of, names_in
from nblaunch.worker.inheritance.plain_values import has_own_class
from nblaunch.worker.inheritance.watched_values import Variable, is_for_itself

_MAX_FUNCTIONS = 200
_MAX_MODULES = 3
"""Maximum number of modules in a name, such as the two in ``package.records.add``."""
_NOTEBOOK = "__main__"
_NO_VALUE = object()
_PLAIN = (int, float, complex, str, bytes, tuple, list, dict, set, deque)


def is_users(module: str) -> bool:
    """Return whether a module is the notebook or one of the user's files.

    Args:
        module: name of the module.
    """
    return module == _NOTEBOOK or is_user_module(sys.modules.get(module))


def functions(values: Sequence[Any]) -> Iterator[FunctionType]:
    """Yield the user's functions among ``values`` and those that they may call, including module hooks."""
    pending = list(values)
    seen: set[int] = set()
    while pending and len(seen) < _MAX_FUNCTIONS:
        value = pending.pop()
        if not has_own_class(value):
            continue
        pending.extend(_hooks(value))
        while isinstance(value, (MethodType, functools.partial, staticmethod, classmethod)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        definition = value if isinstance(value, (type, FunctionType)) else type(value)
        module = module_of(definition) if isinstance(definition, type) else definition.__module__
        if id(definition) in seen or not is_users(module):
            continue
        seen.add(id(definition))
        if isinstance(definition, FunctionType):
            yield definition
            pending.extend(each for _, each in variables(definition))
        else:
            kinds = (kind for kind in definition.__mro__ if is_users(module_of(kind)))
            members = (each for kind in kinds for each in vars(kind).values())
            pending.extend(
                each for each in members if issubclass(type(each), (FunctionType, staticmethod, classmethod))
            )


def variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the outer variables that a function's code names.

    If a variable is one of the user's modules, yield its variables as well, as in ``records.history``.
    """
    names = set(names_in(function.__code__))
    is_wrapper = _is_wrapper(function)
    for name, value in captured_variables(function):
        if is_wrapper and issubclass(type(value), dict) and name in function.__code__.co_freevars:
            continue  # the decorator's own, such as the values that it has computed
        yield _full_name(function, name), value
        yield from _members(name, value, names, _MAX_MODULES)


def modules(function: FunctionType) -> Iterator[tuple[str, ModuleType, set[str]]]:
    """Yield the user's modules whose attributes a function may assign.

    Each item is the name of the module, the module, and the names of all attributes that the function
    assigns.
    """
    names = {name for operation, name in _stored(function.__code__) if operation == "STORE_ATTR"}
    if names:
        named = variables(function)
        yield from ((name, value, names) for name, value in named if _is_users_module(value))


def _members(name: str, value: Any, names: set[str], depth: int) -> Iterator[tuple[str, Any]]:
    if not depth or not _is_users_module(value):
        return
    for member in sorted(names & vars(value).keys()):
        part = vars(value)[member]
        yield f"{name}.{member}", part
        yield from _members(f"{name}.{member}", part, names, depth - 1)


def _is_users_module(value: Any) -> bool:
    return type(value) is ModuleType and is_user_module(value)


def _full_name(function: FunctionType, name: str) -> str:
    """Return a variable's name, after the module's name if it is global to one of the user's modules."""
    is_closure = name in function.__code__.co_freevars
    return name if is_closure or function.__module__ == _NOTEBOOK else f"{function.__module__}.{name}"


def _is_wrapper(function: FunctionType) -> bool:
    """Return whether a decorator has created this function to call one that is defined elsewhere."""
    scope = function.__qualname__.rpartition(".")[0]
    return any(
        issubclass(type(value), FunctionType) and not value.__qualname__.startswith(f"{scope}.")
        for value in map(_content, function.__closure__ or ())
    )


def _hooks(value: Any) -> Iterator[Any]:
    """Yield the hooks of a module, if it is one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        for part in value.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks):
                yield from hooks.values()


# --- assigned variables ----------------------------------------------------------------------------------------------


def assigned(function: FunctionType) -> Iterator[Variable]:
    """Yield the variables that a function assigns but that are defined outside it."""
    stored = set(_stored(function.__code__))
    names = {name for operation, name in stored if operation == "STORE_GLOBAL"}
    is_in_notebook = function.__module__ == _NOTEBOOK
    variables = vars(sys.modules[_NOTEBOOK]) if is_in_notebook else function.__globals__
    for name in sorted(names):
        if not is_for_itself(name):
            yield _assignable(_full_name(function, name), functools.partial(variables.get, name, _NO_VALUE))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if ("STORE_DEREF", name) in stored and not is_for_itself(name):
            yield _assignable(name, functools.partial(_content, cell))


def _assignable(name: str, get: Callable[[], Any]) -> Variable:
    before = get()

    def has_changed(value: Any) -> bool:
        return value is not before and type(value) is not bool and issubclass(type(value), _plain_types())

    return Variable(name, get, has_changed)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return _NO_VALUE


def _stored(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the operations that store variables, and the variables' names, including those in nested functions."""
    for instruction in dis.get_instructions(code):
        # A nested function names the variables of the outer one among its free variables.
        is_stored = instruction.opname in ("STORE_GLOBAL", "STORE_ATTR")
        if is_stored or instruction.argval in code.co_freevars:
            yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored(constant)


def _plain_types() -> tuple[type, ...]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (*_PLAIN, *([torch.Tensor] if torch else []), *([numpy.ndarray, numpy.number] if numpy else []))

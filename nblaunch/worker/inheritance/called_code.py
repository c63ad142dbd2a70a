"""The user's functions and classes that a call may reach, and the variables that their code names and assigns.

The search covers functions, methods and classes that a function names or gets as arguments, if the notebook or the
user's modules define them, and hooks on torch modules.
"""

from __future__ import annotations

import dis
import functools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from nblaunch import packages
from nblaunch.user_code import captured_variables, content_of, is_user_module, is_users, module_of, names_in
from nblaunch.worker.inheritance.plain_values import has_own_class

_MAX_REACHED = 200
_MAX_MODULES = 3
"""Maximum number of modules in a name, such as the two in ``package.records.add``."""

COUNT, COUNT_VARIABLE = "COUNT", "COUNT_VARIABLE"
"""Operations of an attribute and of a variable to which code adds, as in ``self.n += 1`` and ``n += 1``."""

ANY_NAME = "*"
"""In the names that code reads: it may read all attributes and variables without naming them."""

_METHODS = (FunctionType, staticmethod, classmethod, property)
_OPERATIONS = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "STORE_DEREF")
_OPCODES = {dis.opmap[name] for name in _OPERATIONS}
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_READ_ALL = {"vars", "__dict__", "getattr", "attrgetter", "asdict", "astuple", "globals"}


def reached_by(values: Iterable[Any], limit: int = _MAX_REACHED) -> Iterator[FunctionType | type]:
    """Yield the user's functions and classes among ``values``, and those that they may call.

    Args:
        values: functions, classes, and other values, which stand for their classes.
        limit: maximum number of functions and classes.
    """
    pending = list(values)
    seen: set[int] = set()
    num_reached = 0
    while pending and num_reached < limit:
        value = pending.pop()
        if not has_own_class(value):
            continue
        pending.extend(_hooks(value))
        while isinstance(value, (MethodType, functools.partial, staticmethod, classmethod)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        if isinstance(value, property):
            value = value.fget
        is_function = isinstance(value, FunctionType)
        kind = value if isinstance(value, type) else type(value)
        for each in (value,) if is_function else kind.__mro__:
            if id(each) in seen:
                continue
            seen.add(id(each))
            if is_users(each.__module__ if is_function else module_of(each)):
                yield each
                num_reached += 1
                pending.extend(_used_by(each))
            elif isinstance(each, FunctionType):  # a library's decorator may have created it
                pending.extend(map(content_of, each.__closure__ or ()))


def _used_by(definition: FunctionType | type) -> Iterator[Any]:
    """Yield what a function names, or the methods of a class."""
    if isinstance(definition, FunctionType):
        yield from (value for _, value in variables(definition))
    else:
        yield from (each for each in vars(definition).values() if issubclass(type(each), _METHODS))


@functools.lru_cache(maxsize=4096)
def assignments_in(code: CodeType) -> frozenset[tuple[str, str]]:
    """Return the operations that assign attributes and variables defined elsewhere, and the assigned names.

    Code of nested functions is included. The outer function's variables are free variables of the nested function. An
    attribute that the code uses as a counter also has the operation :data:`COUNT`, and a variable
    :data:`COUNT_VARIABLE`.
    """
    assigned: set[tuple[str, str]] = set()
    if not _OPCODES.isdisjoint(code.co_code[::2]):
        before: deque[dis.Instruction] = deque(maxlen=2)  # the second one moves the sum on the stack
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _OPERATIONS and any(map(_is_in_place, before)):
                assigned.add((COUNT if instruction.opname == "STORE_ATTR" else COUNT_VARIABLE, name))
            before.append(instruction)
            if instruction.opname in _OPERATIONS[:-1] or (
                instruction.opname == _OPERATIONS[-1] and name in code.co_freevars
            ):
                assigned.add((instruction.opname, name))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            assigned |= assignments_in(constant)
    return frozenset(assigned)


@functools.lru_cache(maxsize=4096)
def reads_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and outer variables that code reads, not only to add to them.

    Code of nested functions is included, and :data:`ANY_NAME` if it reads attributes without naming them.
    """
    num_reads: Counter[str] = Counter()
    before: deque[dis.Instruction] = deque(maxlen=2)
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            num_reads[instruction.argval] += 1
        elif instruction.opname in _OPERATIONS and any(map(_is_in_place, before)):
            num_reads[instruction.argval] -= 1
        before.append(instruction)
    read = {name for name, number in num_reads.items() if number > 0}
    nested = (reads_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(read).union(*nested, () if read.isdisjoint(_READ_ALL) else (ANY_NAME,))


def _is_in_place(instruction: dis.Instruction) -> bool:
    is_of_name = instruction.opname.startswith("INPLACE_")  # until Python 3.10
    return is_of_name or (instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("="))


def variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the outer variables that a function's code names.

    If a variable is one of the user's modules, yield its variables as well, as in ``records.history``.
    """
    names = set(names_in(function.__code__))
    is_wrapper = _is_wrapper(function)
    for name, value in captured_variables(function):
        if is_wrapper and issubclass(type(value), dict) and name in function.__code__.co_freevars:
            continue  # the decorator's own dictionary, such as a cache of computed values
        yield full_name(function, name), value
        yield from _members(name, value, names, _MAX_MODULES)


def modules(function: FunctionType) -> Iterator[tuple[str, ModuleType, set[str]]]:
    """Yield the user's modules whose attributes a function may assign.

    Each item is the name of the module, the module, and the names of all attributes that the function
    assigns.
    """
    names = {name for operation, name in assignments_in(function.__code__) if operation == "STORE_ATTR"}
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


def full_name(function: FunctionType, name: str) -> str:
    """Return a variable's name, preceded by the module's name if it is a global variable of a user's module."""
    is_closure = name in function.__code__.co_freevars
    return name if is_closure or function.__module__ == "__main__" else f"{function.__module__}.{name}"


def _is_wrapper(function: FunctionType) -> bool:
    """Return whether a decorator has created this function to call another that is defined elsewhere."""
    scope = function.__qualname__.rpartition(".")[0]
    return any(
        issubclass(type(value), FunctionType) and not value.__qualname__.startswith(f"{scope}.")
        for value in map(content_of, function.__closure__ or ())
    )


def _hooks(value: Any) -> Iterator[Any]:
    """Yield the hooks on ``value`` if it is a torch module."""
    if packages.is_subclass(type(value), "torch.nn.Module"):
        for part in value.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks):
                yield from hooks.values()

"""Determines from a cell's text which objects the cell may have changed."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from nblaunch.worker.inheritance.plain_values import has_own_class

Path = tuple[str, ...]
"""The names in an expression such as ``a.b.c``."""

_CHANGES = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"),
}
_SETTERS = {"setattr", "delattr", "vars", "patch", "object", "multiple", "dict"}
"""Functions, such as ``unittest.mock.patch.object``, that change attributes named by strings."""

_MAGICS = {"run_cell_magic", "run_line_magic"}


class Named(NamedTuple):
    """An attribute that a call names in a string, as in ``setattr(config, "lr", 0.1)`` or ``patch("config.lr", 0.1)``.

    Args:
        owners: paths of the arguments that may have the attribute.
        strings: strings and keywords among the arguments.
    """

    owners: tuple[Path, ...]
    strings: tuple[str, ...]


class CellText(NamedTuple):
    """The expressions in a cell that may change the objects that they name.

    Args:
        assigned: paths of attributes that the cell assigns, deletes or modifies, each with whether only its content
            changes.
        used: paths of functions that the cell calls, of their arguments, and of decorators.
        for_effect: paths of functions that the cell calls without using their return values.
        named: attributes that the cell names in strings.
    """

    assigned: tuple[tuple[Path, bool], ...]
    used: tuple[Path, ...]
    for_effect: tuple[Path, ...]
    named: tuple[Named, ...]


@lru_cache(maxsize=4096)
def read(text: str) -> CellText:
    """Return what a cell may have changed."""
    nodes = list(_nodes(text))
    assigned = [(path, is_content) for node in nodes for path, is_content in _assigned(node)]
    used = [path for node in nodes for path in _used(node)]
    for_effect = [
        path
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        for path in paths(node.value.func)
    ]
    named = [name for node in nodes if isinstance(node, ast.Call) for name in _named(node)]
    return CellText(
        tuple(dict.fromkeys(assigned)),
        tuple(dict.fromkeys(used)),
        tuple(dict.fromkeys(for_effect)),
        tuple(dict.fromkeys(named)),
    )


def _nodes(text: str) -> Iterator[ast.AST]:
    try:
        pending: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError):
        return
    while pending:
        for node in ast.walk(pending.pop()):
            yield node
            for code in _code_of_magic(node):
                pending.extend(code)


def _assigned(node: ast.AST) -> Iterator[tuple[Path, bool]]:
    for target, is_content in _targets(node):
        for path in paths(target):
            if len(path) > 1:
                yield path, is_content
    for owners, strings in _named(node) if isinstance(node, ast.Call) else ():
        yield from (((*owner, name), False) for owner in owners for name in strings if name.isidentifier())


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the expressions that a node assigns or changes, and whether they are containers."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield node.func.value, True
    for target in targets:
        for part in ast.walk(target) if isinstance(target, (ast.Tuple, ast.List)) else (target,):
            if isinstance(part, ast.Subscript):
                yield part.value, True
            elif isinstance(part, ast.Attribute):
                yield part, False


def _used(node: ast.AST) -> Iterator[Path]:
    if isinstance(node, ast.Call):
        for expression in (node.func, *node.args, *(keyword.value for keyword in node.keywords)):
            yield from paths(expression)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        for expression in node.decorator_list:
            yield from paths(expression)
    for target, is_content in _targets(node):
        for path in paths(target):
            yield path if is_content else path[:-1]


def _named(node: ast.Call) -> Iterator[Named]:
    name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    if name not in _SETTERS:
        return
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    strings = [
        argument.value
        for argument in arguments
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    strings.extend(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    owners = [path for argument in arguments for path in paths(argument)]
    if strings or owners:
        yield Named(tuple(owners), tuple(strings))


def statements(text: str) -> Iterator[tuple[ast.stmt, tuple[Condition, ...]]]:
    """Yield a cell's statements, except for statements in functions and loops, with their conditions."""
    pending: list[tuple[ast.stmt, tuple[Condition, ...]]]
    try:
        pending = [(statement, ()) for statement in ast.parse(text).body[::-1]]
    except (SyntaxError, ValueError):
        return
    while pending:
        statement, conditions = pending.pop()
        yield statement, conditions
        for body in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.With)):
                inner = conditions
                if isinstance(statement, ast.If):
                    inner = (*conditions, Condition(statement.test, body == "body"))
                pending.extend((each, inner) for each in reversed(getattr(statement, body, ())))
        if isinstance(statement, ast.Expr):
            for code in _code_of_magic(statement.value):
                pending.extend((each, conditions) for each in code[::-1])


class Condition(NamedTuple):
    """The test of an ``if``, and the value that lets a statement run."""

    test: ast.expr
    value: bool

    def excludes(self) -> bool:
        """Return whether the statement can't have run, assuming that the variables have not changed since.

        Only constants and variables are evaluated, because the statement below ``if "mine" not in registry:`` may have
        changed that condition.
        """
        test, value = self
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, value = test.operand, not value
        if isinstance(test, ast.Constant):
            return bool(test.value) is not value
        values = [value_at(path) for path in paths(test)]
        return bool(values) and type(values[0]) in (bool, int, str) and bool(values[0]) is not value


def _code_of_magic(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the code of ``%%time`` or ``%time``, taken from the call that IPython turns the magic into."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAGICS:
        for argument in node.args[1:]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                with suppress(SyntaxError, ValueError):
                    yield ast.parse(argument.value).body


def values_on(path: Path) -> list[Any]:
    """Return the value of each part of a path that starts in the notebook, up to the first part that does not exist.

    Properties are not evaluated.
    """
    names = vars(sys.modules["__main__"])
    if not path or path[0] not in names:
        return []
    values = [names[path[0]]]
    if not has_own_class(values[0]):
        return []
    for name in path[1:]:
        value = inspect.getattr_static(values[-1], name, _NOTHING)
        if value is _NOTHING or not has_own_class(value) or isinstance(value, property):
            break
        values.append(value)
    return values


def value_at(path: Path) -> Any:
    """Return the value at the end of a path that starts in the notebook; None if the path does not exist."""
    values = values_on(path)
    return values[-1] if values and len(values) == len(path) else None


_NOTHING = object()


def paths(expression: ast.expr) -> Iterator[Path]:
    """Yield the path ``("a", "b", "c")`` for the expression ``a.b.c``; nothing for an expression that is not a path."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    if isinstance(expression, ast.Name):
        yield (expression.id, *reversed(names))

"""The number of epochs that a training function will run, read from its active ``for`` loops.

    def train():
        for fold in range(5):                    # 5 x 10 epochs
            for epoch in range(num_epochs):
                for batch in loader:             # read here, at the beginning of each epoch

Python does not expose the iterator of a running loop. The loops are therefore found in the source of the user's frames,
and their iterables are evaluated from the variables in these frames. An iterable may contain numbers, names,
attributes, ``range`` and ``len``, and may be wrapped in a progress bar such as tqdm. None of the user's code runs. The
number is unknown if a loop can't be analysed with certainty: a ``while`` loop, a loop over an iterator, a counter that
the body changes, or another training loop that follows.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from nblaunch.user_code import is_own_file, is_standard_file, is_user_file

_BARS = frozenset({"tqdm", "trange", "tqdm_notebook", "track", "progress_bar", "master_bar", "enumerate"})
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
}
_TRAINS = frozenset({"backward", "step"})
_CALLERS = ("nblaunch.worker.", "nblaunch.session.", "nblaunch.start_methods.")
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


class _UnknownError(Exception):
    """A loop can't be analysed with certainty."""


class EpochPlan(NamedTuple):
    """A framework's information about its epochs.

    Args:
        epoch: the number of the current epoch, counted from 1.
        num_epochs: total number of epochs; 0 if unknown.
        length: number of batches per epoch; -1 if only the loader knows it.
    """

    epoch: int
    num_epochs: int
    length: int = -1


class Place(NamedTuple):
    """The current iteration of a loop.

    Args:
        position: index of the iteration, counted from 0.
        size: number of iterations.
        num_before: iterations of an earlier run: 3 in ``range(3, 10)``, which resumes training.
    """

    position: int
    size: int
    num_before: int = 0


def iterations_left(places: Sequence[Place] | None) -> int:
    """Return the number of remaining iterations of the innermost loop, including the current one; 0 if unknown."""
    left, length = 1, 1
    for place in places or ():
        left += (place.size - 1 - place.position) * length
        length *= place.size
    return 0 if places is None else left


def places_around(frame: FrameType | None, *, is_inside: bool = False) -> list[Place] | None:
    """Return the positions of the ``for`` loops around the code that runs in ``frame``, innermost first; None if
    unknown.

    Args:
        frame: frame at which to begin; frames of libraries are left out.
        is_inside: whether the code is in the body of the innermost loop. Otherwise it is in the header of a loop, and
            that loop is left out.
    """
    try:
        return [_place_in(loop, user_frame) for loop, user_frame in _loops_around(frame, is_inside)]
    except _UnknownError:
        return None
    except Exception:  # a user's object raises an error; the display must not end training
        return None


def _loops_around(frame: FrameType | None, is_inside: bool) -> Iterator[tuple[ast.For, FrameType]]:
    """Yield the loops around the iteration that is beginning, innermost first, each with its frame.

    Raises:
        _UnknownError: the iteration is in a loop whose length is unknown, or in a library that may have such a loop.
    """
    is_first = True
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            if frame.f_code.co_name in _COMPREHENSIONS and not is_first:
                raise _UnknownError
            for loop in _loops_in(frame, ignores_later=is_inside):
                yield loop, frame
            is_first = False
        elif _begins_function(frame):
            return
        elif not (is_own_file(filename) or is_standard_file(filename) or is_first):
            raise _UnknownError  # perhaps a library's loop over epochs
        frame = frame.f_back


def _begins_function(frame: FrameType) -> bool:
    """Return whether ``frame`` belongs to the code that calls the user's function; its callers belong to the kernel."""
    return str(frame.f_globals.get("__name__", "")).startswith(_CALLERS)


def _loops_in(frame: FrameType, *, ignores_later: bool) -> Sequence[ast.For]:
    """Return the loops that enclose the current line of a frame, innermost first; only loops in the frame's own
    function count.

    Args:
        frame: frame of the user's code.
        ignores_later: ignore training loops that follow, because only the positions of running loops are needed.
    """
    code = frame.f_code
    loops = _loops_at(code.co_filename, code.co_name, code.co_firstlineno, frame.f_lineno, ignores_later)
    if loops is None:
        raise _UnknownError
    return loops


@lru_cache(maxsize=64)
def _loops_at(
    filename: str, name: str, first_line: int, line: int, ignores_later: bool
) -> Sequence[ast.For] | None:
    """Return the loops around a line of a function, innermost first; None if they can't be read."""
    body = _function_at(filename, name, first_line)
    loops: list[ast.For] = []
    try:
        _descend(body or (), line, loops, None if ignores_later else _read_at(body or (), line))
    except _UnknownError:
        return None
    return None if body is None else loops[::-1]


def _read_at(body: Sequence[ast.stmt], line: int) -> str:
    """Return the iterable (the loader) of the loop whose head is at ``line``; empty if there is no such loop."""
    nodes = (node for statement in body for node in ast.walk(statement))
    heads = (
        node for node in nodes if isinstance(node, ast.For) and node.lineno <= line < node.body[0].lineno
    )
    return next((ast.dump(node.iter) for node in heads), "")


def _descend(body: Sequence[ast.stmt], line: int, loops: list[ast.For], read: str | None) -> None:
    """Add the loops in ``body`` that enclose ``line``, outermost first.

    Args:
        body: statements.
        line: line of one of the statements.
        loops: list that the loops are added to.
        read: result of :func:`_read_at`; None: later statements do not matter.
    """
    for index, statement in enumerate(body):
        if not statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            continue
        if read is not None and any(_trains(later, read) for later in body[index + 1 :]):
            raise _UnknownError  # the function trains again
        is_inside = isinstance(statement, (ast.For, ast.While)) and line >= statement.body[0].lineno
        if isinstance(statement, ast.While) and is_inside:
            raise _UnknownError
        if isinstance(statement, ast.For) and is_inside and line <= _last_line(statement.body):
            if _assigns(statement.body, _counter_of(statement)):
                raise _UnknownError
            loops.append(statement)
        for inner in _blocks(statement):
            _descend(inner, line, loops, read)
        return


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, ())
    for name in ("handlers", "cases"):
        yield from (part.body for part in getattr(statement, name, ()))


def _last_line(body: Sequence[ast.stmt]) -> int:
    return body[-1].end_lineno or body[-1].lineno


def _trains(statement: ast.stmt, read: str) -> bool:
    """Return whether a statement has a loop that reads the same loader, computes gradients or steps an optimizer."""
    loops = [node for node in ast.walk(statement) if isinstance(node, (ast.For, ast.While))]
    return any(
        (isinstance(loop, ast.For) and ast.dump(loop.iter) == read)
        or any(isinstance(node, ast.Attribute) and node.attr in _TRAINS for node in ast.walk(loop))
        for loop in loops
    )


def _counter_of(loop: ast.For) -> str:
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else loop.target
    if not isinstance(target, ast.Name):
        raise _UnknownError
    return target.id


def _assigns(body: Sequence[ast.stmt], name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for statement in body
        for node in ast.walk(statement)
    )


def _function_at(filename: str, name: str, first_line: int) -> Sequence[ast.stmt] | None:
    """Return the statements of the function or module that a code object was compiled from."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None
    if name == "<module>":
        return tree.body
    if name in _COMPREHENSIONS or name == "<lambda>":
        return ()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first_line in (first, node.lineno):
                return node.body
    return None


# --- what a loop iterates over ---------------------------------------------------------------------------------------


def _place_in(loop: ast.For, frame: FrameType) -> Place:
    """Return the current iteration of a loop."""
    counter = _counter_of(loop)
    items, is_counted = _items(loop.iter, frame)
    if is_counted != isinstance(loop.target, ast.Tuple):
        raise _UnknownError
    value = frame.f_locals.get(counter, frame.f_globals.get(counter))
    numbers = range(len(items)) if is_counted else items
    if isinstance(numbers, range):  # not searched, because a loop over steps may have millions of items
        places = [numbers.index(value)] if type(value) is int and value in numbers else []
    else:
        places = [place for place, item in enumerate(numbers) if item is value or _are_equal(item, value)]
    if len(places) != 1:
        raise _UnknownError
    return Place(places[0], len(items), _num_before(loop.iter, items))


def _num_before(node: ast.expr, items: Sequence[Any]) -> int:
    """Return the number of iterations before the first of ``items``; epochs may be numbered from 0 or from 1."""
    if not isinstance(items, range) or items.step != 1 or items.start <= 0:
        return 0
    while isinstance(node, ast.Call) and isinstance(node.args[0], ast.Call):  # a bar around the range
        node = node.args[0]
    # ``range(start, num_epochs + 1)`` counts from 1.
    stop = node.args[-1] if isinstance(node, ast.Call) else None
    match stop:
        case ast.BinOp(op=ast.Add(), right=ast.Constant(value=1)):
            return items.start - 1
    return items.start - 1 if items.start == 1 else items.start


def _are_equal(item: Any, value: Any) -> bool:
    return type(item) is type(value) and type(item) in (int, float, str) and bool(item == value)


def _items(node: ast.expr, frame: FrameType) -> tuple[Sequence[Any], bool]:
    """Return what a loop iterates over, and whether ``enumerate`` counts the items from 0."""
    if isinstance(node, ast.Call) and node.args:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("range", "trange") and _is_standard(node.func, frame):
            return range(*(_whole(argument, frame) for argument in node.args)), False
        if function in _BARS and _is_standard(node.func, frame):
            if function == "enumerate" and (len(node.args) > 1 or node.keywords):
                raise _UnknownError
            items, is_counted = _items(node.args[0], frame)
            return items, is_counted or function == "enumerate"
        raise _UnknownError
    value = _value(node, frame)
    if type(value) not in (list, tuple, range):
        raise _UnknownError
    return value, False


def _is_standard(node: ast.expr, frame: FrameType) -> bool:
    """Return whether a name such as ``range`` refers here to either Python's own function or a library's progress
    bar.
    """
    if isinstance(node, ast.Attribute):
        return True
    value = _value(node, frame)
    code = getattr(value, "__code__", None)
    return value is getattr(builtins, getattr(node, "id", ""), None) or (
        code is None or not is_user_file(code.co_filename)
    )


def _whole(node: ast.expr, frame: FrameType) -> int:
    value = _value(node, frame)
    if not isinstance(value, int):
        raise _UnknownError
    return int(value)


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of an expression without running any of the user's code."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _named(node.id, frame)
        case ast.Tuple() | ast.List():
            return [_value(element, frame) for element in node.elts]
        case ast.Attribute():
            return _attribute(_value(node.value, frame), node.attr)
        case ast.Subscript():
            owner, key = _value(node.value, frame), _value(node.slice, frame)
            if isinstance(owner, (dict, list, tuple)):
                return owner[key]
        case ast.UnaryOp(op=ast.USub()):
            return -_whole(node.operand, frame)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_whole(node.left, frame), _whole(node.right, frame))
        case ast.Call(func=ast.Name(id=("int" | "len") as name), args=[argument]):
            value = _value(argument, frame)
            is_plain = type(value) in ((int, float) if name == "int" else (list, tuple, range, dict))
            if is_plain and _named(name, frame) is getattr(builtins, name):
                return int(value) if name == "int" else len(value)
    raise _UnknownError


def _named(name: str, frame: FrameType) -> Any:
    for names in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in names:
            return names[name]
    raise _UnknownError


def _attribute(owner: Any, name: str) -> Any:
    """Return a stored (not computed) attribute of a Namespace, a dataclass or a configuration class."""
    for names in (getattr(owner, "__dict__", {}), *(vars(kind) for kind in type(owner).__mro__)):
        if name in names and isinstance(names[name], (int, float, str, list, tuple, range, dict)):
            return names[name]
    raise _UnknownError

"""Source around a line of user code: the loop around it, and the rank-dependent condition that guards it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

_RANK_NAMES = re.compile(
    r"rank|main_process|last_process|process_index|process_zero|is_main\b|is_master|is_primary|master_process",
    re.IGNORECASE,
)
"""Names whose values differ between ranks."""

_MAX_CONDITION = 80  # characters


_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Loop:
    """A loop in a file, with its first and last line."""

    filename: str
    first: int
    last: int

    def contains(self, filename: str, line: int) -> bool:
        """Return whether a line is inside the loop."""
        return filename == self.filename and self.first <= line <= self.last

    def is_left_at(self, places: Iterable[tuple[str, int]]) -> bool:
        """Return whether a rank has left the loop, judging only by lines in the loop's function.

        Args:
            places: files and lines of the rank's stack or of part of it.
        """
        function = _function_around(self.filename, self.first)
        here = [
            line
            for filename, line in places
            if filename == self.filename and _function_around(filename, line) is function
        ]
        return bool(here) and all(self._is_past(line) for line in here)

    def is_called_at(self, places: Iterable[tuple[str, int]]) -> bool:
        """Return whether a function around one of the lines calls the function that contains the loop."""
        name = getattr(_function_around(self.filename, self.first), "name", "")
        around = [_function_around(filename, line) for filename, line in places if filename == self.filename]
        return bool(name) and any(name in _called_by(function) for function in around)

    def _is_past(self, line: int) -> bool:
        """Return whether a line of the same function comes after the loop, or is in a loop around it."""
        if self.contains(self.filename, line):
            return False
        return line > self.last or any(
            isinstance(node, _LOOPS) and node.lineno < self.first
            for node in _around(self.filename, self.first)
            if node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[attr-defined]
        )


def loop_around(filename: str, line: int) -> Loop | None:
    """Return the innermost loop around a line; None if there is none or the source is unavailable."""
    loops = [node for node in _around(filename, line) if isinstance(node, _LOOPS) and _is_in(node.body, line)]
    return Loop(filename, loops[-1].lineno, loops[-1].end_lineno or loops[-1].lineno) if loops else None


def _function_around(filename: str, line: int) -> ast.AST | None:
    """Return the innermost function around a line; None if there is none."""
    functions = [
        node
        for node in _around(filename, line)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    ]
    return functions[-1] if functions else None


def _called_by(function: ast.AST | None) -> set[str]:
    """Return the names of the functions that a function calls."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)] if function else []
    return {getattr(called, "id", getattr(called, "attr", "")) for called in calls}


def condition_on_rank(filename: str, line: int) -> str:
    """Return the condition, such as ``if rank == 0``, that lets only some ranks reach a line; empty if none does."""
    for node in reversed(list(_around(filename, line))):
        if isinstance(node, (ast.If, ast.While)) and _is_in(node.body, line):
            word, test = ("if", node.test) if isinstance(node, ast.If) else ("while", node.test)
        elif isinstance(node, ast.If) and _is_in(node.orelse, line):
            word, test = "the else of if", node.test
        elif isinstance(node, ast.IfExp):
            word, test = "if", node.test
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [
                decorator
                for decorator in map(ast.unparse, node.decorator_list)
                if _RANK_NAMES.search(decorator)
            ]
            if decorators:
                return f"@{decorators[0]}"
            return ""  # conditions around a definition do not guard calls to it
        else:
            continue
        text = ast.unparse(test)
        if _RANK_NAMES.search(text):
            return f"{word} {text if len(text) <= _MAX_CONDITION else text[: _MAX_CONDITION - 3] + '...'}"
    return ""


def _is_in(nodes: list[ast.stmt], line: int) -> bool:
    return bool(nodes) and nodes[0].lineno <= line <= (nodes[-1].end_lineno or nodes[-1].lineno)


def _around(filename: str, line: int) -> Iterator[ast.AST]:
    """Yield the nodes that contain a line, outermost first."""
    tree = _tree(filename, "".join(linecache.getlines(filename)))
    pending: list[ast.AST] = [tree] if tree is not None else []
    while pending:
        node = pending.pop(0)
        first = getattr(node, "lineno", None)
        if first is not None:
            first = min([first, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            if not first <= line <= (getattr(node, "end_lineno", None) or first):
                continue
            yield node
        pending.extend(ast.iter_child_nodes(node))


@lru_cache(maxsize=16)
def _tree(filename: str, source: str) -> ast.AST | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None

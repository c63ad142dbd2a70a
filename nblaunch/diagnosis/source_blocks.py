"""Source around a line of user code: its loop, and the condition on the rank that guards it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_RANK_NAMES = re.compile(
    r"rank|main_process|last_process|process_index|process_zero|is_main\b|is_master|is_primary|master_process",
    re.IGNORECASE,
)
"""Names whose values differ between ranks."""

_MAX_CONDITION = 80  # characters


@dataclass(frozen=True)
class Loop:
    """A loop in a file, with its first and last line."""

    filename: str
    first: int
    last: int

    def contains(self, filename: str, line: int) -> bool:
        """Return whether a line is inside the loop."""
        return filename == self.filename and self.first <= line <= self.last


def loop_around(filename: str, line: int) -> Loop | None:
    """Return the innermost loop around a line; None if there is none or the source is unavailable."""
    loops = [
        node
        for node in _around(filename, line)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and _is_in(node.body, line)
    ]
    return Loop(filename, loops[-1].lineno, loops[-1].end_lineno or loops[-1].lineno) if loops else None


def condition_on_rank(filename: str, line: int) -> str:
    """Return the condition that lets only some ranks reach a line, such as ``if rank == 0``; empty if there is none."""
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
            return ""  # conditions around a definition do not guard its calls
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

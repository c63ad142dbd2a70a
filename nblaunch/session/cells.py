"""Code that runs like a cell of a notebook: in ``__main__``, with ``await`` at the top, magics, and a last value."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import sys
from types import CodeType
from typing import Any

from nblaunch.worker import output

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def run(code: str, filename: str, first_line: int = 1, source: str = "") -> tuple[bool, Any]:
    """Run ``code`` in ``__main__``; return whether its last line is an expression without ``;``, and its value.

    Args:
        code: Python, with what IPython adds to it where the process has a shell.
        filename: by which tracebacks name it.
        first_line: number of its first line in ``source``.
        source: the text of which it is a part, for tracebacks; empty = ``code``.

    Raises:
        BaseException: what the code raises.
    """
    remember_source(filename, source or code)
    # IPython drops empty lines at the beginning.
    num_before = first_line - 1 + code[: len(code) - len(code.lstrip())].count("\n")
    tree = ast.parse("\n" * num_before + _transformed(code).lstrip("\n"), filename)
    last = tree.body[-1] if tree.body else None
    is_value = isinstance(last, ast.Expr) and not code.rstrip().endswith(";")
    statements = tree.body[:-1] if is_value else tree.body
    names = vars(sys.modules["__main__"])
    _evaluate(compile(ast.Module(statements, tree.type_ignores), filename, "exec", _FLAGS), names)
    if not is_value:
        return False, None
    assert isinstance(last, ast.Expr)
    return True, _evaluate(compile(ast.Expression(last.value), filename, "eval", _FLAGS), names)


def _evaluate(code: CodeType, names: dict[str, Any]) -> Any:
    value = eval(code, names)
    return _loop().run_until_complete(value) if code.co_flags & inspect.CO_COROUTINE else value


_own_loop: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the cells of this process: tasks and connections of one go on in the next."""
    global _own_loop
    if _own_loop is None:
        _own_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(_own_loop)
    return _own_loop


def remember_source(filename: str, source: str) -> None:
    """Let tracebacks show the lines of ``source`` for ``filename``."""
    lines = [f"{line}\n" for line in source.splitlines()]
    linecache.cache[filename] = (len(source), None, lines, filename)


def _transformed(code: str) -> str:
    """Return ``code`` in plain Python: IPython's magics and shell commands are calls in it."""
    shell = output.current_shell()
    return code if shell is None else str(shell.transform_cell(code))

"""The worker's exception made again, with its original type, causes and frames.

Traceback objects can't be pickled, so a worker sends file, line and function of each frame, and :func:`make_traceback`
compiles functions that raise at these lines. Then pdb, ``traceback`` and IPython show the worker's frames with the
source of the cell.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from types import CodeType, FunctionType, TracebackType

from nblaunch.errors import WorkerFailed
from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.user_code import is_own_file
from nblaunch.wire import exceptions
from nblaunch.wire.exceptions import MAX_CHARACTERS, fewer_lines, shortened

_SHOWN_CHARACTERS = 4000


def rebuild(failed: Failed, *, is_remote: bool = False) -> BaseException:
    """Return the worker's exception for the kernel to raise, with the worker's frames in its traceback.

    Causes and exceptions of a group have their frames as well.

    Args:
        failed: report of the worker.
        is_remote: the failure is on another machine, which sends text only; the class is looked up by its name.
    """
    error = _from_text(failed.info) if is_remote else _load(failed)
    if error is None:
        error = _failure(failed, "only text comes from other machines, and its class is not loaded here")
    _give_traceback(error, failed.info)
    return error


def _give_traceback(error: BaseException, info: ExceptionInfo) -> None:
    frames = [frame for frame in info.frames if not is_own_file(frame.filename)]
    BaseException.with_traceback(error, make_traceback(frames))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None and info.cause is not None:
        cause = _from_text(info.cause) or stand_in(info.cause.type_name, info.cause.message)
        put_before(error, cause, info)
    if cause is not None and info.cause is not None:
        _give_traceback(cause, info.cause)
    for part, part_info in zip(exceptions.parts_of(error), info.parts, strict=False):
        _give_traceback(part, part_info)


def _load(failed: Failed) -> BaseException:
    """Unpickle the exception; return a :class:`WorkerFailed` with its text if that fails."""
    why = "its class or contents can't be pickled, or are too large"
    if failed.exception is not None:
        try:
            return _with_text(exceptions.load(failed.exception), failed.info.message)
        except Exception as error:
            why = f"it can't be rebuilt in this process ({type(error).__name__}: {error})"
    return _failure(failed, why)


def _failure(failed: Failed, why: str) -> WorkerFailed:
    return WorkerFailed(
        f"rank {failed.rank} raised {failed.info.type_name}: {failed.info.message}\n"
        f"({failed.info.type_name} itself can't be raised here, because {why})",
        rank=failed.rank,
    )


def _from_text(info: ExceptionInfo) -> BaseException | None:
    parts = [_from_text(part) or stand_in(part.type_name, part.message) for part in info.parts]
    return exceptions.from_text(info.type_name, info.message, parts)


def _with_text(error: BaseException, message: str) -> BaseException:
    """Return ``error``, with ``message`` as its text if ``str(error)`` raises or is too long.

    ipykernel calls ``str``, fails if that raises, and writes the whole text into the notebook. Only the class is
    replaced by a subclass with another ``__str__``; ``args`` stay unchanged.
    """
    try:
        is_good = len(str(error)) <= MAX_CHARACTERS
    except BaseException:  # it may even call sys.exit()
        is_good = False
    return error if is_good else exceptions.with_text(error, message)


def make_traceback(frames: Sequence[FrameInfo]) -> TracebackType | None:
    """Return a traceback object with ``frames``, outermost first."""
    result: TracebackType | None = None
    for frame in reversed(frames):
        made = _one_frame(frame)
        if made is not None:
            result = TracebackType(result, made.tb_frame, made.tb_lasti, frame.lineno)
    return result


class _Made(Exception):
    """Raised by functions that exist only for their frame in a traceback."""


def _one_frame(frame: FrameInfo) -> TracebackType | None:
    """Return the traceback entry of a function that raises at the line of ``frame``.

    Template engines map errors to template lines in the same way (Jinja2's debug module).
    """
    function = FunctionType(_raising_code(frame), {"error": _Made()})
    try:
        function()
    except _Made as raised:
        return raised.__traceback__.tb_next if raised.__traceback__ else None
    return None


def _raising_code(frame: FrameInfo) -> CodeType:
    """Compile ``def name(): raise error`` with the file and line numbers of ``frame``."""
    line = {"lineno": frame.lineno, "end_lineno": frame.lineno, "end_col_offset": max(1, len(frame.line))}
    body = ast.Raise(
        exc=ast.Name("error", ast.Load(), col_offset=0, **line), cause=None, col_offset=0, **line
    )
    first = min(frame.first_lineno or frame.lineno, frame.lineno)
    tree = ast.parse("def function(): pass", frame.filename)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.lineno, definition.end_lineno, definition.body = first, frame.lineno, [body]
    module = compile(tree, frame.filename, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    code = code.replace(co_name=frame.name)  # names such as <lambda> can't be written in source
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=frame.name)
    return code


def stand_in(type_name: str, message: str, max_lines: int | None = None) -> BaseException:
    """Return an exception with this type name and message, and no other attributes that IPython would show."""
    if max_lines is not None:
        message = shortened(fewer_lines(message, max_lines), _SHOWN_CHARACTERS)
    return type(type_name.rpartition(".")[2], (Exception,), {"__module__": "builtins"})(message)


def put_before(error: BaseException, cause: BaseException, info: ExceptionInfo) -> None:
    """Set ``cause`` as ``__cause__`` or ``__context__`` of ``error``, according to ``info``."""
    if info.is_raised_from:
        error.__cause__ = cause
    else:
        error.__context__ = cause

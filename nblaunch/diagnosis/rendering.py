"""How IPython shows an exception of a launch: the user's own lines, and none of the launcher's.

The traceback of another process can't travel, but what a reader needs of it can: file, line and function of each
frame. Frames with just these are made here, so that IPython, pdb and ``traceback`` show the worker's frames with the
cell's own source, as if the error had happened in the kernel.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any

from nblaunch.errors import WorkerFailed
from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.wire import exceptions
from nblaunch.wire.exceptions import MAX_CHARACTERS, fewer_lines, is_own_file, set_attribute, shortened

_MAX_FRAMES = 3
_MAX_NOTES_LINES = 4
_MAX_LINES = 25
_SHOWN_CHARACTERS = 4000
_FITS = ((5, _MAX_LINES), (3, _MAX_LINES), (2, _MAX_LINES), (2, 12), (2, 8), (2, 6))
"""(source lines of each frame, lines of the message), tried one after the other until all is short enough."""


class _Made(Exception):
    """Raised by functions that are made only for their place in a traceback."""


def render_as(error: BaseException, rendering: Callable[[], list[str]]) -> None:
    """Have IPython show ``error`` by ``rendering`` (its ``_render_traceback_`` protocol, as ipyparallel uses it)."""
    set_attribute(error, "_render_traceback_", rendering)


def hide_launcher(error: BaseException) -> None:
    """Show ``error``, raised by the launcher itself, at the line of the cell that called it."""
    if _is_raised_here(error) and not hasattr(error, "_render_traceback_"):
        render_as(error, LocalRendering())


def _is_raised_here(error: BaseException) -> bool:
    """Whether the launcher itself raised ``error``, rather than code of the user's or of a library."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is None or _is_own(tb)


class ShownAtCall:
    """Context manager: what the block raises is shown at the line that called the launcher, without the launcher.

    The launcher's own errors keep its frames in their traceback, for a report; IPython shows the line of the cell.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, cls: object, error: BaseException | None, tb: object) -> None:
        if error is None:
            return
        hide_launcher(error)
        if not _is_raised_here(error):
            BaseException.with_traceback(error, _without(error.__traceback__, _is_own))


def rebuild(failed: Failed, notes: Sequence[str], *, is_remote: bool = False) -> BaseException:
    """The exception that the kernel raises for ``failed``: its traceback goes on into the worker's frames.

    Causes, and the members of a group, have theirs as well.

    Args:
        failed: what the worker reported.
        notes: lines added to the exception: rank, process, host, log, other ranks.
        is_remote: it happened on another machine: only its text has come, and the class is the one that this
            process knows by that name.
    """
    error = _from_text(failed.info) if is_remote else _load(failed)
    if error is None:
        error = _failure(failed, "only text comes from other machines, and its class is not loaded here")
    _give_traceback(error, failed.info)
    own_notes = _notes_of(error)
    exceptions.set_attribute(error, "__notes__", [*own_notes, *notes])
    shown = fewer_lines("\n".join(own_notes), _MAX_NOTES_LINES).splitlines()
    render_as(error, RemoteRendering(failed.info, (*shown, *notes)))
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


def _notes_of(error: BaseException) -> list[str]:
    """What the user's code has noted; anything may stand in that attribute, and asking for it may fail."""
    try:
        notes = error.__notes__  # type: ignore[attr-defined]
        return [str(note) for note in notes] if isinstance(notes, (list, tuple)) else [str(notes)]
    except Exception:
        return []


def _load(failed: Failed) -> BaseException:
    """The original, or a :class:`WorkerFailed` with its text where it can't be had here."""
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
        f"({failed.info.type_name} itself did not come through, because {why})",
        rank=failed.rank,
    )


def _from_text(info: ExceptionInfo) -> BaseException | None:
    parts = [_from_text(part) or stand_in(part.type_name, part.message) for part in info.parts]
    return exceptions.from_text(info.type_name, info.message, parts)


def _with_text(error: BaseException, message: str) -> BaseException:
    """``error``, with ``message`` for its text where its own can't be made, or is too long to be read.

    ipykernel calls ``str``: it fails if that raises, and puts all that comes into the notebook. The exception becomes
    one of a class that differs from its own in nothing else; its ``args`` stay whole.
    """
    try:
        is_good = len(str(error)) <= MAX_CHARACTERS
    except BaseException:  # it may even call sys.exit()
        is_good = False
    return error if is_good else exceptions.with_text(error, message)


def cell_name(filename: str) -> str:
    """``Cell In[5]`` for the file name that a notebook cell was compiled under; other names as they are."""
    shell = _shell()
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    parts = format_name(filename) if format_name is not None else None
    return " ".join(parts) if parts else filename


def worth_showing(frames: Sequence[FrameInfo]) -> list[FrameInfo]:
    """The user's frames, and the innermost one of all others but ourselves; of many the first and the last few."""
    frames = [frame for frame in frames if not is_own_file(frame.filename)]
    kept = [frame for i, frame in enumerate(frames) if frame.is_user or i == len(frames) - 1]
    return kept if len(kept) <= _MAX_FRAMES else [kept[0], *kept[-(_MAX_FRAMES - 1) :]]


def make_traceback(frames: Sequence[FrameInfo]) -> TracebackType | None:
    """A traceback object through ``frames``, outermost first."""
    result: TracebackType | None = None
    for frame in reversed(frames):
        made = _one_frame(frame)
        if made is not None:
            result = TracebackType(result, made.tb_frame, made.tb_lasti, frame.lineno)
    return result


def _one_frame(frame: FrameInfo) -> TracebackType | None:
    """The traceback entry of a function that does nothing but raise, compiled to look as if it stood at that line.

    The technique is known from template engines, which map errors back to template lines (Jinja2's debug module).
    """
    function = FunctionType(_raising_code(frame), {"error": _Made()})
    try:
        function()
    except _Made as raised:
        return raised.__traceback__.tb_next if raised.__traceback__ else None
    return None


def _raising_code(frame: FrameInfo) -> CodeType:
    """``def name(): raise error``, its ``def`` and its ``raise`` at the lines of the original."""
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


@dataclass(frozen=True)
class RemoteRendering:
    """The worker's frames with their source, then the notes."""

    info: ExceptionInfo
    notes: tuple[str, ...]

    def __call__(self) -> list[str]:
        shell = _shell()
        if shell is None:
            return [*self.info.text.splitlines(), *self.notes]
        tb = make_traceback(worth_showing(self.info.frames))
        return _fitting(shell, self._shown, tb, self.notes)

    def _shown(self, max_lines: int) -> BaseException:
        """What is shown for the exception, its message and its cause's in as many lines together."""
        cause = self.info.cause
        if cause is None:
            return stand_in(self.info.type_name, self.info.message, max_lines)
        shown = stand_in(self.info.type_name, self.info.message, max_lines // 2)
        before = stand_in(cause.type_name, cause.message, max_lines // 2)
        before.__traceback__ = make_traceback(worth_showing(cause.frames)[-1:])
        put_before(shown, before, self.info)
        return shown


@dataclass(frozen=True)
class LocalRendering:
    """The frames of the kernel up to the call of the launcher."""

    def __call__(self) -> list[str]:
        error, tb = sys.exc_info()[1], sys.exc_info()[2]
        shell = _shell()
        if shell is None or error is None:
            return [f"{type(error).__name__}: {error}"]
        name, message = type(error).__name__, str(error)
        return _fitting(shell, lambda max_lines: stand_in(name, message), _without_own_frames(tb), ())


def _fitting(
    shell: Any,
    shown: Callable[[int], BaseException],
    tb: TracebackType | None,
    notes: Sequence[str],
) -> list[str]:
    """IPython's lines and the notes, with as much of each source and of the message as there is room for."""
    lines: list[str] = []
    for context, max_lines in _FITS:
        lines = [*_structured(shell, shown(max_lines), tb, context), *notes]
        if len("\n".join(lines).splitlines()) <= _MAX_LINES:
            break
    return lines


def _structured(shell: Any, error: BaseException, tb: TracebackType | None, context: int) -> list[str]:
    # By position: the last parameter has another name in each major version of IPython.
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, tb, 0, context)
    return lines


def stand_in(type_name: str, message: str, max_lines: int | None = None) -> BaseException:
    """An exception with a name and a text, and nothing of the original that IPython would show besides."""
    if max_lines is not None:
        message = shortened(fewer_lines(message, max_lines), _SHOWN_CHARACTERS)
    return type(type_name.rpartition(".")[2], (Exception,), {"__module__": "builtins"})(message)


def put_before(error: BaseException, cause: BaseException, info: ExceptionInfo) -> None:
    """Make ``cause`` what ``error`` was raised from, or while handling which it was raised, as ``info`` says."""
    if info.is_raised_from:
        error.__cause__ = cause
    else:
        error.__context__ = cause


def _without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback's entries outside nblaunch and IPython, as new entries on the same frames."""
    return _without(tb, lambda entry: _is_own(entry) or _is_ipython(entry))


def _without(tb: TracebackType | None, is_hidden: Callable[[TracebackType], bool]) -> TracebackType | None:
    entries = []
    while tb is not None:
        if not is_hidden(tb):
            entries.append(tb)
        tb = tb.tb_next
    result: TracebackType | None = None
    for entry in reversed(entries):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_ipython(tb: TracebackType) -> bool:
    filename = tb.tb_frame.f_code.co_filename
    return "/IPython/" in filename or "/ipykernel/" in filename


def _is_own(tb: TracebackType) -> bool:
    # Code generated for our dataclasses has no file.
    module = str(tb.tb_frame.f_globals.get("__name__", ""))
    return is_own_file(tb.tb_frame.f_code.co_filename) or module.startswith("nblaunch.")


def _shell() -> Any:
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None

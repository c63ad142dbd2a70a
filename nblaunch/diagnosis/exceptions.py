"""Workers' exceptions, rebuilt in the kernel with their type, causes and frames, and shown by IPython.

Traceback objects can't be pickled, so a worker sends the file, line and function of each frame. :func:`make_traceback`
compiles functions that raise at these lines, so that pdb, ``traceback`` and IPython show the worker's frames with the
cell's source.

IPython shows the user's frames and the innermost library frame, but none of nblaunch's. Below a worker's exception, it
shows the notes. If the launcher raised the exception, IPython shows only the line of the cell that called the
launcher.
"""

from __future__ import annotations

import ast
import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

from nblaunch.errors import WorkerFailed
from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.user_code import cell_name, ipython_shell, is_own_file, is_user_file, line_of
from nblaunch.wire import exceptions
from nblaunch.wire.exceptions import MAX_CHARACTERS, fewer_lines, set_attribute, shortened

P = ParamSpec("P")
T = TypeVar("T")

_SHOWN_CHARACTERS = 4000
_EARLIER_CHARACTERS = 200
_MAX_LITERAL = 400  # characters of a variable's value
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_FRAMES = 3
_HIDDEN = "only the first frame and the last two are shown; %debug has the others"
_MAX_NOTES_LINES = 4
_MAX_LINES = 25
_FITS = ((5, _MAX_LINES), (3, _MAX_LINES), (2, _MAX_LINES), (2, 12), (2, 8), (2, 6))
"""(source lines of each frame, lines of the message), tried in order until the display is short enough."""


def rebuild(failed: Failed, *, is_remote: bool = False) -> BaseException:
    """Return the worker's exception for the kernel to raise, with the worker's frames in its traceback.

    Causes, and exceptions in a group, also get their frames.

    Args:
        failed: the worker's report.
        is_remote: whether the failure comes from another machine as text, so that its class is looked up by name.
    """
    error = _from_text(failed.info) if is_remote else _load(failed)
    if error is None:
        error = _failure(failed, "it came from another machine as text, and its class is not loaded here")
    _give_traceback(error, failed.info)
    return error


def _give_traceback(error: BaseException, info: ExceptionInfo) -> None:
    frames = [frame for frame in info.frames if not is_own_file(frame.filename)]
    BaseException.with_traceback(error, make_traceback(frames))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None and info.cause is not None:
        cause = _from_text(info.cause) or _stand_in(info.cause.type_name, info.cause.message)
        _put_before(error, cause, info)
    if cause is not None and info.cause is not None:
        _give_traceback(cause, info.cause)
    for part, part_info in zip(exceptions.parts_of(error), info.parts, strict=False):
        _give_traceback(part, part_info)


def _load(failed: Failed) -> BaseException:
    """Unpickle the exception; return a :class:`WorkerFailed` with its text if unpickling fails."""
    why = "its class or contents can't be pickled or are too large"
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
    parts = [_from_text(part) or _stand_in(part.type_name, part.message) for part in info.parts]
    return exceptions.from_text(info.type_name, info.message, parts)


def _with_text(error: BaseException, message: str) -> BaseException:
    """Return ``error``, with ``message`` as its text if ``str(error)`` raises or is too long.

    ipykernel calls ``str``, fails if ``str`` raises, and writes the whole text into the notebook. A subclass with a
    different ``__str__`` replaces the class; ``args`` stay unchanged.
    """
    try:
        is_good = len(str(error)) <= MAX_CHARACTERS
    except BaseException:  # __str__ may even call sys.exit()
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


class RankVariable:
    """A description in place of a variable that only the rank has, such as a tensor.

    ``%debug``, pdb and verbose tracebacks show it.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return RankVariable, (self._text,)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of {self._text}: the traceback has only a description of this variable. To use the variable "
            "itself, launch with post_mortem=True and call nblaunch.debug() after the error"
        )


def _value_of(text: str) -> Any:
    """Return the value of ``text`` if it is a Python literal; otherwise a :class:`RankVariable`."""
    if text in _FLOATS:
        return _FLOATS[text]
    try:
        return ast.literal_eval(text) if len(text) <= _MAX_LITERAL else RankVariable(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return RankVariable(text)


class _Made(Exception):
    """Raised by functions that exist only to put their frame into a traceback."""


_ERROR, _VALUES = "<error>", "<values>"
"""Names of globals in the functions that raise errors; no variable of a rank can have such a name."""


def is_of_rank(frame: FrameType) -> bool:
    """Return whether :func:`make_traceback` made a frame."""
    return _ERROR in frame.f_globals


def clear_launcher(error: BaseException) -> None:
    """Clear the launcher's frames, which hold the function's arguments, in the tracebacks of ``error`` and its causes.

    A rank's frames are not cleared, because they hold their variables only as text. The launcher's frames that called
    them are cleared.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        for frame, _ in traceback.walk_tb(current.__traceback__):
            _clear_frames(frame.f_back if is_of_rank(frame) else frame)
        pending += [current.__cause__, current.__context__]


def _clear_frames(frame: FrameType | None) -> None:
    """Clear a frame and its callers, up to the first frame that is still running."""
    with suppress(RuntimeError):
        while frame is not None:
            frame.clear()
            frame = frame.f_back


def _one_frame(frame: FrameInfo) -> TracebackType | None:
    """Return the traceback entry of a function that raises at the line of ``frame``.

    Template engines map errors to template lines the same way (see Jinja2's debug module).
    """
    values = tuple(_value_of(text) for _, text in frame.variables)
    function = FunctionType(_raising_code(frame), {_ERROR: _Made(), _VALUES: values})
    try:
        function()
    except _Made as raised:
        return raised.__traceback__.tb_next if raised.__traceback__ else None
    return None


def _raising_code(frame: FrameInfo) -> CodeType:
    """Compile a function with the file, line numbers and local variables of ``frame``.

        def name():
            first, second, ... = values
            raise error

    The variables are not parameters, because IPython shows a function's parameters beside its name.
    """
    line: dict[str, Any] = {"lineno": frame.lineno, "end_lineno": frame.lineno, "col_offset": 0}
    line["end_col_offset"] = max(1, len(frame.line))
    names: list[ast.expr] = [ast.Name(name, ast.Store(), **line) for name, _ in frame.variables]
    bind = ast.Assign([ast.Tuple(names, ast.Store(), **line)], ast.Name(_VALUES, ast.Load(), **line), **line)
    tree = ast.parse("def function(): pass", frame.filename)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.lineno = min(frame.first_lineno or frame.lineno, frame.lineno)
    definition.end_lineno = frame.lineno
    definition.body = [bind, ast.Raise(ast.Name(_ERROR, ast.Load(), **line), None, **line)]
    module = compile(tree, frame.filename, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    code = code.replace(co_name=frame.name)  # names such as <lambda> can't be written in source
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=frame.name)
    return code


def _stand_in(type_name: str, message: str, max_lines: int | None = None) -> BaseException:
    """Return an exception with this type name and message, and no other attributes that IPython would show."""
    if max_lines is not None:
        message = shortened(fewer_lines(message, max_lines), _SHOWN_CHARACTERS)
    return type(type_name.rpartition(".")[2], (Exception,), {"__module__": "builtins"})(message)


def _put_before(error: BaseException, cause: BaseException, info: ExceptionInfo) -> None:
    """Set ``cause`` as ``__cause__`` or ``__context__`` of ``error``, according to ``info``."""
    if info.is_raised_from:
        error.__cause__ = cause
    else:
        error.__context__ = cause


# --- display --------------------------------------------------------------------------------------------------------


def _render_as(error: BaseException, rendering: Callable[[], list[str]]) -> None:
    """Make IPython show ``error`` with ``rendering`` (its ``_render_traceback_`` protocol, as used by ipyparallel)."""
    set_attribute(error, "_render_traceback_", rendering)


def hide_launcher(error: BaseException) -> None:
    """If the launcher raised ``error``, show only the line of the cell that called the launcher."""
    if _is_raised_here(error) and not hasattr(error, "_render_traceback_"):
        _render_as(error, _render_launchers_own)


def _is_raised_here(error: BaseException) -> bool:
    """Return whether the launcher raised ``error``, rather than user code or a library."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is None or _is_own(tb)


class HiddenLauncherFrames:
    """Context manager that hides nblaunch's frames from exceptions raised in its block.

    The launcher's errors keep these frames in their traceback, for bug reports, but IPython shows only the line in the
    cell.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, cls: object, error: BaseException | None, tb: object) -> None:
        if error is None:
            return
        hide_launcher(error)
        if _is_raised_here(error):
            return
        # An interrupt can arrive in any function that the launcher waits in.
        is_interrupt = isinstance(error, KeyboardInterrupt)
        hide = _outside_launcher if is_interrupt else _outside_package
        BaseException.with_traceback(error, _rebuilt(hide(error.__traceback__)))


def hides_launcher(method: Callable[P, T]) -> Callable[P, T]:
    """Hide nblaunch's frames from errors of a public method, as :class:`HiddenLauncherFrames` does."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            return method(*args, **kwargs)

    return called


def annotate(error: BaseException, info: ExceptionInfo, notes: Sequence[str]) -> None:
    """Add ``notes`` to a rebuilt exception, and make IPython show it with the worker's frames and these notes.

    Args:
        error: the rebuilt exception.
        info: its text and frames, as sent by the worker.
        notes: lines about the rank, its process, its host, its log and the other ranks.
    """
    own_notes = _notes_of(error)
    before = error.__cause__ or error.__context__
    set_attribute(error, "__notes__", [*own_notes, *notes])
    shown = (*_shown_notes(own_notes), *notes)
    _render_as(error, RemoteRendering(info, shown, _shown_notes(_notes_of(before)) if before else ()))


def _shown_notes(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(fewer_lines("\n".join(notes), _MAX_NOTES_LINES).splitlines())


def _earlier(info: ExceptionInfo) -> list[str]:
    """Return a line for each exception that precedes the displayed cause.

    The first exception often explains the others.
    """
    lines = []
    later = info.cause
    while later is not None and later.cause is not None:
        first = later.cause
        how = "from" if later.is_raised_from else "while handling"
        message = shortened(first.message.strip().partition("\n")[0], _EARLIER_CHARACTERS)
        text = f"{first.type_name}: {message}" if message else first.type_name
        place = worth_showing(first.frames)[-1:]
        where = f" ({cell_name(place[0].filename)}, line {place[0].lineno})" if place else ""
        lines.append(f"{later.type_name} was raised {how} {text}{where}")
        later = first
    return lines


def _notes_of(error: BaseException) -> list[str]:
    """Return the notes that the user's code has added. ``__notes__`` may hold any object, or be unreadable."""
    try:
        notes = error.__notes__  # type: ignore[attr-defined]
        return [str(note) for note in notes] if isinstance(notes, (list, tuple)) else [str(notes)]
    except Exception:
        return []


def worth_showing(frames: Sequence[FrameInfo]) -> list[FrameInfo]:
    """Return the user's frames and the innermost library frame; if there are many, the first and the last few."""
    frames = [frame for frame in frames if not is_own_file(frame.filename)]
    kept = [frame for i, frame in enumerate(frames) if frame.is_user or i == len(frames) - 1]
    return kept if len(kept) <= _MAX_FRAMES else [kept[0], *kept[-(_MAX_FRAMES - 1) :]]


@dataclass(frozen=True)
class RemoteRendering:
    """Rendering of a worker's exception: its frames with their source, then the notes.

    Args:
        info: its text and frames.
        notes: lines to show below it.
        cause_notes: notes of its cause.
    """

    info: ExceptionInfo
    notes: tuple[str, ...]
    cause_notes: tuple[str, ...] = ()

    def __call__(self) -> list[str]:
        shell = ipython_shell()
        if shell is None:
            return [*self.info.text.splitlines(), *self.notes]
        frames = worth_showing(self.info.frames)
        num_users, num_shown = (sum(frame.is_user for frame in some) for some in (self.info.frames, frames))
        notes = (*[_HIDDEN] * (num_users > num_shown), *_earlier(self.info), *self.notes)
        return _fitting(shell, self._shown, make_traceback(frames), notes)

    def _shown(self, max_lines: int) -> BaseException:
        """Return the exception to display; its message and its cause's together have at most ``max_lines`` lines."""
        cause = self.info.cause
        if cause is None:
            return _stand_in(self.info.type_name, self.info.message, max_lines)
        shown = _stand_in(self.info.type_name, self.info.message, max_lines // 2)
        before = _stand_in(cause.type_name, cause.message, max_lines // 2)
        before.__traceback__ = make_traceback(worth_showing(cause.frames)[-1:])
        if self.cause_notes:
            set_attribute(before, "__notes__", list(self.cause_notes))
        _put_before(shown, before, self.info)
        return shown


def _render_launchers_own() -> list[str]:
    """Render the launcher's exception, which is being handled, with frames up to the call to the launcher."""
    error, tb = sys.exc_info()[1], sys.exc_info()[2]
    shell = ipython_shell()
    if shell is None or error is None:
        return [f"{type(error).__name__}: {error}"]
    shown = _stand_in(type(error).__name__, str(error))
    entries = [entry for entry in _outside_launcher(tb) if not _is_ipython(entry)]
    return _fitting(shell, lambda max_lines: shown, _rebuilt(entries), _shown_notes(_notes_of(error)))


def _fitting(
    shell: Any,
    shown: Callable[[int], BaseException],
    tb: TracebackType | None,
    notes: Sequence[str],
) -> list[str]:
    """Return IPython's lines and the notes, with as much of the source and message as fits in :data:`_MAX_LINES`."""
    lines: list[str] = []
    for context, max_lines in _FITS:
        error = shown(max_lines)
        # Pass all arguments by position, because IPython versions differ in the name of the last parameter.
        lines = [*shell.InteractiveTB.structured_traceback(type(error), error, tb, 0, context), *notes]
        if len("\n".join(lines).splitlines()) <= _MAX_LINES:
            break
    return lines


def _outside_package(tb: TracebackType | None) -> list[TracebackType]:
    """Return the entries outside nblaunch."""
    return [entry for entry in _entries(tb) if not _is_own(entry)]


def _outside_launcher(tb: TracebackType | None) -> list[TracebackType]:
    """Return the entries that belong neither to nblaunch nor to libraries that it calls; always keep user code."""
    kept = []
    is_inside = False
    for entry in _entries(tb):
        if _is_own(entry):
            is_inside = True
        elif not is_inside or is_user_file(entry.tb_frame.f_code.co_filename):
            is_inside = False
            kept.append(entry)
    return kept


def _entries(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _rebuilt(entries: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback with only these entries, outermost first."""
    result: TracebackType | None = None
    for entry in reversed(entries):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, line_of(entry))
    return result


def _is_ipython(tb: TracebackType) -> bool:
    filename = tb.tb_frame.f_code.co_filename
    return "/IPython/" in filename or "/ipykernel/" in filename


def _is_own(tb: TracebackType) -> bool:
    # Code that dataclasses generate has no file.
    module = str(tb.tb_frame.f_globals.get("__name__", ""))
    return is_own_file(tb.tb_frame.f_code.co_filename) or module.startswith("nblaunch.")

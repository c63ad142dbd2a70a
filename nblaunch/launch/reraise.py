"""A worker's exception as the kernel raises it: the original type, shown at the user's own lines.

The traceback of another process can't travel, but what a reader needs of it can: file, line and function of each
frame. Frames with just these are made here, so that IPython, pdb and ``traceback`` show the worker's frames with the
cell's own source, as if the error had happened in the kernel.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nblaunch.errors import RemoteTraceback, WorkerFailed
from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.wire import exceptions

_MAX_FRAMES = 3


def rebuild(failed: Failed, notes: Sequence[str]) -> BaseException:
    """The exception that the kernel raises for ``failed``.

    Its ``__cause__`` is a :class:`RemoteTraceback`, whose own cause is what the worker's exception was raised from.

    Args:
        failed: what the worker told.
        notes: lines added to the exception: rank, process, host, log, other ranks.
    """
    error = _load(failed)
    own_cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if own_cause is not None and failed.info.cause is not None:
        own_cause.__traceback__ = make_traceback(_worth_showing(failed.info.cause.frames))
    remote = RemoteTraceback(f"rank {failed.rank}:\n{failed.info.text.rstrip()}")
    remote.__traceback__ = make_traceback(_worth_showing(failed.info.frames))
    remote.__cause__ = own_cause
    error.__cause__ = remote
    for note in notes:
        _add_note(error, note)
    _set_renderer(error, _Renderer(failed.info, tuple(notes)))
    return error


def _load(failed: Failed) -> BaseException:
    """The original, or a :class:`WorkerFailed` with its text where it can't be had here."""
    why = "its class or contents can't be pickled"
    if failed.exception is not None:
        try:
            return exceptions.load(failed.exception)
        except Exception as error:
            why = f"it can't be rebuilt in this process ({type(error).__name__}: {error})"
    return WorkerFailed(
        f"rank {failed.rank} raised {failed.info.type_name}: {failed.info.message}\n"
        f"({failed.info.type_name} itself did not come through, because {why})",
        rank=failed.rank,
    )


def _add_note(error: BaseException, note: str) -> None:
    """``add_note`` (Python 3.11), or what it does, for 3.10."""
    try:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
    except AttributeError:
        return  # an exception with __slots__ takes no notes; the cause still tells where it came from


def _set_renderer(error: BaseException, renderer: _Renderer) -> None:
    try:
        error._render_traceback_ = renderer  # type: ignore[attr-defined]
    except AttributeError:
        return  # shown by IPython's usual means then


def _worth_showing(frames: Sequence[FrameInfo]) -> list[FrameInfo]:
    """The user's frames, and the innermost one whoever's it is; of many the first and the last few."""
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
    width = max(1, len(frame.line))
    where = {"lineno": frame.lineno, "end_lineno": frame.lineno, "col_offset": 0, "end_col_offset": width}
    statement = ast.Raise(exc=ast.Name(id="error", ctx=ast.Load(), **where), cause=None, **where)
    code = compile(ast.Module(body=[statement], type_ignores=[]), frame.filename, "exec")
    code = code.replace(co_name=frame.name, **({"co_qualname": frame.name} if sys.version_info >= (3, 11) else {}))
    try:
        exec(code, {"__name__": "__main__", "__file__": frame.filename, "error": RemoteTraceback()})
    except RemoteTraceback as raised:
        return raised.__traceback__.tb_next if raised.__traceback__ else None
    return None


@dataclass(frozen=True)
class _Renderer:
    """What IPython calls to show the exception (``_render_traceback_``): the worker's frames, then the notes."""

    info: ExceptionInfo
    notes: tuple[str, ...]

    def __call__(self) -> list[str]:
        error, tb = sys.exc_info()[1], None
        frames = _worth_showing(self.info.frames)
        tb = make_traceback(frames)
        shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is None or error is None:
            return [*self.info.text.splitlines(), *self.notes]
        context = 5 if len(frames) <= 1 and self.info.cause is None else 3
        shown = _BareError.like(error, self.info)
        lines = shell.InteractiveTB.structured_traceback(type(shown), shown, tb, 0, context)
        return [*lines, *self.notes]


class _BareError(Exception):
    """A stand-in with the name and text of an exception, but without its notes and without the remote cause."""

    @classmethod
    def like(cls, error: BaseException, info: ExceptionInfo) -> BaseException:
        stand_in = type(info.type_name.rpartition(".")[2], (cls,), {"__module__": "builtins"})(info.message)
        if info.cause is not None:
            cause = type(info.cause.type_name.rpartition(".")[2], (cls,), {"__module__": "builtins"})(
                info.cause.message
            )
            cause.__traceback__ = make_traceback(_worth_showing(info.cause.frames)[-1:])
            stand_in.__cause__ = cause
        return stand_in

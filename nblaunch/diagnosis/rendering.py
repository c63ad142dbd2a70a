"""Display of exceptions in IPython: the user's frames with their source, without those of nblaunch.

An exception of a worker is shown with the worker's frames and the notes about it, one of the launcher with the line of
the cell that called it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nblaunch.diagnosis.rebuilding import make_traceback, put_before, stand_in
from nblaunch.events import ExceptionInfo, FrameInfo
from nblaunch.user_code import is_own_file, line_of
from nblaunch.wire.exceptions import fewer_lines, set_attribute

_MAX_FRAMES = 3
_MAX_NOTES_LINES = 4
_MAX_LINES = 25
_FITS = ((5, _MAX_LINES), (3, _MAX_LINES), (2, _MAX_LINES), (2, 12), (2, 8), (2, 6))
"""(source lines of each frame, lines of the message), tried in order until the display is short enough."""


def render_as(error: BaseException, rendering: Callable[[], list[str]]) -> None:
    """Make IPython show ``error`` by ``rendering`` (its ``_render_traceback_`` protocol, as used by ipyparallel)."""
    set_attribute(error, "_render_traceback_", rendering)


def hide_launcher(error: BaseException) -> None:
    """Show ``error`` at the calling line of the cell, if the launcher itself raised it."""
    if _is_raised_here(error) and not hasattr(error, "_render_traceback_"):
        render_as(error, LocalRendering())


def _is_raised_here(error: BaseException) -> bool:
    """Return whether the launcher itself raised ``error``, rather than the user's code or a library."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is None or _is_own(tb)


class HiddenLauncherFrames:
    """Context manager that hides frames of nblaunch from exceptions of its block.

    Errors of the launcher itself keep these frames in their traceback, for bug reports, but IPython shows only the line
    of the cell.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, cls: object, error: BaseException | None, tb: object) -> None:
        if error is None:
            return
        hide_launcher(error)
        if not _is_raised_here(error):
            BaseException.with_traceback(error, _without(error.__traceback__, _is_own))


def annotate(error: BaseException, info: ExceptionInfo, notes: Sequence[str]) -> None:
    """Add ``notes`` to a rebuilt exception, and make IPython show it with the worker's frames and these notes.

    Args:
        error: the exception, rebuilt.
        info: its text and frames, as the worker sent them.
        notes: lines about rank, process, host, log and other ranks.
    """
    own_notes = _notes_of(error)
    set_attribute(error, "__notes__", [*own_notes, *notes])
    shown = fewer_lines("\n".join(own_notes), _MAX_NOTES_LINES).splitlines()
    render_as(error, RemoteRendering(info, (*shown, *notes)))


def _notes_of(error: BaseException) -> list[str]:
    """Return the notes of the user's code. The attribute may hold any object, and access to it may raise."""
    try:
        notes = error.__notes__  # type: ignore[attr-defined]
        return [str(note) for note in notes] if isinstance(notes, (list, tuple)) else [str(notes)]
    except Exception:
        return []


def cell_name(filename: str) -> str:
    """Return ``Cell In[5]`` for the file name of a compiled notebook cell; other names unchanged."""
    shell = _shell()
    compiler: Any = getattr(shell, "compile", None)
    if hasattr(compiler, "format_code_name"):
        parts = compiler.format_code_name(filename)
        return " ".join(parts) if parts else filename
    # IPython 7 keeps no names of cells, but they follow from their text; by a setting, all have the same.
    if compiler is None or not filename.endswith(".py") or compiler.get_code_name("", "", 0) == filename:
        return filename
    cells = shell.history_manager.input_hist_raw  # without newlines at the end
    for number in range(len(cells) - 1, 0, -1):
        texts = (cells[number], f"{cells[number]}\n")
        if any(compiler.get_code_name(text, text, number) == filename for text in texts):
            return f"Cell In[{number}]"
    return filename


def worth_showing(frames: Sequence[FrameInfo]) -> list[FrameInfo]:
    """Return the user's frames and the innermost library frame; of many, the first and the last few."""
    frames = [frame for frame in frames if not is_own_file(frame.filename)]
    kept = [frame for i, frame in enumerate(frames) if frame.is_user or i == len(frames) - 1]
    return kept if len(kept) <= _MAX_FRAMES else [kept[0], *kept[-(_MAX_FRAMES - 1) :]]


@dataclass(frozen=True)
class RemoteRendering:
    """Rendering of a worker's exception: its frames with their source, then the notes."""

    info: ExceptionInfo
    notes: tuple[str, ...]

    def __call__(self) -> list[str]:
        shell = _shell()
        if shell is None:
            return [*self.info.text.splitlines(), *self.notes]
        tb = make_traceback(worth_showing(self.info.frames))
        return _fitting(shell, self._shown, tb, self.notes)

    def _shown(self, max_lines: int) -> BaseException:
        """Return the exception to display, with at most ``max_lines`` lines of its message and that of its cause."""
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
    """Rendering of the launcher's own exception: the frames up to the call of the launcher."""

    def __call__(self) -> list[str]:
        error, tb = sys.exc_info()[1], sys.exc_info()[2]
        shell = _shell()
        if shell is None or error is None:
            return [f"{type(error).__name__}: {error}"]
        name, message = type(error).__name__, str(error)
        return _fitting(
            shell, lambda max_lines: stand_in(name, message), _without_own_and_ipython_frames(tb), ()
        )


def _fitting(
    shell: Any,
    shown: Callable[[int], BaseException],
    tb: TracebackType | None,
    notes: Sequence[str],
) -> list[str]:
    """Return IPython's lines and the notes, with as much source and message as fit into :data:`_MAX_LINES`."""
    lines: list[str] = []
    for context, max_lines in _FITS:
        lines = [*_structured(shell, shown(max_lines), tb, context), *notes]
        if len("\n".join(lines).splitlines()) <= _MAX_LINES:
            break
    return lines


def _structured(shell: Any, error: BaseException, tb: TracebackType | None, context: int) -> list[str]:
    # Positional, because the last parameter has different names in versions of IPython.
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, tb, 0, context)
    return lines


def _without_own_and_ipython_frames(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback without entries of nblaunch and IPython."""
    return _without(tb, lambda entry: _is_own(entry) or _is_ipython(entry))


def _without(tb: TracebackType | None, is_hidden: Callable[[TracebackType], bool]) -> TracebackType | None:
    entries = []
    while tb is not None:
        if not is_hidden(tb):
            entries.append(tb)
        tb = tb.tb_next
    result: TracebackType | None = None
    for entry in reversed(entries):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, line_of(entry))
    return result


def _is_ipython(tb: TracebackType) -> bool:
    filename = tb.tb_frame.f_code.co_filename
    return "/IPython/" in filename or "/ipykernel/" in filename


def _is_own(tb: TracebackType) -> bool:
    # Generated code of dataclasses has no file.
    module = str(tb.tb_frame.f_globals.get("__name__", ""))
    return is_own_file(tb.tb_frame.f_code.co_filename) or module.startswith("nblaunch.")


def _shell() -> Any:
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None

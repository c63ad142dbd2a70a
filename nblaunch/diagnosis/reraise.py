"""A worker's exception as the kernel raises it: the original type, with the worker's frames in its traceback."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch.diagnosis.rendering import (
    RemoteRendering,
    make_traceback,
    put_before,
    render_as,
    stand_in,
)
from nblaunch.errors import WorkerFailed
from nblaunch.events import ExceptionInfo, Failed
from nblaunch.wire import exceptions
from nblaunch.wire.exceptions import MAX_CHARACTERS, fewer_lines, is_own_file

_MAX_NOTES_LINES = 4


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

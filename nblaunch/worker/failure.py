"""An exception of the user's function, made ready to travel: as itself if it can be pickled, as text in any case."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType

from nblaunch.events import Event, ExceptionInfo, Failed, FrameInfo
from nblaunch.user_code import from_first_user_frame, is_user_file
from nblaunch.wire import exceptions
from nblaunch.wire.exceptions import MAX_CHARACTERS, parts_of, shortened

_MAX_FRAMES = 60
_MAX_PARTS = 20  # of an exception group
_MAX_FORMATTED_FRAMES = 2000
"""Beyond, only the last of a traceback are formatted: Python takes seconds for those of a runaway recursion."""

_KEPT_CHARACTERS = 8000  # of a message that is longer than that

_PATIENCE_S = 5.0
_CONSEQUENCE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_CONSEQUENCE_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport",
    "nccl error",
    "nccl communicator was aborted",
    "socket timeout",
    "failed to recv",
    "the client socket has",
    "heartbeat monitor",
)


def describe_failure(rank: int, error: BaseException) -> Failed:
    """Return the event that reports ``error`` to the launcher."""
    return replace(_described(rank, error, ()), exception=exceptions.dump(error))


def send_failure(
    send: Callable[[Event], None], rank: int, error: BaseException, evidence: tuple[str, ...], log_path: str
) -> None:
    """Send what :func:`describe_failure` makes, with what the device explains about ``error``.

    A message that is too long to be shown is written to a file beside ``log_path``.

    Of an exception that takes for ever to be pickled, only the text is sent: its own code may wait for a lock that
    will never be released, and the other ranks would wait for this one.
    """
    event = _with_short_message(
        _described(rank, error, evidence), error, Path(log_path).with_suffix(".message")
    )
    timer = threading.Timer(_PATIENCE_S, send, (event,))
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be had, for want of memory maybe: then without that patience
        timer.start()
    exception = exceptions.dump(error)
    timer.cancel()
    send(replace(event, exception=exception))


def _described(rank: int, error: BaseException, evidence: tuple[str, ...]) -> Failed:
    """Return the event without the exception itself."""
    error = error.with_traceback(from_first_user_frame(error.__traceback__))
    return Failed(
        rank=rank,
        time_s=time.time(),
        info=_info(error),
        is_consequence=not evidence and _is_consequence(error),
        evidence=evidence,
    )


def _with_short_message(event: Failed, error: BaseException, path: Path) -> Failed:
    """Return ``event``; of a message that is too long, its two ends and the path of a file with all of it."""
    with suppress(BaseException):  # its own code; then there is no message
        message = str(error)
        if len(message) > MAX_CHARACTERS:
            where = _written(message, path)
            info = replace(
                event.info,
                message=f"{shortened(message, _KEPT_CHARACTERS)}\n{where}",
                text=f"{shortened(event.info.text, _KEPT_CHARACTERS)}\n{where}\n",
            )
            return replace(event, info=info)
    return event


def _written(message: str, path: Path) -> str:
    """Write ``message`` to a file; return a line with its path."""
    try:
        path.write_text(message, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"(the complete message, {len(message):,} characters, could not be written to {path}: {error.strerror})"
    return f"(the complete message, {len(message):,} characters, is in {path})"


def _info(error: BaseException, depth: int = 4) -> ExceptionInfo:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ExceptionInfo(
        type_name=_qualified_name(type(error)),
        message=_message_of(error),
        frames=tuple(_frames(error.__traceback__)),
        text=_formatted(error),
        cause=_info(cause, depth - 1) if cause is not None and depth > 0 else None,
        parts=tuple(_info(part, depth - 2) for part in parts_of(error)[:_MAX_PARTS]) if depth > 1 else (),
        is_raised_from=error.__cause__ is not None,
    )


def _frames(tb: TracebackType | None) -> list[FrameInfo]:
    steps = [(frame, lineno or frame.f_code.co_firstlineno) for frame, lineno in traceback.walk_tb(tb)]
    if len(steps) > _MAX_FRAMES:
        steps = steps[: _MAX_FRAMES // 2] + steps[-_MAX_FRAMES // 2 :]
    return [
        FrameInfo(
            filename=frame.f_code.co_filename,
            lineno=lineno,
            name=frame.f_code.co_name,
            line=linecache.getline(frame.f_code.co_filename, lineno, frame.f_globals).strip(),
            is_user=is_user_file(frame.f_code.co_filename),
            first_lineno=frame.f_code.co_firstlineno,
        )
        for frame, lineno in steps
    ]


def _formatted(error: BaseException) -> str:
    num_frames = sum(1 for _ in islice(traceback.walk_tb(error.__traceback__), _MAX_FORMATTED_FRAMES + 1))
    limit = -_MAX_FRAMES if num_frames > _MAX_FORMATTED_FRAMES else None
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit)
    except BaseException as broken:  # a __str__ that raises, or exits, must not hide the error itself
        return f"{_qualified_name(type(error))} (can't be formatted: {type(broken).__name__})\n"
    return shortened("".join(lines), MAX_CHARACTERS)


def _message_of(error: BaseException) -> str:
    try:
        return shortened(str(error), MAX_CHARACTERS)
    except BaseException as broken:
        return f"<its message can't be shown: str() raises {type(broken).__name__}>"


def _qualified_name(cls: type) -> str:
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def _is_consequence(error: BaseException) -> bool:
    """Return whether the error, or a cause of it, looks like the loss of another rank."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if _is_collective_error(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _is_collective_error(error: BaseException) -> bool:
    if type(error).__name__ in _CONSEQUENCE_TYPES:
        return True
    # Gloo, NCCL and stores raise RuntimeErrors. An OSError is of the user's own connection, as of an upload.
    if "torch.distributed" not in sys.modules or not isinstance(error, RuntimeError):
        return False
    message = _message_of(error).lower()
    return any(words in message for words in _CONSEQUENCE_WORDS)

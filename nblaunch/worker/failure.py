"""An exception of the user's function, made ready to travel: as itself if it can be pickled, as text in any case."""

from __future__ import annotations

import linecache
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.wire import exceptions
from nblaunch.wire.frames import is_own_file, is_user_file

_MAX_FRAMES = 60
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


def describe_failure(rank: int, error: BaseException, evidence: tuple[str, ...] = ()) -> Failed:
    """The event that tells the launcher about ``error``, with what the device has to say about it."""
    error = error.with_traceback(without_own_frames(error.__traceback__))
    return Failed(
        rank=rank,
        time_s=time.time(),
        info=_info(error),
        exception=exceptions.dump(error),
        is_consequence=not evidence and _is_consequence(error),
        evidence=evidence,
    )


def without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not nblaunch's: where the user's function begins."""
    while tb is not None and is_own_file(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _info(error: BaseException, depth: int = 4) -> ExceptionInfo:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ExceptionInfo(
        type_name=_qualified_name(type(error)),
        message=_message_of(error),
        frames=tuple(_frames(error.__traceback__)),
        text=_formatted(error),
        cause=_info(cause, depth - 1) if cause is not None and depth else None,
    )


def _frames(tb: TracebackType | None) -> list[FrameInfo]:
    frames = [
        FrameInfo(
            filename=frame.f_code.co_filename,
            lineno=lineno,
            name=frame.f_code.co_name,
            line=linecache.getline(frame.f_code.co_filename, lineno, frame.f_globals).strip(),
            is_user=is_user_file(frame.f_code.co_filename),
            first_lineno=frame.f_code.co_firstlineno,
        )
        for frame, lineno in traceback.walk_tb(tb)
    ]
    return frames if len(frames) <= _MAX_FRAMES else frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]


def _formatted(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as broken:  # a __str__ that raises must not hide the error itself
        return f"{_qualified_name(type(error))} (can't be formatted: {type(broken).__name__}: {broken})\n"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its message can't be shown: str() raises {type(broken).__name__}>"


def _qualified_name(cls: type) -> str:
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def _is_consequence(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, looks like another rank's absence."""
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
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not isinstance(error, (RuntimeError, OSError)):
        return False
    message = _message_of(error).lower()
    return any(words in message for words in _CONSEQUENCE_WORDS)

"""The ``Failed`` event for an exception that the user's function raised.

The event contains the exception's text and frames, and the exception itself if ``wire/exceptions.py`` can pickle it.
``is_consequence`` says whether the exception looks like the result of losing another rank;
``diagnosis/root_cause.py`` uses this.
"""

from __future__ import annotations

import linecache
import sys
import time
import traceback
from itertools import islice
from types import TracebackType
from typing import Any

from nblaunch.errors import chain_of
from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.user_code import from_first_user_frame, is_user_file, line_in
from nblaunch.wire import exceptions
from nblaunch.wire.exceptions import MAX_CHARACTERS, parts_of, shortened
from nblaunch.worker.frames import texts_of_variables

_MAX_FRAMES = 60
_MAX_WITH_VARIABLES = 5
"""Maximum number of the user's frames whose variables are included."""

_MAX_PARTS = 20  # exceptions in a group
_MAX_FORMATTED_FRAMES = 2000
"""Maximum number of frames. Only the last frames of a longer traceback are formatted, because Python takes
seconds to format a runaway recursion.
"""

_KEPT_CHARACTERS = 8000
"""Number of characters of a very long string that are kept."""

_CONSEQUENCE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_CONSEQUENCE_WORDS = (
    "gloo/transport",
    "nccl error",
    "nccl communicator was aborted",
    "failed to recv",
    "the client socket has",
    "heartbeat monitor",
)
_CONNECTION_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
)
"""System error messages that the user's own connections can also cause."""


_DEATH_TIMEOUT_S = 0.5
"""Maximum time that a process may take to exit after its files are closed."""


def describe_failure(rank: int, error: BaseException, evidence: tuple[str, ...] = ()) -> Failed:
    """Return the event that reports ``error`` to the launcher, with ``evidence`` that explains it."""
    error = _death_in_loader(error) or error
    error = error.with_traceback(from_first_user_frame(error.__traceback__))
    return Failed(
        rank=rank,
        info=_info(error),
        is_consequence=not evidence and _is_consequence(error),
        evidence=evidence,
        exception=exceptions.dump(error),
    )


def _death_in_loader(error: BaseException) -> BaseException | None:
    """Return torch's exception for the death of a loader process if ``error`` came from reading from such a process.

    torch raises it in a SIGCHLD handler, which may run before or after the connection ends.
    """
    signals: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if signals is None or not isinstance(error, (OSError, EOFError)):
        return None
    if not any(
        frame.f_code.co_name == "_try_get_data" for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return None
    deadline = time.monotonic() + _DEATH_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            signals._error_if_any_worker_fails()
        except RuntimeError as death:
            death.__suppress_context__ = True
            return death.with_traceback(error.__traceback__)
        time.sleep(0.01)
    return None


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
    steps = [(frame, line_in(frame.f_code, line)) for frame, line in traceback.walk_tb(tb)]
    if len(steps) > _MAX_FRAMES:
        steps = steps[: _MAX_FRAMES // 2] + steps[-_MAX_FRAMES // 2 :]
    users = [frame for frame, _ in steps if is_user_file(frame.f_code.co_filename)][-_MAX_WITH_VARIABLES:]
    return [
        FrameInfo(
            filename=frame.f_code.co_filename,
            lineno=lineno,
            name=frame.f_code.co_name,
            line=linecache.getline(frame.f_code.co_filename, lineno, frame.f_globals).strip(),
            is_user=is_user_file(frame.f_code.co_filename),
            first_lineno=frame.f_code.co_firstlineno,
            variables=texts_of_variables(frame) if frame in users else (),
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
    return _two_ends("".join(lines))


def _message_of(error: BaseException) -> str:
    try:
        return _two_ends(str(error))
    except BaseException as broken:
        return f"<its message can't be shown: str() raises {type(broken).__name__}>"


def _two_ends(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else shortened(text, _KEPT_CHARACTERS)


def _qualified_name(cls: type) -> str:
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def _is_consequence(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, looks like the result of losing another rank."""
    chain = list(chain_of(error))
    # Errors from collectives come from C++ without an OSError as their cause. Errors from the user's
    # connections have such a cause.
    is_own = any(isinstance(cause, OSError) for cause in chain)
    words = _CONSEQUENCE_WORDS if is_own else _CONSEQUENCE_WORDS + _CONNECTION_WORDS
    return any(_is_collective_error(cause, words) for cause in chain)


def _is_collective_error(error: BaseException, words: tuple[str, ...]) -> bool:
    if type(error).__name__ in _CONSEQUENCE_TYPES:
        return True
    # Gloo, NCCL and stores raise RuntimeErrors.
    if "torch.distributed" not in sys.modules or not isinstance(error, RuntimeError):
        return False
    message = _message_of(error).lower()
    return any(some in message for some in words)

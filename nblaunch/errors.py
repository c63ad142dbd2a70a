"""nblaunch's exceptions and warnings, except ``config.settings.ConfigError``.

    NblaunchError
    ├── LaunchError           the job could not be started; no worker ran the function
    │   └── PayloadError      the call can't be sent to workers (names the variable that can't be pickled)
    ├── WorkerError           a worker failed
    │   ├── WorkerFailed      it raised an exception that can't be pickled; has its type, message and traceback as text
    │   └── WorkerDied        no exception: a signal, sys.exit(n), os._exit, or a return while others are waiting
    │       └── NodeLost      its machine left the job or stopped sending heartbeats
    ├── CollectiveMismatch    ranks called different collectives where all must call the same one
    ├── JobHung               no rank made progress, and ``on_hang="stop"`` is set
    ├── JobLost               the process of a detached job was killed, or its machine restarted
    ├── ResultError           the return value can't be pickled; ``partial`` has the parts that can
    ├── JobCancelled          the job was stopped by ``job.cancel()`` (``job.interrupt()`` raises KeyboardInterrupt)
    ├── CheckpointError       a checkpoint can't be written, is damaged, or does not fit
    └── DistributedOperationException   ranks called a collective with tensors of different shapes

Exceptions from the user's function are raised with their original type; invalid arguments raise ``ValueError`` or
``TypeError``. All exceptions can be pickled, so that process pools and test runners can pass them on. :func:`warn`
shows a warning at the user's line, and :func:`chain_of` follows causes and contexts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

_NOT_USER_CODE = frozenset({"nblaunch", "contextlib", "logging", "torch"})
"""Top-level packages whose frames are not the user's."""


class NblaunchError(Exception):
    """Base class for all exceptions defined here.

    Each exception can be constructed from its message alone, so that Python can pickle it with its attributes.
    """


class LaunchError(NblaunchError, RuntimeError):
    """The job could not be started; no worker ran the user's function."""


class PayloadError(LaunchError, TypeError):
    """The function, its closure or its arguments can't be sent to fresh worker processes."""


class WorkerError(NblaunchError, RuntimeError):
    """A worker failed.

    Args:
        message: what happened and where, with evidence and advice.
        rank: rank of the worker that failed first.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerFailed(WorkerError):
    """A worker raised an exception that can't be pickled; the message contains its type, text and traceback."""


class WorkerDied(WorkerError):
    """A worker ended without raising an exception.

    ``exitcode`` is its exit status (``-N`` for signal ``N``, as in :class:`subprocess.Popen`), or 1 if other code in
    the kernel has already collected the status.
    """

    def __init__(self, message: str, *, rank: int = -1, exitcode: int = 0) -> None:
        super().__init__(message, rank=rank)
        self.exitcode = exitcode


class NodeLost(WorkerDied):
    """Another machine left the job, or sent no heartbeat for too long.

    ``rank`` is the first rank of the lost machine; ``exitcode`` has no meaning.
    """


class JobHung(NblaunchError, RuntimeError):
    """The job made no progress for ``hang_timeout_s`` seconds and was stopped; the message contains the position of
    every rank.

    Args:
        message: what happened.
        ranks: ranks that the others were waiting for; empty if unknown.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CollectiveMismatch(NblaunchError, RuntimeError):
    """Ranks called different collectives, or the same one with different tensors, reductions or roots.

    Args:
        message: each rank's call and its line.
        ranks: ranks at fault; empty if no side is more likely to be wrong.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class JobLost(NblaunchError, RuntimeError):
    """The process of a detached job was killed, or its machine restarted, before it could record the outcome.

    Its workers ended with it; the logs are kept.
    """


class ResultError(NblaunchError, TypeError):
    """The function finished, but its return value can't be sent to the kernel.

    ``partial`` is the return value with an :class:`nblaunch.wire.pickling.pickle_errors.Unpicklable` for each part that
    can't be pickled.
    """

    partial: Any = None  # stays None if the value was too large to be sent with the error

    def __init__(self, message: str, *, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class JobCancelled(NblaunchError):
    """The job was stopped on request before it had a result."""


class CheckpointError(NblaunchError, RuntimeError):
    """A checkpoint can't be written, is damaged, or does not fit the model."""


class DistributedOperationException(NblaunchError, ValueError):
    """Ranks called a collective with tensors of different shapes; the message lists the shapes."""


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause or else its context, and so on, each exception once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Show a warning at the user's line, like ``warnings.warn`` with ``skip_file_prefixes`` in Python 3.12."""
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<string>")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def user_frame() -> FrameType:
    """Return the innermost frame outside nblaunch and the libraries that call it, such as torch.

    Returns the outermost frame if there is none.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _top_level_package(frame) in _NOT_USER_CODE:
        frame = frame.f_back
    return frame


def _top_level_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

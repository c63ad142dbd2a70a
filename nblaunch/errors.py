"""Every exception that nblaunch raises by its own name, but for wrong settings (``config.ConfigError``); warnings.

    NblaunchError
    ├── LaunchError           the job could not be started; no worker ran the function
    │   └── PayloadError      the call can't be sent to workers (names the variable that can't be pickled)
    ├── WorkerError           a worker failed
    │   ├── WorkerFailed      it raised an exception that can't travel; carries its type, message and traceback as text
    │   └── WorkerDied        it ended without raising: a signal, os._exit, or leaving while others needed it
    │       └── NodeLost      it was on another machine, which has gone away or sends no heartbeats any more
    ├── JobHung               no rank made progress any more, and ``on_hang="stop"`` was asked for
    ├── ResultError           the function finished, but its return value can't travel; ``partial`` is what could
    ├── JobCancelled          the job was stopped by ``job.cancel()`` or ``job.interrupt()``
    ├── CheckpointError       a checkpoint can't be written, or one that was read is damaged or does not fit
    └── DistributedOperationException   ranks called a collective with tensors that don't go together; names each rank's

A user's own exception is raised as it is, with its original type; bad arguments are ``ValueError`` or ``TypeError``.
All of these can be pickled, so that they survive a process pool, a notebook runner or a test under xdist.
:func:`warn` shows a warning at the user's own line.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

_NOT_USER_CODE = frozenset({"nblaunch", "contextlib", "logging", "torch"})
"""Top-level packages whose frames lie between a user's line and ours."""


class NblaunchError(Exception):
    """Base of all exceptions defined here.

    Python itself pickles each with its attributes, because each can be made from its message alone.
    """


class LaunchError(NblaunchError, RuntimeError):
    """The job could not be started; no worker ran the user's function."""


class PayloadError(LaunchError, TypeError):
    """The function, its closure or its arguments can't be sent to fresh worker processes."""


class WorkerError(NblaunchError, RuntimeError):
    """A worker failed.

    Args:
        message: what happened, where, the evidence and the remedy, ready to be read.
        rank: the rank of the worker that failed first.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerFailed(WorkerError):
    """A worker raised an exception that can't be pickled; the message carries its type, text and traceback."""


class WorkerDied(WorkerError):
    """A worker ended without raising an exception.

    ``exitcode`` is its exit status (``-N`` for signal ``N``, as in :class:`subprocess.Popen`).
    """

    def __init__(self, message: str, *, rank: int = -1, exitcode: int = 0) -> None:
        super().__init__(message, rank=rank)
        self.exitcode = exitcode


class NodeLost(WorkerDied):
    """Another machine of the job has gone away, or has sent no heartbeat for too long.

    ``rank`` is its first rank; ``exitcode`` says nothing about how its workers ended.
    """


class JobHung(NblaunchError, RuntimeError):
    """The job made no progress for ``hang_timeout_s`` seconds and was stopped; says where every rank was."""


class ResultError(NblaunchError, TypeError):
    """The function finished, but its return value can't be sent to the kernel.

    ``partial`` is the return value with an :class:`nblaunch.wire.pickle_errors.Unpicklable` in place of each part that
    can't travel.
    """

    def __init__(self, message: str, *, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class JobCancelled(NblaunchError):
    """The job was stopped on request before it had a result."""


class CheckpointError(NblaunchError, RuntimeError):
    """A checkpoint could not be written, or one that was read is damaged or does not fit; says what and where."""


class DistributedOperationException(NblaunchError, ValueError):
    """Ranks called a collective with tensors that don't go together; names each rank's."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Show a warning at the user's own line, however deep in the package it arises.

    ``warnings.warn`` can do that by ``skip_file_prefixes``, from Python 3.12 on.
    """
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<string>")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def user_frame() -> FrameType:
    """Return the innermost frame that is neither nblaunch's nor one that it is called through, such as torch's.

    The outermost frame where there is none.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _top_level_package(frame) in _NOT_USER_CODE:
        frame = frame.f_back
    return frame


def _top_level_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

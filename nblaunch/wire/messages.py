"""The commands that the kernel sends to workers, and their replies. Pickled, on a socket that only the two share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import Failed, Returned, WeightsSent
from nblaunch.wire.modules import ArgPath


@dataclass(frozen=True)
class Command:
    """A command to a rank.

    Args:
        group: number of the process group that the rank must be in, counted from 1; 0 = as it is.
    """

    group: int = 0


@dataclass(frozen=True)
class Execute(Command):
    """Code to run as a cell, in ``__main__``.

    Args:
        code: Python with IPython's extensions, where the rank has IPython.
        filename: under which tracebacks name it.
        first_line: number of its first line in the source that ``source`` holds.
        source: for tracebacks; empty = ``code``.
        shows_value: whether the value of a last expression is displayed; False = it is returned.
    """

    code: str = ""
    filename: str = ""
    first_line: int = 1
    source: str = ""
    shows_value: bool = False


@dataclass(frozen=True)
class Assign(Command):
    """Variables to set in ``__main__``; the values follow as a memory file."""


@dataclass(frozen=True)
class Call(Command):
    """A function to call as a job does; the call follows as a memory file.

    Args:
        sends_weights_of: argument paths of the modules whose weights are wanted back.
    """

    sends_weights_of: tuple[ArgPath, ...] = ()


@dataclass(frozen=True)
class LeaveGroup(Command):
    """Request to leave the process group, in which another rank waits for this one in vain."""


@dataclass(frozen=True)
class Close(Command):
    """Request to end the worker."""


@dataclass(frozen=True)
class Reply:
    """The reply to a command. Its outbox follows as a memory file if ``returned`` is set.

    Args:
        time_s: when it ended, by the wall clock.
        failed: the exception that the command raised.
        value: of an expression, where its type is one of :data:`PLAIN_TYPES`.
        returned: where any other value lies in the outbox (``wire/outbox.py``).
        weights: of a call: where the trained weights lie there, by argument path.
        shown: a display of the value, by MIME type, where that was asked for.
        has_output: something was printed since the last reply.
    """

    time_s: float = 0.0
    failed: Failed | None = None
    value: Any = None
    returned: Returned | None = None
    weights: Mapping[ArgPath, WeightsSent] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    has_output: bool = False


PLAIN_TYPES = (type(None), bool, int, float, str)
"""Types of values that travel in the reply itself."""

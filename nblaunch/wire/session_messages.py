"""The commands of a session's client to the server in each rank. Pickled, on a socket that only the two share.

A :class:`~nblaunch.wire.replies.Reply` follows each.
"""

from __future__ import annotations

from dataclasses import dataclass

from nblaunch.wire.argument_paths import ArgPath


@dataclass(frozen=True)
class SessionCommand:
    """A command to a rank of a session.

    Args:
        group: number of the process group that the rank must be in, counted from 1; 0 = as it is.
        has_breakpoints: ``breakpoint()`` opens pdb in the kernel; otherwise it is passed over.
    """

    group: int = 0
    has_breakpoints: bool = False


@dataclass(frozen=True)
class Execute(SessionCommand):
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

    @property
    def is_name(self) -> bool:
        """Whether it only reads a variable, for which no rank needs another."""
        return self.code.isidentifier()


@dataclass(frozen=True)
class SetVariables(SessionCommand):
    """Variables to set in ``__main__``; the values follow as a memory file."""


@dataclass(frozen=True)
class RunFunction(SessionCommand):
    """A function to call as a job does; the call follows as a memory file.

    Args:
        wanted_weights: as in ``wire/assignment.py``.
    """

    wanted_weights: tuple[ArgPath, ...] = ()


@dataclass(frozen=True)
class LeaveGroup(SessionCommand):
    """Request to leave the process group, in which another rank waits for this one in vain."""


@dataclass(frozen=True)
class DropFrames(SessionCommand):
    """Request to give up the frames of a command that has failed."""


@dataclass(frozen=True)
class Close(SessionCommand):
    """Request to end the worker."""

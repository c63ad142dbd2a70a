"""What the debugger's client in the kernel and the debugger in a worker send each other.

Pickled, on a socket that only the two share, which is served while the worker's function, or a command of a session,
runs. A :class:`~nblaunch.wire.replies.Reply` follows what has a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DebugCommand:
    """A command to the debugger in a worker."""


@dataclass(frozen=True)
class Inspect(DebugCommand):
    """Evaluate an expression in the innermost frame of the user's code.

    Args:
        expression: Python.
        number: of this command; the reply repeats it.
    """

    expression: str = ""
    number: int = 0


@dataclass(frozen=True)
class ReadVariables(DebugCommand):
    """Describe the local variables of a frame; the reply's value is a :class:`FrameVariables`.

    Args:
        function: name and first line of the function whose innermost frame is meant; None, or one that is not running:
            the innermost frame of the user's code.
        number: of this command; the reply repeats it.
    """

    function: tuple[str, int] | None = None
    number: int = 0


@dataclass(frozen=True)
class Debug(DebugCommand):
    """Open pdb at the innermost frame of the user's code; :class:`Prompted` and :class:`Line` follow."""


@dataclass(frozen=True)
class Line(DebugCommand):
    """A line for pdb.

    Args:
        text: without the end of the line.
    """

    text: str = ""


@dataclass(frozen=True)
class Release(DebugCommand):
    """End a worker that is kept where its function failed."""


@dataclass(frozen=True)
class Prompted:
    """Pdb waits for a line.

    Args:
        text: what it has printed since the last line, without the prompt.
        stop: identifies a ``breakpoint()`` that was reached, by file, line and how often; None after that, and in pdb
            of a failure. It is the same on every rank that runs the same code.
        place: where that is, for messages.
        prompt: what pdb asks with: another one for the rest of a statement, or for the commands of a breakpoint.
    """

    text: str
    stop: tuple[str, int, int] | None = None
    place: tuple[str, int] = ("", 0)
    prompt: str = "(Pdb) "


@dataclass(frozen=True)
class Resumed:
    """Pdb was left.

    Args:
        text: what it has printed since the last line.
    """

    text: str = ""


@dataclass(frozen=True)
class FrameVariables:
    """The local variables of a frame.

    Args:
        function: its name, and the line where it begins.
        filename: of the code.
        line: where it is.
        aspects: name of an aspect of a variable, as ``batch.shape`` -> its text.
        stack: name and first line of each function of the user's code that runs, innermost first.
    """

    function: tuple[str, int]
    filename: str
    line: int
    aspects: Mapping[str, str]
    stack: Sequence[tuple[str, int]] = ()

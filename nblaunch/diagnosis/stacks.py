"""Python stacks as faulthandler writes them: read, reduced to the user's frames, merged over ranks."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nblaunch.diagnosis.rendering import cell_name
from nblaunch.wire.exceptions import is_own_file, is_user_file

_THREAD = re.compile(
    r"^(Stack|Current thread 0x[0-9a-f]+|Thread 0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


@dataclass(frozen=True)
class StackFrame:
    """One frame: ``line`` is 0 where faulthandler did not know it."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True)
class ThreadStack:
    """One thread's frames, innermost first. ``is_current`` marks the thread that the signal interrupted."""

    is_current: bool
    frames: tuple[StackFrame, ...]


def parse(text: str) -> list[ThreadStack]:
    """The threads of one dump. Lines of any other form are passed over."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        header, frame = _THREAD.match(line), _FRAME.match(line)
        if header:
            threads.append(ThreadStack(is_current=not header[1].startswith("Thread"), frames=()))
        elif frame and threads:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            last = threads[-1]
            threads[-1] = ThreadStack(
                last.is_current, (*last.frames, StackFrame(frame["file"], number, frame["name"]))
            )
    return threads


def is_user_frame(frame: StackFrame) -> bool:
    """Whether the frame is of a notebook cell or a file of the user's own."""
    return is_user_file(frame.filename)


def describe(frames: Sequence[StackFrame]) -> list[str]:
    """One line a frame, as ``Cell In[5], line 9 in train: while not ready``; the launcher's own frames left out."""
    lines = []
    for frame in frames:
        if is_own_file(frame.filename) or frame.filename.startswith("<frozen"):
            continue
        source = linecache.getline(frame.filename, frame.line).strip()
        where = f"{cell_name(frame.filename)}, line {frame.line} in {frame.name}"
        lines.append(f"{where}: {source}" if source else where)
    return lines


def merge(stacks: Mapping[int, str]) -> dict[str, list[int]]:
    """Equal texts together: text -> the ranks that have it, in order of their first rank."""
    merged: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        merged.setdefault(stacks[rank], []).append(rank)
    return merged

"""Python stacks of running workers: collect them, parse them, and read from each where its rank is.

StackDump: signal -> faulthandler appends to a file of the rank -> position_of(text) -> Position
"""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nblaunch.diagnosis.rendering import cell_name
from nblaunch.host import disk, proc
from nblaunch.wire.assignment import STACKS_SIGNAL
from nblaunch.wire.exceptions import is_own_file, is_user_file

_DEADLINE_S = 0.8
_QUIET_S = 0.03
"""faulthandler writes line by line; a file that has not grown for this long is complete."""

_STACK_BYTES = 1 << 14
"""What the stacks of a rank's threads may take."""

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/nblaunch/training/collectives/",
    "/torch_xla/core/xla_model.py",
)
_RENDEZVOUS = "/nblaunch/training/checkpoints/rendezvous.py"
_DATA_FILES = ("/torch/utils/data/dataloader.py",)
_DATA_LOADER = "the data loader"
_LONG_WORK_FILES = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/async_compile.py",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/safetensors/",
    "/nblaunch/training/checkpoints/",
)
"""Compiling, writing and reading: one call of these may take any time, and says nothing meanwhile."""

_BOOTSTRAP = "nblaunch/worker/bootstrap.py"
_STAGES = (
    ("nblaunch/wire/outbox.py", "put_value", "what it returned is being pickled"),
    ("nblaunch/worker/delivery.py", "_put_weights", "trained weights are being sent"),
)
"""What a worker is at once the user's function has returned, after the function of ours that does it."""

_WRAPPERS = {"wrapper", "inner", "_fn", "decorate_context", "all_gather_into"}

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


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Args:
        where: the user's innermost line, as ``Cell In[5], line 9 in train: while not ready``.
        waiting_in: the collective that it has entered, as ``all_reduce``; empty where it is in none.
        is_long_work: it compiles, or writes or reads a checkpoint.
        stack: of the thread that runs the function, innermost first.
    """

    where: str
    waiting_in: str = ""
    is_long_work: bool = field(default=False, compare=False)
    stack: tuple[StackFrame, ...] = field(default=(), compare=False, repr=False)

    @property
    def waits_for_ranks(self) -> bool:
        """Whether it is other ranks that it waits for."""
        return self.waiting_in not in ("", _DATA_LOADER)

    def __str__(self) -> str:
        return f"waiting in {self.waiting_in}, {self.where}" if self.waiting_in else self.where


NO_ANSWER = Position("no answer: it is stopped, or blocked inside the system")


class StackDump:
    """One collection. ``poll`` it until :attr:`is_done`; it never waits.

    Args:
        pids: rank -> process; only ranks that have sent ``Started``, whose handler is in place. (To any other
            process the signal would be deadly.)
        paths: rank -> the file that its faulthandler writes to.
    """

    def __init__(self, pids: Mapping[int, int], paths: Mapping[int, Path]) -> None:
        self._pids = dict(pids)
        self._paths = paths
        self._offsets = {rank: _size(paths[rank]) for rank in pids}
        self._sizes = dict(self._offsets)
        self._changed_s = self._began_s = time.monotonic()
        self.is_done = not pids
        for pid in pids.values():
            with suppress(ProcessLookupError):  # a forkserver's worker may have ended without our knowing yet
                os.kill(pid, STACKS_SIGNAL)

    def poll(self) -> None:
        """Look whether all have answered and finished writing, or the time is over."""
        now = time.monotonic()
        sizes = {rank: _size(self._paths[rank]) for rank in self._pids}
        if sizes != self._sizes:
            self._sizes, self._changed_s = sizes, now
        have_all = all(sizes[rank] > self._offsets[rank] for rank in sizes)
        self.is_done = (have_all and now - self._changed_s > _QUIET_S) or now - self._began_s > _DEADLINE_S

    def positions(self) -> dict[int, Position]:
        """Where each rank is, by what it wrote."""
        return {rank: self._position(rank) for rank in self._pids}

    def _position(self, rank: int) -> Position:
        state = proc.unusual_state(self._pids[rank])
        if self._sizes[rank] == self._offsets[rank] and state is not None:
            return Position(f"no answer: the process is {state}")
        path = self._paths[rank]
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                position = position_of(file.read().decode(errors="replace"))
        except OSError as error:  # the folder of logs may be deleted while the job runs
            return Position(f"no answer: {path} can't be read: {error.strerror}")
        if position is None:
            refusal = disk.refuses_growth(path, _STACK_BYTES)
            return Position(f"its stack can't be written: {refusal}") if refusal else NO_ANSWER
        return position


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def position_of(text: str) -> Position | None:
    """Where a rank is, from what faulthandler wrote for it; None where the function's thread is not in it."""
    thread = _main_thread(parse(text))
    if thread is None:
        return None
    inner, user = _split_at_user(thread.frames)
    described = describe(user[:1]) or describe(thread.frames[:1]) or ["outside of the function"]
    waiting_in = _collective_in(inner)
    is_long_work = not waiting_in and any(
        part in frame.filename for part in _LONG_WORK_FILES for frame in inner
    )
    return Position(_stage(thread.frames) + described[0], waiting_in, is_long_work, thread.frames)


def _stage(frames: Sequence[StackFrame]) -> str:
    for file, name, stage in _STAGES:
        if any(frame.name == name and frame.filename.endswith(file) for frame in frames):
            return f"the function has returned, and {stage}: "
    return ""


def _main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """The thread that runs the user's function: the one that came through the worker's bootstrap."""
    for thread in threads:
        if any(frame.filename.endswith(_BOOTSTRAP) for frame in thread.frames):
            return thread
    return next((thread for thread in threads if thread.is_current), None)


def _split_at_user(frames: Sequence[StackFrame]) -> tuple[Sequence[StackFrame], Sequence[StackFrame]]:
    """Frames inside of the user's innermost one, and the frames from that one outwards."""
    for i, frame in enumerate(frames):
        if is_user_frame(frame):
            return frames[:i], frames[i:]
    return frames, ()


def _collective_in(inner: Sequence[StackFrame]) -> str:
    """The name of the collective among library frames: the outermost one, which is what the user called."""
    if any(frame.filename.endswith(_RENDEZVOUS) for frame in inner):
        return inner[-1].name  # save_state, or what waits for an asynchronous one
    for frame in reversed(inner):
        if any(part in frame.filename for part in _DATA_FILES):
            return _DATA_LOADER
        if any(part in frame.filename for part in _COLLECTIVE_FILES) and frame.name not in _WRAPPERS:
            return frame.name
        if frame.filename.endswith("/torch/autograd/graph.py"):
            return "backward"
    return ""


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

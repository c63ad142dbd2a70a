"""Collects and parses the Python stacks of running workers, and derives each rank's position in its code.

StackDump: signal -> the worker appends its stack to the rank's file -> position_of(text) -> Position
"""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from nblaunch.host import files, proc
from nblaunch.user_code import cell_name, is_own_file, is_user_file
from nblaunch.wire.assignment import NATIVE_STACKS_SIGNAL, NUM_THREADS, STACKS_SIGNAL

_NATIVE_S = 0.2
"""Seconds without a reply after which a rank counts as blocked in native code and is asked again."""

_DEADLINE_S = 1.0
_QUIET_S = 0.03
"""Seconds without growth after which a file is complete; faulthandler writes line by line."""

_STACK_BYTES = 1 << 14
"""Maximum size of a rank's stacks, in bytes."""

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/nblaunch/training/collectives/",
    "/torch_xla/core/xla_model.py",
)
_HOOKS_FILE = "/nblaunch/worker/collective_hooks.py"
_DDP_FILE = "/torch/nn/parallel/distributed.py"
_SAVE_ROUND = "/nblaunch/training/checkpoints/save_round.py"
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
"""Source files that compile or handle checkpoints, in which calls may take a long time without signs of progress."""

_IMPORT_SYSTEM = "<frozen importlib."

_BOOTSTRAP = "nblaunch/worker/bootstrap.py"
_STAGES = (
    ("nblaunch/wire/outbox.py", "put_value", "its return value is being pickled"),
    ("nblaunch/worker/delivery.py", "_put_weights", "trained weights are being sent"),
)
"""(file, function, description) of a worker's activities after the user's function has returned."""

_WRAPPERS = {"wrapper", "inner", "_fn", "decorate_context", "all_gather_into"}

_THREAD = re.compile(
    r"^(Stack|Current thread 0x[0-9a-f]+|Thread 0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):"
)
_NUM_THREADS = re.compile(rf"^{re.escape(NUM_THREADS)}(\d+)$", re.MULTILINE)
_FOLDER = re.compile(r"/\S*/")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


@dataclass(frozen=True)
class StackFrame:
    """One frame; ``line`` is 0 if faulthandler did not know it."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True)
class ThreadStack:
    """Frames of one thread, innermost first. ``is_current`` marks the thread that the signal interrupted."""

    is_current: bool
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True)
class Position:
    """The position of a rank in its code.

    Args:
        where: the user's innermost line, such as ``cell 5, line 9 in train: while not ready``.
        waiting_in: the collective that it has entered, such as ``all_reduce``; empty if there is none.
        is_long_work: it is compiling, or is writing or reading a checkpoint.
        stack: frames of the thread that runs the function, innermost first.
        is_importing: it is importing a library.
        num_threads: number of Python threads in the process; None if the process did not answer.
    """

    where: str
    waiting_in: str = ""
    is_long_work: bool = field(default=False, compare=False)
    stack: tuple[StackFrame, ...] = field(default=(), compare=False, repr=False)
    is_importing: bool = field(default=False, compare=False)
    num_threads: int | None = field(default=None, compare=False, repr=False)

    @property
    def waits_for_ranks(self) -> bool:
        """Whether it is waiting for other ranks."""
        return self.waiting_in not in ("", _DATA_LOADER)

    @property
    def place(self) -> str:
        """Its position in short form: ``cell 5, line 9``, ``train.py, line 18``."""
        return _FOLDER.sub("", self.where.partition(" in ")[0])

    @property
    def no_reply(self) -> str:
        """Why the process did not answer; empty if it did."""
        return self.where.removeprefix(_NO_REPLY) if self.where.startswith(_NO_REPLY) else ""

    def __str__(self) -> str:
        return f"waiting in {self.waiting_in}, {self.where}" if self.waiting_in else self.where


_NO_REPLY = "no reply: "
NO_REPLY = Position(f"{_NO_REPLY}it is stopped, or blocked in a system call")


class StackDump:
    """One round of collecting the stacks of all ranks. Call :meth:`poll` until :attr:`is_done`; it never blocks.

    Args:
        pids: rank -> process, for ranks that have sent ``Started``; the signal kills a process without
            the handler.
        paths: rank -> file that its faulthandler writes to.
    """

    def __init__(self, pids: Mapping[int, int], paths: Mapping[int, Path]) -> None:
        self._pids = dict(pids)
        self._paths = paths
        self._offsets = {rank: _size(paths[rank]) for rank in pids}
        self._sizes = dict(self._offsets)
        self._changed_s = self._began_s = time.monotonic()
        self.is_done = not pids
        self._has_asked_native = False
        for rank in pids:
            self._ask(rank, STACKS_SIGNAL)

    def _ask(self, rank: int, signum: int) -> None:
        with suppress(ProcessLookupError):  # a worker of the forkserver may have ended unnoticed
            os.kill(self._pids[rank], signum)

    def poll(self) -> None:
        """Check whether all ranks have finished writing, or the deadline has passed."""
        now = time.monotonic()
        sizes = {rank: _size(self._paths[rank]) for rank in self._pids}
        if now - self._began_s > _NATIVE_S and not self._has_asked_native:
            self._has_asked_native = True
            for rank in self._pids:
                if sizes[rank] == self._offsets[rank]:
                    self._ask(rank, NATIVE_STACKS_SIGNAL)
        if sizes != self._sizes:
            self._sizes, self._changed_s = sizes, now
        have_all = all(sizes[rank] > self._offsets[rank] for rank in sizes)
        self.is_done = (have_all and now - self._changed_s > _QUIET_S) or now - self._began_s > _DEADLINE_S

    def positions(self) -> dict[int, Position]:
        """Return the position of each rank."""
        return {rank: self._position(rank) for rank in self._pids}

    def _position(self, rank: int) -> Position:
        state = proc.unusual_state(self._pids[rank])
        if self._sizes[rank] == self._offsets[rank] and state is not None:
            return Position(f"{_NO_REPLY}the process is {state}")
        path = self._paths[rank]
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                position = position_of(file.read().decode(errors="replace"))
        except OSError as error:  # the log folder may be deleted while the job is running
            return Position(f"{_NO_REPLY}{path} can't be read: {error.strerror}")
        if position is None:
            problem = files.growth_problem(path, _STACK_BYTES)
            return Position(f"its stack can't be written: {problem}") if problem else NO_REPLY
        return position


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def position_of(text: str) -> Position | None:
    """Return the position of a rank from the output of faulthandler; None if the function's thread is missing."""
    thread = _main_thread(parse(text))
    if thread is None:
        return None
    inner, _ = _split_at_user(_without_inherited(thread.frames))
    waiting_in = _collective_in(inner)
    is_long_work = not waiting_in and any(
        part in frame.filename for part in _LONG_WORK_FILES for frame in inner
    )
    is_importing = any(frame.filename.startswith(_IMPORT_SYSTEM) for frame in inner)
    counted = _NUM_THREADS.search(text)
    num_threads = int(counted[1]) if counted else None
    return Position(
        _where(thread.frames),
        waiting_in,
        is_long_work,
        thread.frames,
        is_importing,
        num_threads,
    )


def described_here(position: Position) -> Position:
    """Return a position that another process has described, with this process's cell names and source lines."""
    return replace(position, where=_where(position.stack)) if position.stack else position


def _where(frames: Sequence[StackFrame]) -> str:
    worker_frames = _without_inherited(frames)
    _, user = _split_at_user(worker_frames)
    described = describe(user[:1]) or describe(worker_frames[:1]) or ["outside the function"]
    return _stage(frames) + described[0]


def _stage(frames: Sequence[StackFrame]) -> str:
    for file, name, stage in _STAGES:
        if any(frame.name == name and frame.filename.endswith(file) for frame in frames):
            return f"the function has returned, and {stage}: "
    return ""


def _main_thread(threads: Sequence[ThreadStack]) -> ThreadStack | None:
    """Return the thread that runs the user's function; its stack includes frames of the worker's bootstrap."""
    for thread in threads:
        if any(frame.filename.endswith(_BOOTSTRAP) for frame in thread.frames):
            return thread
    return next((thread for thread in threads if thread.is_current), None)


def _without_inherited(frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
    """Return the frames inside the worker's bootstrap; in a forked worker, frames of the kernel surround them."""
    for i, frame in enumerate(frames):
        if frame.filename.endswith(_BOOTSTRAP):
            return frames[:i]
    return frames


def frames_inside_user_code(position: Position) -> Sequence[StackFrame]:
    """Return the frames of the calls made from the user's innermost line, innermost first."""
    return _split_at_user(_without_inherited(position.stack))[0]


def _split_at_user(frames: Sequence[StackFrame]) -> tuple[Sequence[StackFrame], Sequence[StackFrame]]:
    """Split the frames into those inside the user's innermost frame and the others; return both."""
    for i, frame in enumerate(frames):
        if is_user_file(frame.filename):
            return frames[:i], frames[i:]
    return frames, ()


def _collective_in(inner: Sequence[StackFrame]) -> str:
    """Return the name of the collective that the user called: the outermost one among the library frames."""
    if any(frame.filename.endswith(_SAVE_ROUND) for frame in inner):
        return inner[-1].name  # save_state, or the wait for an asynchronous save
    if inner and inner[0].filename.endswith(_DDP_FILE) and "broadcast" in inner[0].name:
        return "forward"  # DistributedDataParallel broadcasts buffers in it
    for frame in reversed(inner):
        if any(part in frame.filename for part in _DATA_FILES):
            return _DATA_LOADER
        if any(part in frame.filename for part in _COLLECTIVE_FILES) and frame.name not in _WRAPPERS:
            return frame.name
        if frame.filename.endswith("/torch/autograd/graph.py"):
            return "backward"
    if inner and _HOOKS_FILE in inner[-1].filename:
        return "Work.wait"  # the user's code itself waits for an asynchronous collective
    return ""


def parse(text: str) -> list[ThreadStack]:
    """Parse the threads of a dump; ignore other lines."""
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


def describe(frames: Sequence[StackFrame]) -> list[str]:
    """Return frames outside nblaunch as text, such as ``cell 5, line 9 in train: while not ready``."""
    lines = []
    for frame in frames:
        if is_own_file(frame.filename) or frame.filename.startswith("<frozen"):
            continue
        source = linecache.getline(frame.filename, frame.line).strip()
        where = f"{cell_name(frame.filename)}, line {frame.line} in {frame.name}"
        lines.append(f"{where}: {source}" if source else where)
    return lines

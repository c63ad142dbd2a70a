"""Seeing that a job hangs, and saying where. Pure functions and plain state; nothing here signals or waits.

A rank that waits in a collective uses no processor time, takes no step, prints nothing and says nothing. When one has
been that quiet for the whole timeout, the stacks of all ranks tell who waits for whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nblaunch import in_words
from nblaunch.launch.diagnosis import stacks
from nblaunch.launch.diagnosis.stacks import StackFrame, ThreadStack

_IDLE_SHARE = 0.02
"""Share of one core below which a rank counts as idle: threads that only wake to look around use less."""

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/nblaunch/training/collectives.py",
    "/torch_xla/core/xla_model.py",
)
_RENDEZVOUS = "/nblaunch/training/checkpoints/rendezvous.py"
_DATA_FILES = ("/torch/utils/data/dataloader.py",)
_BOOTSTRAP = "nblaunch/worker/bootstrap.py"
_STAGES = (
    ("nblaunch/wire/outbox.py", "put_value", "what it returned is being pickled"),
    ("nblaunch/worker/delivery.py", "_put_weights", "trained weights are being sent"),
)
"""What a worker is at once the user's function has returned, after the function of ours that does it."""

_WRAPPERS = {"wrapper", "inner", "_fn", "decorate_context", "all_gather_into"}


@dataclass(frozen=True)
class Mark:
    """What can be seen of a rank from outside: ``progress`` changes with every step, event or printed byte.

    ``cpu_s`` is its processor time in seconds; None where it can't be read.
    """

    progress: tuple[object, ...]
    cpu_s: float | None


class Watchdog:
    """Notices a rank that has made no progress for ``timeout_s`` seconds; once for each standstill of each rank."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last: dict[int, tuple[Mark, float]] = {}
        self._reported: set[int] = set()

    def observe(self, now_s: float, marks: Mapping[int, Mark]) -> bool:
        """Take in the marks of the ranks that run; True if one of them has just been quiet for too long."""
        for rank, mark in marks.items():
            if rank not in self._last or self._has_moved(rank, mark, now_s):
                self._last[rank] = (mark, now_s)
                self._reported.discard(rank)
        quiet = {rank for rank in marks if now_s - self._last[rank][1] >= self.timeout_s}
        is_new = bool(quiet - self._reported)
        self._reported |= quiet
        return is_new

    def _has_moved(self, rank: int, mark: Mark, now_s: float) -> bool:
        """Whether it told of progress, or has computed more since than a rank does that only waits.

        The work before a standstill must not hide it: once it amounts to enough, counting starts again.
        """
        since, since_s = self._last[rank]
        if mark.progress != since.progress:
            return True
        if mark.cpu_s is None or since.cpu_s is None:
            return False
        return mark.cpu_s - since.cpu_s >= _IDLE_SHARE * max(self.timeout_s, now_s - since_s)


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Args:
        where: the user's innermost line, as ``Cell In[5], line 9 in train: while not ready``.
        waiting_in: the collective that it has entered, as ``all_reduce``; empty where it is in none.
    """

    where: str
    waiting_in: str = ""

    def __str__(self) -> str:
        return f"waiting in {self.waiting_in}, {self.where}" if self.waiting_in else self.where


NO_ANSWER = Position("no answer: it is stopped, or blocked inside the system")


def position_of(text: str) -> Position | None:
    """Where a rank is, from what faulthandler wrote for it; None where the function's thread is not in it."""
    thread = _main_thread(stacks.parse(text))
    if thread is None:
        return None
    inner, user = _split_at_user(thread.frames)
    described = stacks.describe(user[:1]) or stacks.describe(thread.frames[:1]) or ["outside of the function"]
    return Position(_stage(thread.frames) + described[0], _collective_in(inner))


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
        if stacks.is_user_frame(frame):
            return frames[:i], frames[i:]
    return frames, ()


def _collective_in(inner: Sequence[StackFrame]) -> str:
    """The name of the collective among library frames: the outermost one, which is what the user called."""
    if any(frame.filename.endswith(_RENDEZVOUS) for frame in inner):
        return inner[-1].name  # save_state, or what waits for an asynchronous one
    for frame in reversed(inner):
        if any(part in frame.filename for part in _DATA_FILES):
            return "the data loader"
        if any(part in frame.filename for part in _COLLECTIVE_FILES) and frame.name not in _WRAPPERS:
            return frame.name
        if frame.filename.endswith("/torch/autograd/graph.py"):
            return "backward"
    return ""


def describe_hang(
    positions: Mapping[int, Position], steps: Mapping[int, int], gone: Sequence[int]
) -> list[str]:
    """Who is where, equal positions together, and what that looks like.

    Args:
        positions: of the ranks that run.
        steps: rank -> batches that it has taken.
        gone: ranks that have returned already.
    """
    merged = stacks.merge({rank: str(position) for rank, position in positions.items()})
    lines = [f"{in_words.ranks(ranks)}: {text}" for text, ranks in merged.items()]
    reading = _reading(positions, steps, gone)
    return [*lines, reading] if reading else lines


def _reading(positions: Mapping[int, Position], steps: Mapping[int, int], gone: Sequence[int]) -> str:
    waiting = {rank: position for rank, position in positions.items() if position.waiting_in}
    absent = [rank for rank in positions if rank not in waiting]
    if not waiting:
        return ""
    if gone:
        return (
            f"{in_words.ranks(gone)} returned already, so the others wait for ever: do all ranks see equally many "
            "batches?"
        )
    if absent:
        wait, has = "wait" if len(waiting) > 1 else "waits", "have" if len(absent) > 1 else "has"
        return (
            f"{in_words.ranks(waiting)} {wait} for {in_words.ranks(absent)}, which {has} not entered the "
            "collective."
        )
    taken = {rank: steps[rank] for rank in waiting if rank in steps}
    if len(set(taken.values())) > 1:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(taken.items()))
        return f"The ranks have taken unequal numbers of batches ({counts})."
    if len({(position.waiting_in, position.where) for position in waiting.values()}) > 1:
        return "The ranks are in different collectives: every rank must call the same ones in the same order."
    return ""

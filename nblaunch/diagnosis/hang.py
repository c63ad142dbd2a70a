"""Where ranks are and who waits for whom, read from their stacks. Pure functions: nothing here signals or waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch import formatting
from nblaunch.diagnosis import stacks
from nblaunch.diagnosis.stacks import StackFrame, ThreadStack

_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/nblaunch/training/collectives.py",
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


def position_of(text: str) -> Position | None:
    """Where a rank is, from what faulthandler wrote for it; None where the function's thread is not in it."""
    thread = _main_thread(stacks.parse(text))
    if thread is None:
        return None
    inner, user = _split_at_user(thread.frames)
    described = stacks.describe(user[:1]) or stacks.describe(thread.frames[:1]) or ["outside of the function"]
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
        if stacks.is_user_frame(frame):
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


def describe_hang(
    positions: Mapping[int, Position],
    steps: Mapping[int, int],
    gone: Sequence[int],
    busy: Sequence[int] = (),
) -> list[str]:
    """Who is where, equal positions together, and what that looks like.

    Args:
        positions: of the ranks that run.
        steps: rank -> batches that it has taken.
        gone: ranks that have returned already.
        busy: ranks that are known to compute there.
    """
    texts = {
        rank: f"{position} (computing)" if rank in busy else str(position)
        for rank, position in positions.items()
    }
    merged = stacks.merge(texts)
    lines = [f"{formatting.ranks(ranks)}: {text}" for text, ranks in merged.items()]
    reading = _reading(positions, steps, gone)
    return [*lines, reading] if reading else lines


def _reading(positions: Mapping[int, Position], steps: Mapping[int, int], gone: Sequence[int]) -> str:
    waiting = {rank: position for rank, position in positions.items() if position.waits_for_ranks}
    absent = [rank for rank in positions if rank not in waiting]
    if not waiting:
        return ""
    if gone:
        return (
            f"{formatting.ranks(gone)} returned already, so the others wait for ever: do all ranks see equally many "
            "batches?"
        )
    if absent:
        wait, has = "wait" if len(waiting) > 1 else "waits", "have" if len(absent) > 1 else "has"
        return (
            f"{formatting.ranks(waiting)} {wait} for {formatting.ranks(absent)}, which {has} not entered the "
            "collective."
        )
    taken = {rank: steps[rank] for rank in waiting if rank in steps}
    if len(set(taken.values())) > 1:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(taken.items()))
        return f"The ranks have taken unequal numbers of batches ({counts})."
    if len({(position.waiting_in, position.where) for position in waiting.values()}) > 1:
        return "The ranks are in different collectives: every rank must call the same ones in the same order."
    return ""

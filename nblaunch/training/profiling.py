"""Recording where the time of a block goes: torch's profiler, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nblaunch.training.checkpoints.files import PROFILE_PATTERN_NAME
from nblaunch.training.options import ProfileKwargs


@contextmanager
def record(options: ProfileKwargs, rank: int, wait_for_everyone: Callable[[], None]) -> Iterator[Any]:
    """Profile the block; yields torch's profiler.

    Args:
        options: what is recorded, and the folder for traces, if any.
        rank: this rank, for the name of its file.
        wait_for_everyone: a barrier, so that all traces are there when the block has ended.
    """
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is None:
        return
    folder = Path(options.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / PROFILE_PATTERN_NAME.format(suffix=rank)))
    wait_for_everyone()

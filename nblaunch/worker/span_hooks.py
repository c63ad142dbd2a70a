"""Records how long this rank saves and collects garbage.

Waits for data, backward passes, optimizer steps and evaluations are recorded where they are reported to the board.
``collective_hooks.py`` records waits for collectives.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from time import monotonic
from typing import Any

from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind, SpanWriter

_SHORTEST_S = 1e-3  # shortest garbage collection that is recorded; most take microseconds


def record_garbage(slot: Slot) -> None:
    """Record the garbage collections of this process in ``slot`` from now on."""
    if slot.spans is not None:
        gc.callbacks.append(_recorder_of_collections(slot.spans))


def record_save(slot: Slot, file: Any, began_s: float) -> None:
    """Record in ``slot`` a save of ``file`` that has just ended; it began at ``began_s`` (monotonic clock)."""
    if slot.spans is not None:
        slot.spans.put(SpanKind.SAVE, began_s, monotonic(), value=_size_of(file))


def _size_of(file: Any) -> int:
    """Return the current size of a file in bytes; 0 if unknown."""
    try:
        return (
            os.path.getsize(file) if isinstance(file, (str, os.PathLike)) else int(file.seek(0, os.SEEK_CUR))
        )
    except (AttributeError, OSError, ValueError):
        return 0


def _recorder_of_collections(spans: SpanWriter) -> Callable[[str, dict[str, int]], None]:
    """Return the callback that Python calls before and after a garbage collection."""
    began_s = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        now_s = monotonic()
        if phase == "start":
            began_s = now_s
        elif now_s - began_s >= _SHORTEST_S:
            spans.put(SpanKind.GARBAGE, began_s, now_s)

    return note

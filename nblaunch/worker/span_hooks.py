"""Hooks by which this rank records how long it saves and collects garbage.

Waits for data, backward passes, optimizers and evaluations are recorded where they are reported to the board, waits for
collectives by ``collective_hooks.py``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import wraps
from time import monotonic
from typing import Any

from nblaunch import packages
from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind, SpanWriter

_SHORTEST_S = 1e-3  # of a garbage collection that is recorded: most take microseconds


def record_spans(slot: Slot) -> None:
    """Record in ``slot`` from now on, also of modules that are imported later."""
    spans = slot.spans
    if spans is None:
        return
    packages.observe_when_imported(
        "torch.serialization", lambda module: _watch_saves(spans, module, "save", 1)
    )
    packages.observe_when_imported(
        "safetensors.torch", lambda module: _watch_saves(spans, module, "save_file", 1)
    )
    packages.observe_when_imported(
        "torch.distributed.checkpoint.state_dict_saver",
        lambda module: _watch_saves(spans, module, "save", -1),
    )
    gc.callbacks.append(_recorder_of_collections(spans))


def _watch_saves(spans: SpanWriter, module: Any, name: str, place: int) -> None:
    """Record the calls of a function that saves.

    Args:
        spans: of this rank.
        module: where the function is; packages that have imported it from there get the new one, too.
        name: of the function.
        place: of the argument that names the file; -1 if it names none.
    """
    original: Callable[..., Any] = getattr(module, name)

    @wraps(original)
    def save_and_record(*args: Any, **kwargs: Any) -> Any:
        began_s = monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            file = args[place] if 0 <= place < len(args) else kwargs.get("f", kwargs.get("filename"))
            spans.put(SpanKind.SAVE, began_s, monotonic(), value=_size_of(file))

    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for owner in (module, package):
        if getattr(owner, name, None) is original:
            setattr(owner, name, save_and_record)


def _size_of(file: Any) -> int:
    """Return the bytes that a file has by now; 0 if they are not known."""
    try:
        return (
            os.path.getsize(file) if isinstance(file, (str, os.PathLike)) else int(file.seek(0, os.SEEK_CUR))
        )
    except (AttributeError, OSError, ValueError):
        return 0


def _recorder_of_collections(spans: SpanWriter) -> Callable[[str, dict[str, int]], None]:
    """Return what Python calls before and after a garbage collection."""
    began_s = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        now_s = monotonic()
        if phase == "start":
            began_s = now_s
        elif now_s - began_s >= _SHORTEST_S:
            spans.put(SpanKind.GARBAGE, began_s, now_s)

    return note

"""Hooks on saves and on garbage collection, which record how long they take.

    function that saves ──> begin(file, frame)   detects ranks that write one file (file_writes.py)
                        ──> a span on the board  duration and size

The functions are ``torch.save``, safetensors' ``save_file`` and torch's distributed checkpoints. Backward passes,
optimizer steps, evaluations and waits for data are recorded where they are reported to the board;
``collective_hooks.py`` records waits for collectives.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

from nblaunch import packages
from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind, SpanWriter

Begin = Callable[[Any, FrameType], None]
"""Called with the file (None if the call names none) and the frame of the code that saves it."""

_SHORTEST_S = 1e-3  # shortest garbage collection that is recorded; most take microseconds

_SAVERS = (
    ("torch.serialization", "save", 1),
    ("safetensors.torch", "save_file", 1),
    ("torch.distributed.checkpoint.state_dict_saver", "save", -1),
)
"""Module, function, and the index of the argument that names the file; -1 if there is none."""


def record_garbage(slot: Slot) -> None:
    """Record the garbage collections of this process in ``slot`` from now on."""
    if slot.spans is not None:
        gc.callbacks.append(_recorder_of_collections(slot.spans))


def record_saves(slot: Slot, begin: Begin) -> None:
    """Record the saves of this process in ``slot`` from now on, and call ``begin`` before each.

    Modules that are imported later are included.
    """
    for module, name, place in _SAVERS:
        packages.observe_when_imported(
            module, partial(_watch_function, name=name, place=place, begin=begin, slot=slot)
        )


@packages.defines_replacements
def _watch_function(module: Any, *, name: str, place: int, begin: Begin, slot: Slot) -> None:
    original: Callable[..., Any] = getattr(module, name)

    @packages.replacement_of(original)
    def save_and_report(*args: Any, **kwargs: Any) -> Any:
        file = args[place] if 0 <= place < len(args) else kwargs.get("f", kwargs.get("filename"))
        begin(file, sys._getframe(1))
        began_s = monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            if slot.spans is not None:
                slot.spans.put(SpanKind.SAVE, began_s, monotonic(), value=_size_of(file))

    # Packages that imported the function re-export it under their own name.
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for owner in (module, package):
        if getattr(owner, name, None) is original:
            setattr(owner, name, save_and_report)


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

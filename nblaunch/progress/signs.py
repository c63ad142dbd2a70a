"""Signs of progress from any code, counted on the board: bars, parameters of new modules, garbage collections.

Hooks count updates of tqdm's bars and parameters of new modules in the rank's slot of the board. The counts
distinguish a working rank from a hung one, and show which ranks built a model instead of receiving it. Longer garbage
collections are spans on the board.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic
from typing import Any

from nblaunch import packages
from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind, SpanWriter

_SHORTEST_COLLECTION_S = 1e-3
"""Shortest garbage collection that is recorded; most take microseconds."""


def count_progress(slot: Slot) -> None:
    """Count progress on ``slot`` from now on, even in libraries that are imported later."""
    packages.observe_when_imported("torch.nn.modules.module", lambda module: _watch_parameters(module, slot))
    packages.observe_when_imported("tqdm.std", lambda module: _watch_bars(module, slot))
    if slot.spans is not None:
        gc.callbacks.append(_recorder_of_collections(slot.spans))


def _watch_parameters(module: Any, slot: Slot) -> None:
    import torch

    def count(owner: Any, name: str, parameter: Any) -> None:
        # Parameters of lazy layers have no size yet.
        if parameter is not None and not torch.nn.parameter.is_lazy(parameter) and not parameter.is_meta:
            slot.built_bytes += parameter.numel() * parameter.element_size()

    module.register_module_parameter_registration_hook(count)


def _watch_bars(module: Any, slot: Slot) -> None:
    """Count updates of bars, at most ten per second while the function iterates over a bar."""
    update = module.tqdm.update

    @packages.replaces(module.tqdm, "update")
    def update_and_note(self: Any, n: float | None = 1) -> Any:
        if n:
            slot.note_progress()
        return update(self, n)


def _recorder_of_collections(spans: SpanWriter) -> Callable[[str, dict[str, int]], None]:
    """Return the callback that Python calls before and after a garbage collection."""
    began_s = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        now_s = monotonic()
        if phase == "start":
            began_s = now_s
        elif now_s - began_s >= _SHORTEST_COLLECTION_S:
            spans.put(SpanKind.GARBAGE, began_s, now_s)

    return note

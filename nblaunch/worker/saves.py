"""Hooks on the functions that save: ``torch.save``, safetensors' ``save_file``, torch's distributed checkpoints.

function that saves ──> begin(file, frame)      detects ranks that write one file (file_writes.py)
                    └─> end(file, began_s)      records duration and size (span_hooks.py)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

from nblaunch import packages

Begin = Callable[[Any, FrameType], None]
"""Receives the file, or None if the call names none, and the frame that saves."""

End = Callable[[Any, float], None]
"""Receives the file, and the time at which saving began on the monotonic clock."""

_SAVERS = (
    ("torch.serialization", "save", 1),
    ("safetensors.torch", "save_file", 1),
    ("torch.distributed.checkpoint.state_dict_saver", "save", -1),
)
"""Module, function, and the index of the argument that names the file; -1 if there is none."""


def watch(begin: Begin, end: End) -> None:
    """Call ``begin`` and ``end`` around every save of this process, including modules that are imported later."""
    for module, name, place in _SAVERS:
        packages.observe_when_imported(
            module, partial(_watch_function, name=name, place=place, begin=begin, end=end)
        )


def _watch_function(module: Any, *, name: str, place: int, begin: Begin, end: End) -> None:
    original: Callable[..., Any] = getattr(module, name)

    @packages.replacement_of(original)
    def save_and_report(*args: Any, **kwargs: Any) -> Any:
        file = args[place] if 0 <= place < len(args) else kwargs.get("f", kwargs.get("filename"))
        begin(file, sys._getframe(1))
        began_s = monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            end(file, began_s)

    # Packages that imported the function re-export it under their own name.
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for owner in (module, package):
        if getattr(owner, name, None) is original:
            setattr(owner, name, save_and_report)

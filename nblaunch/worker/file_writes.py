"""Notices files that the user's function writes, so that the launcher sees where several ranks write the same one.

    torch.save(path), safetensors.torch.save_file(path)

Each such call is an :class:`~nblaunch.events.Observation`. Ranks that write one file at the same point of the program,
with no collective and no step of an optimizer between them, write it in an order that chance decides. Files that a
library writes for itself, as a cache, are left out: between the user's line and the call there are only the libraries
above.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from nblaunch import context, env, packages
from nblaunch.events import Event, Observation
from nblaunch.user_code import is_user_file
from nblaunch.wire.board import Slot

CHECK = "same_file"

_MAX_NOTED = 256
"""Files that a rank reports, so that a function that writes thousands stays fast."""

_WRITERS = frozenset({"safetensors", "transformers"})
"""Top-level packages that write what the user passes to them."""

_NO_FILES = ("/dev/", "/proc/", "/sys/")


def watch(rank: int, slot: Slot, emit: Callable[[Event], None], num_collectives: Callable[[], int]) -> None:
    """Report the files that this process writes from now on; forked processes report none.

    Args:
        rank: of this process.
        slot: counts the steps of optimizers.
        emit: sends an observation.
        num_collectives: returns how many collectives this process has called.
    """
    if {"off", f"-{CHECK}"} & env.read("NBLAUNCH_CHECKS"):
        return
    writes = _Writes(rank, slot, emit, num_collectives)
    os.register_at_fork(after_in_child=writes.stop)
    packages.observe_when_imported("torch.serialization", writes.watch_torch)
    packages.observe_when_imported("safetensors.torch", writes.watch_safetensors)


class _Writes:
    """The files that this process writes, with the arguments of :func:`watch`."""

    def __init__(
        self, rank: int, slot: Slot, emit: Callable[[Event], None], num_collectives: Callable[[], int]
    ) -> None:
        self._rank = rank
        self._slot = slot
        self._emit = emit
        self._num_collectives = num_collectives
        self._num_left = _MAX_NOTED

    def stop(self) -> None:
        """Report nothing more."""
        self._num_left = 0

    def watch_torch(self, module: Any) -> None:
        """Notice calls of ``torch.save``, which opens its file from C++."""
        save = module.save

        @functools.wraps(save)
        def note_and_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(f)
            return save(obj, f, *args, **kwargs)

        module.save = note_and_save
        torch: Any = sys.modules["torch"]
        if getattr(torch, "save", None) is save:
            torch.save = note_and_save

    def watch_safetensors(self, module: Any) -> None:
        """Notice calls of ``safetensors.torch.save_file``, which opens its file from Rust."""
        save = module.save_file

        @functools.wraps(save)
        def note_and_save(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(filename)
            return save(tensors, filename, *args, **kwargs)

        module.save_file = note_and_save

    def _note(self, file: Any) -> None:
        if self._num_left <= 0 or not isinstance(file, (str, os.PathLike)):
            return
        frame = _users_frame(sys._getframe(2))
        path = os.path.realpath(os.fspath(file))
        if frame is None or not isinstance(path, str) or path.startswith(_NO_FILES):
            return
        self._num_left -= 1
        self._emit(
            Observation(
                self._rank,
                time.time(),
                CHECK,
                f"several ranks write the file {os.path.basename(path)} at once, and chance decides what is in it",
                "Write it on the main process only (`if accelerator.is_main_process:`), or give each rank its own file",
                self._slot.num_updates,
                (path, context.current().num_commands, self._num_collectives()),
                "together",
                frame.f_code.co_filename,
                frame.f_lineno,
            )
        )


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame that a library writes for; None if it writes for itself."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _WRITERS:
            return None
        frame = frame.f_back
    return frame

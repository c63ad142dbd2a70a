"""Reports files that the user's function writes, so that the launcher detects ranks that write the same file.

Each save to a path (``saves.py``) is an :class:`~nblaunch.events.Observation`. Ranks race if they write one file at
the same point of the program, with no collective and no optimizer step between the writes. Files that a library
writes for itself, such as a cache, are left out: only libraries that write what the user passes to them may stand
between the user's line and the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from nblaunch import context, env
from nblaunch.events import Event, Observation
from nblaunch.user_code import is_user_file
from nblaunch.wire.board import Slot

CHECK = "same_file"

_MAX_NOTED = 256
"""Largest number of files that a rank reports, so that a function that writes thousands stays fast."""

_WRITERS = frozenset({"safetensors", "transformers"})
"""Top-level packages that write data that the user passes to them."""

_NO_FILES = ("/dev/", "/proc/", "/sys/")


class FileWrites:
    """The files that this process writes; forked processes report none.

    Args:
        rank: rank of this process.
        slot: counts optimizer steps.
        emit: sends an observation.
        num_collectives: returns how many collectives this process has called.
    """

    def __init__(
        self, rank: int, slot: Slot, emit: Callable[[Event], None], num_collectives: Callable[[], int]
    ) -> None:
        self._rank = rank
        self._slot = slot
        self._emit = emit
        self._num_collectives = num_collectives
        self._num_left = _MAX_NOTED
        self._pid = os.getpid()

    def note(self, file: Any, frame: FrameType) -> None:
        """Report a file that is about to be written; see :data:`nblaunch.worker.saves.Begin`."""
        if self._num_left <= 0 or not isinstance(file, (str, os.PathLike)) or os.getpid() != self._pid:
            return
        if self._num_left == _MAX_NOTED and {"off", f"-{CHECK}"} & env.read("NBLAUNCH_CHECKS"):
            self._num_left = 0
            return
        users = _users_frame(frame)
        path = os.path.realpath(os.fspath(file))
        if users is None or not isinstance(path, str) or path.startswith(_NO_FILES):
            return
        self._num_left -= 1
        self._emit(
            Observation(
                self._rank,
                time.time(),
                CHECK,
                f"several ranks write the file {os.path.basename(path)} at once, so its contents depend on timing",
                "Write it on the main process only (`if accelerator.is_main_process:`), or give each rank its own file",
                self._slot.num_updates,
                (path, context.current().num_commands, self._num_collectives()),
                "together",
                users.f_code.co_filename,
                users.f_lineno,
            )
        )


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame on whose behalf a library writes; None if the library writes for itself."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _WRITERS:
            return None
        frame = frame.f_back
    return frame

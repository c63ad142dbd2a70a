"""Reports files that the user's function writes, so that the launcher detects ranks that write the same file.

Each save to a path (``saves.py``), and each ``open`` that empties a file, is an
:class:`~nblaunch.events.Observation`. Ranks race if they write one file at the same point of the program, with no
collective and no optimizer step between the writes. Files that a library writes for itself, such as a cache, are left
out: only libraries that write what the user passes to them may stand between the user's line and the call. Writes
of a process that holds a lock are left out as well.
"""

from __future__ import annotations

import _io
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from nblaunch import context, env, packages
from nblaunch.events import Event, Observation
from nblaunch.user_code import is_user_file
from nblaunch.wire.board import Slot

CHECK = "same_file"

_MAX_NOTED = 256
"""Largest number of files that a rank reports, so that a function that writes thousands stays fast."""

_SAVERS = frozenset({"safetensors", "transformers"})
"""Top-level packages that save data that the user passes to them."""

_OPENERS = frozenset(
    {
        "IPython",
        "PIL",
        "codecs",
        "gzip",
        "logging",
        "matplotlib",
        "numpy",
        "pandas",
        "pathlib",
        "tarfile",
        "zipfile",
    }
)
"""The same, for packages that open files. Transformers is left out, because it also opens files of its own."""

_OPENS = (("builtins", "open"), ("io", "open"), ("IPython.core.interactiveshell", "io_open"))
"""Modules that bind ``open``, and the name; cells use the one in IPython."""

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

    def watch_open(self) -> None:
        """Report the files that ``open`` empties, until this process ends."""
        opener = packages.replacement_of(_io.open)(_Opener(self))
        opener.__module__ = "io"  # needed to pickle it; the original has _io in Python 3.13
        for module, name in _OPENS:
            packages.observe_when_imported(module, partial(_replace, name=name, opener=opener))

    def note(self, file: Any, frame: FrameType, writers: frozenset[str] = _SAVERS) -> None:
        """Report a file that is about to be written; see :data:`nblaunch.worker.saves.Begin`."""
        if self._num_left <= 0 or not isinstance(file, (str, os.PathLike)) or os.getpid() != self._pid:
            return
        if self._num_left == _MAX_NOTED and {"off", f"-{CHECK}"} & env.read("NBLAUNCH_CHECKS"):
            self._num_left = 0
            return
        users = _users_frame(frame, writers)
        path = os.path.realpath(os.fspath(file))
        if users is None or not isinstance(path, str) or path.startswith(_NO_FILES) or _holds_lock(self._pid):
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


def _replace(module: Any, *, name: str, opener: _Opener) -> None:
    if getattr(module, name, None) is _io.open:  # another release may have no such name
        setattr(module, name, opener)


class _Opener:
    """``open``, which also reports what it empties. Not a function: a class may have ``open`` as an attribute."""

    def __init__(self, writes: FileWrites) -> None:
        self._note = writes.note

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and "w" in mode:
            self._note(file, sys._getframe(1), _OPENERS)
        return _io.open(file, mode, *args, **kwargs)

    def __reduce__(self) -> str:
        return "open"


def _holds_lock(pid: int) -> bool:
    """Return whether a process has locked a file, so that ranks that write another file may take turns."""
    try:
        with _io.open("/proc/locks") as file:
            locks = map(str.split, file)
            return any(lock[3] == "WRITE" and lock[4] == str(pid) for lock in locks if lock[1] != "->")
    except (OSError, IndexError):  # a system without this file
        return False


def _users_frame(frame: FrameType | None, writers: frozenset[str]) -> FrameType | None:
    """Return the user's frame on whose behalf a library writes; None if the library writes for itself."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in writers:
            return None
        frame = frame.f_back
    return frame

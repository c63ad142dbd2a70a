"""Files that the user's function writes: ranks that write the same file, and files that it leaves open.

Each save to a path, and each ``open`` that truncates a file, is an :class:`~nblaunch.events.Observation`. Ranks race if
they write to the same file at the same point in the program, with no collective and no optimizer step between the
writes. Files that a library writes for its own use, such as caches, are left out: a write counts only if every library
between the user's line and the call is one that writes what the user passes to it. Writes by a process that holds a
lock are left out as well.

Saves by ``torch.save``, safetensors' ``save_file`` and torch's distributed checkpoints are also spans on the board,
with their duration and size.

When a file that ``open`` has truncated is closed, a checksum of its contents is reported. If all ranks write the same
data, the contents of the file do not depend on timing.
"""

from __future__ import annotations

import _io
import contextlib
import gc
import io
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

from nblaunch import context, env, packages
from nblaunch.events import Event, Observation
from nblaunch.user_code import user_frame_behind
from nblaunch.wire.board import Slot
from nblaunch.wire.spans import SpanKind

CHECK = "same_file"

_MAX_NOTED = 256
"""Maximum number of files that a rank reports, so that a function that writes thousands of files stays fast."""

_SAVES = (
    ("torch.serialization", "save", 1),
    ("safetensors.torch", "save_file", 1),
    ("torch.distributed.checkpoint.state_dict_saver", "save", -1),
)
"""Module, function, and the index of the argument that names the file; -1 if no argument does."""

_SAVERS = frozenset({"safetensors", "transformers"})
"""Top-level packages that save data that the user passes to them."""

_OPENERS = frozenset(
    ("IPython", "PIL", "codecs", "gzip", "logging", "matplotlib", "numpy", "pandas", "pathlib", "tarfile", "zipfile")
)  # fmt: skip
"""Top-level packages that open files only to write what the user passes to them. Transformers also opens
files of its own, so it is left out."""

_OPENS = (("builtins", "open"), ("io", "open"), ("IPython.core.interactiveshell", "io_open"))
"""Modules that bind ``open``, each with the name that it uses. Cells use IPython's."""

_NEWLINE_PLACE = 3
"""Index of ``newline`` among the arguments to ``open`` that follow the mode."""

_MAX_COMPARED_BYTES = 1 << 20
"""Larger contents are not compared, because their checksum would take too long."""

_NO_FILES = ("/dev/", "/proc/", "/sys/")


class FileWrites:
    """The files that this process writes; forked processes report none.

    Args:
        rank: rank of this process.
        slot: counts optimizer steps, and receives spans.
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

    def watch(self) -> None:
        """Report saves, and each file that ``open`` truncates, until this process ends.

        Modules that are imported later are included.
        """
        opener = packages.replacement_of(_io.open)(_Opener(self))
        opener.__module__ = "io"  # needed for pickling; in Python 3.13, the original has _io
        for module, name in _OPENS:
            packages.observe_when_imported(module, partial(_replace, name=name, opener=opener))
        for module, name, place in _SAVES:
            packages.observe_when_imported(module, partial(self._watch_saves, name=name, place=place))

    @packages.defines_replacements
    def _watch_saves(self, module: Any, *, name: str, place: int) -> None:
        original: Callable[..., Any] = getattr(module, name)
        package = sys.modules.get(module.__name__.rpartition(".")[0])
        slot = self._slot

        @packages.replaces(module, name, package)
        def save_and_report(*args: Any, **kwargs: Any) -> Any:
            file = args[place] if 0 <= place < len(args) else kwargs.get("f", kwargs.get("filename"))
            observation = self._observe(file, sys._getframe(1), _SAVERS, "")
            if observation is not None:
                self._emit(observation)
            began_s = monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                if slot.spans is not None:
                    slot.spans.put(SpanKind.SAVE, began_s, monotonic(), value=_size_of(file))

    def note_opened(self, file: Any, frame: FrameType, opened: Any, newline: str | None) -> Any:
        """Report a file that ``open`` has truncated; report its contents when it is closed.

        Args:
            file: the path.
            frame: frame that called ``open``.
            opened: what ``open`` returned.
            newline: the argument to ``open``.

        Returns:
            ``opened``, or an equivalent object that reports its contents.
        """
        can_follow = type(getattr(opened, "buffer", opened)) is _io.BufferedWriter
        observation = self._observe(file, frame, _OPENERS, None if can_follow else "")
        if observation is None:
            return opened
        self._emit(observation)
        return _followed(opened, newline, partial(self._note_contents, observation)) if can_follow else opened

    def _observe(
        self, file: Any, frame: FrameType, writers: frozenset[str], contents: str | None
    ) -> Observation | None:
        if self._num_left <= 0 or not isinstance(file, (str, os.PathLike)) or os.getpid() != self._pid:
            return None
        if self._num_left == _MAX_NOTED and env.is_check_off(CHECK):
            self._num_left = 0
            return None
        users = user_frame_behind(frame, writers)
        path = os.path.realpath(os.fspath(file))
        if users is None or not isinstance(path, str) or path.startswith(_NO_FILES) or _holds_lock(self._pid):
            return None
        self._num_left -= 1
        here = context.current()
        test = "accelerator.is_main_process" if here.training is not None else "rank == 0"
        return Observation(
            self._rank,
            check=CHECK,
            problem=f"several ranks write the file {os.path.basename(path)} at the same time, so its contents "
            "depend on timing",
            advice=f"Write it on one rank only (`if {test}:`), or give each rank its own file",
            step=self._slot.num_updates,
            value=(path, here.num_commands, self._num_collectives(), contents),
            judged_by="together",
            filename=users.f_code.co_filename,
            lineno=users.f_lineno,
        )

    def _note_contents(self, observation: Observation, contents: str) -> None:
        if os.getpid() == self._pid:
            with suppress(OSError):  # a file may be closed after the channel to the launcher
                self._emit(replace(observation, value=(*observation.value[:-1], contents)))


def _size_of(file: Any) -> int:
    """Return the current size of a file in bytes; 0 if unknown."""
    try:
        return (
            os.path.getsize(file) if isinstance(file, (str, os.PathLike)) else int(file.seek(0, os.SEEK_CUR))
        )
    except (AttributeError, OSError, ValueError):
        return 0


def _replace(module: Any, *, name: str, opener: _Opener) -> None:
    if getattr(module, name, None) is _io.open:  # another release may have no such name
        setattr(module, name, opener)


class _Opener:
    """Behaves like ``open``, and reports the files that it truncates.

    It is not a function, because a function that a class has as an attribute would become a method.
    """

    def __init__(self, writes: FileWrites) -> None:
        self._note = writes.note_opened

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = _io.open(file, mode, *args, **kwargs)
        if not isinstance(mode, str) or "w" not in mode:
            return opened
        newline = args[_NEWLINE_PLACE] if len(args) > _NEWLINE_PLACE else kwargs.get("newline")
        return self._note(file, sys._getframe(1), opened, newline)

    def __reduce__(self) -> str:
        return "open"


class _FollowedWriter(_io.BufferedWriter):
    """A file that, when it is closed, reports a checksum of its contents, or "" if the contents can't be compared."""

    def __init__(self, raw: Any, size: int, report: Callable[[str], None]) -> None:
        super().__init__(raw, size)
        self._report = report
        self._num_bytes = 0
        self._checksum = 0
        self._is_known = True

    def write(self, data: Any) -> int:
        count = super().write(data)
        if self._is_known:
            self._num_bytes += count
            self._is_known = self._num_bytes <= _MAX_COMPARED_BYTES
            self._checksum = zlib.crc32(data, self._checksum) if self._is_known else 0
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._is_known = False  # NumPy also seeks, after it has written to the descriptor
        return super().seek(offset, whence)

    def truncate(self, pos: int | None = None) -> int:
        self._is_known = False
        return super().truncate(pos)

    def close(self) -> None:
        is_open = not self.closed
        super().close()
        if is_open:
            self._report(f"{self._checksum:08x} {self._num_bytes}" if self._is_known else "")


def _followed(opened: Any, newline: str | None, report: Callable[[str], None]) -> Any:
    """Return a file that replaces ``opened`` and calls ``report`` with the checksum of its contents."""
    is_text = isinstance(opened, _io.TextIOWrapper)
    settings = (opened.encoding, opened.errors, newline, opened.line_buffering) if is_text else ()
    mode = opened.mode
    raw = opened.detach().detach() if is_text else opened.detach()
    writer = _FollowedWriter(raw, _io.DEFAULT_BUFFER_SIZE, report)
    if not is_text:
        return writer
    text: Any = _io.TextIOWrapper(writer, *settings)
    text.mode = mode
    return text


def _holds_lock(pid: int) -> bool:
    """Return whether a process holds a lock on a file; if so, ranks may be taking turns writing to another file."""
    try:
        with _io.open("/proc/locks") as file:
            locks = map(str.split, file)
            return any(lock[3] == "WRITE" and lock[4] == str(pid) for lock in locks if lock[1] != "->")
    except (OSError, IndexError):  # a system without this file
        return False


# --- files that the function leaves open ------------------------------------------------------------------------------

# Python closes such files when a script exits, but ``os._exit`` does not. ``inheritance/files.py`` handles the kernel's
# files. They are in the heap that is frozen before the function begins, so the garbage collector does not list them.

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
_WITH_AN_END = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"))
"""Modules and classes of files that can't be read until they are closed, because their end is written only then."""

_bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

_imported_in = os.getpid()
_mark: list[None] = []
"""An object that belongs to the process that imported this module, usually the kernel. Forked workers have a copy."""


def leave_out_present_objects() -> None:
    """Exclude all existing objects from the search for open files, which would otherwise visit them all."""
    gc.freeze()


def write_left_open() -> None:
    """Flush the files that this process opened. An error with one file is printed and does not affect the others."""
    objects = gc.get_objects()
    if os.getpid() != _imported_in and id(_mark) in set(map(id, objects)):
        return  # the function has unfrozen the heap, so the list would include the kernel's files
    # Compare type(), id() and bases directly. isinstance() or a hash would run code of proxy objects and classes, and
    # issubclass() with an abstract class such as GzipFile writes to every class that it tests.
    kinds_of_all = list(map(type, objects))
    classes = dict(zip(map(id, kinds_of_all), kinds_of_all, strict=True))
    wanted = {id(kind) for kind in (*_BUFFERED, *_classes_with_an_end())}
    kinds = {number for number, kind in classes.items() if not wanted.isdisjoint(map(id, _bases_of(kind)))}
    if not kinds:
        return
    files = [obj for obj in objects if id(type(obj)) in kinds]
    texts = [file for file in files if isinstance(file, io.TextIOWrapper)]
    buffers = [file for file in files if isinstance(file, _BUFFERED[1:])]
    others = [file for file in files if not isinstance(file, _BUFFERED)]
    for file in (*texts, *buffers):
        _attempt(file.flush, file)
    for file in others:
        _attempt(file.close, file)
    for file in buffers:  # again, because the text files have written to them
        _attempt(file.flush, file)


def _classes_with_an_end() -> tuple[type, ...]:
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _WITH_AN_END)
    return tuple(kind for kind in classes if isinstance(kind, type))


def _attempt(write: Callable[[], object], file: Any) -> None:
    try:
        write()
    except OSError as error:
        with contextlib.suppress(Exception):  # raised by a user's class
            print(f"{file!r:.200} was left open and could not be written: {error}", file=sys.stderr)
    except BaseException:  # closed, or only partly constructed
        return

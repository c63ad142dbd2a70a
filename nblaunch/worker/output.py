"""What a worker shows: its output goes to the log file, its IPython displays to the launcher's cell.

Output is captured at the level of descriptors. The launcher reads the file as it grows. A file rather than a pipe: a
busy or absent notebook never makes a worker wait, and what was printed before a crash, of the worker or of the kernel,
is there to read.

A forked worker has the kernel's IPython shell. A fresh one whose launcher is a kernel gets a small shell of its own,
because ``display`` and matplotlib's inline backend only work where there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nblaunch.errors import LaunchError
from nblaunch.events import Displayed, Event
from nblaunch.host import disk
from nblaunch.user_code import ipython_shell

_TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_LINE_BUFFERED = 1  # _IOLBF; source: <stdio.h> of glibc and musl

# Looked up here once, in the kernel, instead of in every worker.
_library = ctypes.CDLL(None)
_fflush, _setvbuf = _library.fflush, _library.setvbuf
try:
    _c_stdout = ctypes.c_void_p.in_dll(_library, "stdout")
except ValueError:  # it has another name in macOS
    _c_stdout = ctypes.c_void_p.in_dll(_library, "__stdoutp")


class _Output(io.RawIOBase):
    """A raw stream on a descriptor that drops what the disk has no room for, rather than ending a training.

    Bars go to one output and lines to the other, and both into one file. A line that begins where a bar has stopped
    starts with a carriage return, so that it replaces the bar instead of being glued to it.
    """

    _with_open_bar: _Output | None = None  # of both outputs, the one whose last write was a bar

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost_bytes = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if _Output._with_open_bar not in (None, self):
                os.write(self._fd, b"\r")
            is_open_bar = bytes(view[:1]) == b"\r" and bytes(view[-1:]) not in (b"\r", b"\n")
            _Output._with_open_bar = self if is_open_bar else None
            return os.write(self._fd, view)
        except OSError:
            self.lost_bytes += len(view)
            return len(view)


class _NoInput(io.RawIOBase):
    """Standard input of a worker, which is at its end, as /dev/null is."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readinto(self, buffer: object) -> int:
        return 0


def _made(raw: _Output) -> tuple[io.TextIOWrapper, io.BufferedWriter[_Output], _Output]:
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, **_TEXT), buffer, raw


# Made here once, in the kernel, instead of in every worker: the first of them costs a fork a hundred page faults.
_no_input: Any = io.TextIOWrapper(_NoInput(), encoding="utf-8")
_outputs = (_made(_Output(1)), _made(_Output(2)))

_replaced: list[Any] = []
"""The kernel's streams. They are kept because freeing them writes to them."""


def capture(log_path: str) -> None:
    """Point descriptors 0, 1 and 2 away from the kernel's, and replace ``sys.stdin``, ``stdout`` and ``stderr``.

    Both outputs append to one file, so that lines keep their order. Processes that the worker starts inherit the
    descriptors, and C libraries print to them, too.

    Raises:
        LaunchError: the log file can't be made.
    """
    try:
        log = os.open(log_path, _FLAGS, 0o600)
    except OSError as error:
        why = disk.reason(Path(log_path), error)
        raise LaunchError(
            f"can't create the log {log_path}: {why}. Choose another folder with log_dir= or NBLAUNCH_LOG_DIR."
        ) from error
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target, inheritable=True)
    os.close(log)
    os.close(null)
    if sys.__stdout__ is _outputs[0][0]:  # of a forkserver, or of a worker that launches workers itself
        renew_buffers()
    _replaced.extend((sys.stdin, sys.__stdin__, sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__))
    sys.stdin = sys.__stdin__ = _no_input  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _outputs[0][0]  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _outputs[1][0]  # type: ignore[misc]

    # What native code prints by printf or std::cout goes to a file a block at a time, and os._exit leaves out the last.
    _setvbuf(_c_stdout, None, _LINE_BUFFERED, 0)


def renew_buffers() -> None:
    """Give the streams of :func:`capture` empty buffers, in a process that was forked from the worker.

    A buffer is copied with what the worker will write itself, and with its lock, for good if a thread of the worker was
    writing: Python does not reset it (source: https://github.com/python/cpython/issues/50970). Both are made anew in
    place, since log handlers hold the streams.
    """
    for stream, buffer, raw in _outputs:
        buffer.__init__(raw)  # type: ignore[misc]
        stream.__init__(buffer, **_TEXT)  # type: ignore[misc]


def flush() -> int:
    """Write what is buffered, also in what the user's code has put in place of the outputs.

    Returns:
        How many bytes the disk had no room for since the start.
    """
    _fflush(_c_stdout)
    for stream in (sys.stdout, sys.stderr, *(stream for stream, *_ in _outputs)):
        with contextlib.suppress(Exception):  # it may be closed, or have no such method
            stream.flush()
    return sum(raw.lost_bytes for *_, raw in _outputs)


def flush_before_fork() -> None:
    """Write what this process has buffered, or every worker would carry a copy of it."""
    _fflush(_c_stdout)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "buffer"):  # a kernel's stream has none, and waiting for its thread takes a while
            stream.flush()


def flush_c_streams() -> None:
    """Write what C code has buffered in its streams (``fopen``), as the end of a program does.

    Streams that a process has inherited are written as well: ``written_files.py`` has dropped what was in them.
    """
    _fflush(None)


def append_to_log(log_path: str, text: str) -> None:
    """Append ``text`` to the log, also where descriptors 1 and 2 are no longer what they were."""
    flush()
    with open(log_path, "a", encoding="utf-8", errors="backslashreplace") as log:
        log.write(text)


_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def connect_displays(rank: int, emit: Callable[[Event], None]) -> None:
    """Send the displays of this process to the launcher; does nothing in a process without IPython.

    Widgets are sent as text: a front end asks the kernel for what a view shows, and this one lives in a worker.
    """
    shell = ipython_shell()
    if shell is None:
        return

    def publish(
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        shown = {kind: content for kind, content in data.items() if kind != _WIDGET_VIEW}
        emit(Displayed(rank, time.time(), shown, dict(metadata or {}), dict(transient or {}), update))

    def write_payload(payload: dict[str, Any], single: bool = True) -> None:
        """Show what a front end would show in its pager, as the help of ``name?``."""
        if payload.get("source") == "page":
            publish(payload["data"])

    def clear_output(wait: bool = False) -> None:
        """Do nothing: one rank must not clear what the others show in the same cell."""

    # tqdm.auto and others take this key as "widgets will work here".
    shell.config.pop("IPKernelApp", None)
    # The shell's trait accepts its own class of publisher only, so the one it has gets our methods. Making another of
    # that class costs a forked worker 200 page faults.
    shell.display_pub.publish = publish
    shell.display_pub.clear_output = clear_output
    shell.payload_manager.write_payload = write_payload


def ensure_shell() -> None:
    """Make a small shell in a fresh process that has none."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    if not InteractiveShell.initialized():
        config = Config()
        config.HistoryManager.enabled = False
        InteractiveShell.instance(config=config)


def show_pending_figures() -> None:
    """Show figures that were not shown yet, at the end of the function as at the end of a cell."""
    inline: Any = sys.modules.get("matplotlib_inline.backend_inline")
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if inline is None or pyplot is None or "inline" not in pyplot.get_backend():
        return
    inline.flush_figures()

"""Output of a worker: printed text goes to the log file, and IPython displays go to the launcher's cell.

Output is captured at the descriptor level, and the launcher reads the file as it grows. With a file instead
of a pipe, a busy or absent notebook never makes a worker wait, and output survives a crash of the worker or
the kernel.

A forked worker has the kernel's IPython shell. A worker that a kernel starts in a fresh process gets its own small
shell, because ``display`` and matplotlib's inline backend need one.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import getpass
import io
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nblaunch import packages
from nblaunch.errors import LaunchError
from nblaunch.events import Displayed, Event, InputAwaited, InputRead
from nblaunch.host import files, waits
from nblaunch.user_code import ipython_shell

_TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_LINE_BUFFERED = 1  # _IOLBF; source: <stdio.h> of glibc and musl

# Looked up here once, in the kernel, instead of in every worker.
_library = ctypes.CDLL(None)
_fflush, _setvbuf = _library.fflush, _library.setvbuf
try:
    _c_stdout = ctypes.c_void_p.in_dll(_library, "stdout")
except ValueError:  # macOS uses another name
    _c_stdout = ctypes.c_void_p.in_dll(_library, "__stdoutp")


class _Output(io.RawIOBase):
    """A raw stream on a descriptor. When the disk is full, it drops output instead of ending training.

    Bars go to one stream and lines to the other, but both end up in one file. A line that follows an unfinished bar
    starts with a carriage return, so that it replaces the bar instead of continuing it.
    """

    _with_open_bar: _Output | None = None  # the stream whose last write was a bar

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
    """The standard input of a worker, empty like /dev/null."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readinto(self, buffer: object) -> int:
        return 0


def _made(raw: _Output) -> tuple[io.TextIOWrapper, io.BufferedWriter[_Output], _Output]:
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, **_TEXT), buffer, raw


# Created once in the kernel instead of in every worker, where the first stream would cost a hundred page faults.
_no_input: Any = io.TextIOWrapper(_NoInput(), encoding="utf-8")
_outputs = (_made(_Output(1)), _made(_Output(2)))

_replaced: list[Any] = []
"""The kernel's streams, kept because freeing them writes to them."""


def capture(log_path: str, *, keeps_input: bool = False) -> None:
    """Redirect descriptors 0, 1 and 2 and replace ``sys.stdin``, ``stdout`` and ``stderr``.

    Args:
        log_path: file for the output.
        keeps_input: whether to leave descriptor 0 and ``sys.stdin`` unchanged.

    Both outputs append to one file, so that lines keep their order. Processes that the worker starts inherit the
    descriptors, and C libraries also print to them.

    Raises:
        LaunchError: the log file can't be created.
    """
    try:
        log = os.open(log_path, _FLAGS, 0o600)
    except OSError as error:
        why = files.reason_of(Path(log_path), error)
        raise LaunchError(
            f"can't create the log {log_path}: {why}. Choose another folder with log_dir= or NBLAUNCH_LOG_DIR."
        ) from error
    for target in (1, 2):
        os.dup2(log, target, inheritable=True)
    os.close(log)
    if sys.__stdout__ is _outputs[0][0]:  # in a forkserver, or in a worker that launches workers itself
        renew_buffers()
    _replaced.extend((sys.stdin, sys.__stdin__, sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__))
    if not keeps_input:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0, inheritable=True)
        os.close(null)
        sys.stdin = sys.__stdin__ = _no_input  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _outputs[0][0]  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _outputs[1][0]  # type: ignore[misc]

    # If output goes to a file, native code buffers printf and std::cout in blocks, and os._exit would lose
    # the last block.
    _setvbuf(_c_stdout, None, _LINE_BUFFERED, 0)


def renew_buffers() -> None:
    """Give the streams of :func:`capture` empty buffers, in a process that was forked from the worker.

    The fork copies a buffer whose data the worker will write itself. It also copies the buffer's lock, which stays
    locked forever if a thread of the worker was writing (source: https://github.com/python/cpython/issues/50970).
    Streams and buffers are reset in place, because log handlers hold references to the streams.
    """
    for stream, buffer, raw in _outputs:
        buffer.__init__(raw)  # type: ignore[misc]
        stream.__init__(buffer, **_TEXT)  # type: ignore[misc]


def flush() -> int:
    """Flush the streams, including any that the user's code has substituted for the standard outputs.

    Returns:
        The number of bytes lost since the start because the disk was full.
    """
    _fflush(_c_stdout)
    for stream in (sys.stdout, sys.stderr, *(stream for stream, *_ in _outputs)):
        with contextlib.suppress(Exception):  # the stream may be closed or lack the method
            stream.flush()
    return sum(raw.lost_bytes for *_, raw in _outputs)


def flush_before_fork() -> None:
    """Flush this process's buffers, because otherwise every worker would inherit a copy."""
    _fflush(_c_stdout)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "buffer"):  # a kernel's stream has none, and its flush waits for a thread
            stream.flush()


def flush_c_streams() -> None:
    """Flush the streams of C code (``fopen``), as a program does when it exits.

    Inherited streams are flushed as well, but ``inheritance/files.py`` has already dropped their contents.
    """
    _fflush(None)


def append_to_log(log_path: str, text: str) -> None:
    """Append ``text`` to the log, even if the function has changed descriptors 1 and 2."""
    flush()
    with open(log_path, "a", encoding="utf-8", errors="backslashreplace") as log:
        log.write(text)


_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def connect_displays(rank: int, emit: Callable[[Event], None]) -> None:
    """Send the displays of this process to the launcher; do nothing without IPython.

    Widgets are sent as text, because a front end asks the kernel for a widget's state, which is in the worker.
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
        emit(
            Displayed(
                rank,
                data=shown,
                metadata=dict(metadata or {}),
                transient=dict(transient or {}),
                update=update,
            )
        )

    def write_payload(payload: dict[str, Any], single: bool = True) -> None:
        """Show the pager's contents, such as the help that ``name?`` displays."""
        if payload.get("source") == "page":
            publish(payload["data"])

    def clear_output(wait: bool = False) -> None:
        """Do nothing: a rank must not clear the output of other ranks in the same cell."""

    # tqdm.auto and others take this key to mean that widgets work.
    shell.config.pop("IPKernelApp", None)
    # The shell's trait accepts only its own publisher class, so the existing publisher gets nblaunch's methods. A new
    # publisher would cost a forked worker 200 page faults.
    shell.display_pub.publish = publish
    shell.display_pub.clear_output = clear_output
    shell.payload_manager.write_payload = write_payload
    # A kernel's exit() only asks the kernel to end after the cell, so the function would continue.
    shell.ask_exit = sys.exit


def ensure_shell() -> None:
    """Create a small shell in a fresh process that has none."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    if not InteractiveShell.initialized():
        config = Config()
        config.HistoryManager.enabled = False
        shell: Any = InteractiveShell.instance(config=config)
        # IPython implements this method only in its own programs, but "%matplotlib inline" calls it.
        shell.enable_gui = lambda gui=None: None


def show_pending_figures() -> None:
    """Show pending figures at the end of the function, as at the end of a cell."""
    inline: Any = sys.modules.get("matplotlib_inline.backend_inline")
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if inline is None or pyplot is None or "inline" not in pyplot.get_backend():
        return
    inline.flush_figures()


# --- plain text from bars and consoles --------------------------------------------------------------------------------

_kept_functions: list[Any] = []
"""Functions that hooks have replaced. If a function were freed, this would write to every object that its code refers
to, and copy those pages of the kernel's memory.
"""


def show_plain_text() -> None:
    """Make bars and consoles write plain text, whether a cell or the function imports their library.

    tqdm gets one status line per rank. Its notebook class overrides methods of the plain class to update a widget,
    which no worker can reach; without these overrides it behaves like the plain class. tqdm's lock is replaced
    as well, because processes share it: a worker that is killed while it holds the lock would stop all the kernel's
    bars for good.

    rich redraws live displays in a widget, or in a terminal by moving the cursor. A worker has neither, and every
    frame would stay in the cell. A live display therefore writes only its last state, even on consoles that the
    kernel created.
    """
    packages.observe_when_imported("tqdm.std", _keep_to_one_line)
    packages.observe_when_imported("tqdm.notebook", _undo_widgets)
    packages.observe_when_imported("rich.console", _be_a_printer)
    packages.observe_when_imported("rich.live", lambda live: _name_clock(live._RefreshThread, "rich"))
    packages.observe_when_imported(
        "tensorboard.summary.writer.event_file_writer",
        lambda module: _name_clock(module._AsyncWriterThread, "tensorboard"),
    )


def _keep_to_one_line(std: Any) -> None:
    _renew_lock(std)
    os.register_at_fork(after_in_child=partial(_renew_lock, std))  # a worker thread may be holding it
    std.tqdm._instances.clear()
    _kept_functions.append(std.tqdm.moveto)
    std.tqdm.moveto = _stay
    _name_clock(std.TMonitor, "tqdm")


def _name_clock(cls: Any, library: str) -> None:
    """Name a class's threads, which work at intervals, so that the launcher sees when they are idle."""
    packages.call_before(cls, "run", lambda thread: waits.name_as_clock(library))


def _renew_lock(std: Any) -> None:
    _kept_functions.append(getattr(std.tqdm, "_lock", None))
    std.tqdm.set_lock(threading.RLock())


def _undo_widgets(notebook: Any) -> None:
    cls = notebook.tqdm_notebook
    for name in ("__init__", "__iter__", "update", "close", "reset", "clear", "display", "status_printer"):
        if name in vars(cls):
            _kept_functions.append(vars(cls)[name])
            delattr(cls, name)


def _stay(self: Any, lines: int) -> None:
    """Do not move the cursor, because a log has none. Nested bars share the rank's status line."""


def _be_a_printer(console: Any) -> None:
    console.Console.is_jupyter = property(lambda self: False, _ignore)
    console.Console.is_dumb_terminal = property(lambda self: True)


def _ignore(self: object, value: object) -> None:
    """Ignore the value that a console assigns to the property."""


# --- input of a script's rank 0 ---------------------------------------------------------------------------------------

# ``input()`` and ``getpass()`` of rank 0 of a script whose user sits at the launcher's terminal. The launcher writes
# the prompt, after all earlier output of the rank, and draws nothing while the user types.


def announce_input(rank: int, emit: Callable[[Event], None]) -> None:
    """Report to the launcher when the functions begin and end to wait for the user."""
    read_line, read_hidden = builtins.input, getpass.getpass

    def begin(prompt: object, *, is_hidden: bool) -> None:
        flush()
        emit(InputAwaited(rank, prompt=str(prompt), is_hidden=is_hidden))

    def announced_input(prompt: object = "", /) -> str:
        begin(prompt, is_hidden=False)
        try:
            return read_line()
        finally:
            emit(InputRead(rank))

    def announced_getpass(prompt: str = "Password: ", stream: object = None, **options: str) -> str:
        # getpass writes the prompt once the terminal no longer shows what is typed, and drops what was typed before.
        stream = _Prompt(lambda: begin(prompt, is_hidden=True))
        try:
            return read_hidden(prompt or " ", stream, **options)
        finally:
            emit(InputRead(rank))

    builtins.input = announced_input
    getpass.getpass = announced_getpass


class _Prompt(io.StringIO):
    """The output of ``getpass``, which first writes the prompt.

    Args:
        begin: called instead of writing the prompt.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin: Callable[[], None] | None = begin

    def write(self, text: str) -> int:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()
        return len(text)

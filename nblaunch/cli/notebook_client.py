"""Executes a notebook in its own kernel, and shows the output of its cells on a screen.

terminal                          kernel
Ctrl-C  ──interrupt──>            the cell gets KeyboardInterrupt, and a launch in it stops its workers
Ctrl-C again, if the cell
does not stop ──kill──>           the kernel ends, and the workers with it
        <──output, updates──      output of cells; the table of processes as text

On a terminal the table is redrawn in place, below printed lines. Elsewhere (in a file or a batch system's log), it is
written at intervals, and once more when its cell has ended.
"""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from traitlets.config import Config

from nblaunch import env
from nblaunch.dashboard.text import LiveTable, moves_cursor, write

_TABLE_PREFIX = "nblaunch-"
"""Prefix of dashboards' display ids."""

_INTERVAL_S = 30.0
"""Seconds between updates of a cell's tables if the output is not a terminal."""

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def without_colours(text: str) -> str:
    """Return the text without ANSI control sequences."""
    return _ANSI.sub("", text)


class Screen:
    """A display of a notebook's output.

    Args:
        stream: terminal or file.
        is_live: draw the table in place; None = only if the stream is a terminal.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, stream: TextIO, *, is_live: bool | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream
        self._live = LiveTable(stream) if (moves_cursor(stream) if is_live is None else is_live) else None
        self._clock = clock
        self._tables: dict[str, str] = {}
        self._started_line = ""  # incomplete line, held back while tables are shown below it
        self._is_mid_line = False
        self._written: dict[str, str] = {}
        self._next_s = 0.0

    def heading(self, text: str) -> None:
        """Show the heading of the next cell."""
        self.end_cell()
        self._end_line()
        self._put(f"{text}\n")
        self._next_s = self._clock()

    def text(self, text: str) -> None:
        """Show printed text, which may end in the middle of a line."""
        if self._live is None:
            text = without_colours(text)
        if self._live is None or not self._tables:
            self._put(text)
            return
        lines, separator, self._started_line = (self._started_line + text).rpartition("\n")
        if separator:
            with self._live.hidden():
                self._put(f"{lines}\n")

    def table(self, name: str, text: str) -> None:
        """Show or update the table called ``name``."""
        if self._tables.get(name) == text:
            return
        self._tables[name] = text
        if self._live is not None:
            self._end_line()
            self._live.draw_text(self._fitting)
        elif self._clock() >= self._next_s:
            self._write_tables()
            self._next_s = self._clock() + _INTERVAL_S

    def end_cell(self) -> None:
        """Write the cell's final tables."""
        if self._live is not None:
            # Include lines that did not fit on the terminal.
            self._live.clear()
            self._put("".join(f"{text}\n" for text in self._tables.values()))
        else:
            self._write_tables()
        self._tables, self._written = {}, {}
        if self._started_line:
            self._put(f"{self._started_line}\n")
            self._started_line = ""

    def _write_tables(self) -> None:
        for name, text in self._tables.items():
            if self._written.get(name) != text:
                self._written[name] = text
                self._end_line()
                self._put(f"{text}\n")

    def _fitting(self, width: int) -> str:
        lines = (line for text in self._tables.values() for line in text.splitlines())
        return "\n".join(line[:width] for line in lines)

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            write(self._stream, text)
            self._stream.flush()
            self._is_mid_line = not text.endswith("\n")


class NotebookStopped(Exception):
    """A signal stopped the notebook; ``signum`` is the first signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class ShowingClient(NotebookClient):
    """nbclient's client, with output on a screen and its own signal handlers.

    Args:
        notebook: executed in place.
        screen: receives output.
        **options: further options for :class:`nbclient.NotebookClient`.
    """

    def __init__(self, notebook: Any, screen: Screen, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._screen = screen
        self._signals: list[int] = []
        self._num_code_cells = sum(_is_executed(cell) for cell in notebook.cells)
        self.on_cell_start = self._begin_cell

    async def async_start_new_kernel(self, **options: Any) -> None:
        """Start the kernel, after replacing the signal handlers that nbclient has just installed."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        await super().async_start_new_kernel(**options)

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Show an output of the cell, then pass it to nbclient."""
        self._show(msg["msg_type"], msg["content"])
        return super().process_message(msg, cell, cell_index)

    def raise_if_stopped(self) -> None:
        """Raise NotebookStopped if a signal was received."""
        if self._signals:
            raise NotebookStopped(self._signals[0])

    def _begin_cell(self, cell: Any, cell_index: int) -> None:
        self.raise_if_stopped()  # the previous cell may have caught KeyboardInterrupt
        if _is_executed(cell):
            first = next((line for line in cell.source.splitlines() if line.strip()), "")
            count = self.code_cells_executed + 1
            self._screen.heading(f"[{count}/{self._num_code_cells}] {first[:100]}")

    def _show(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self._screen.text(content["text"])
            return
        if kind not in ("display_data", "update_display_data", "execute_result"):
            return
        text = content["data"].get("text/plain", "")
        name = (content.get("transient") or {}).get("display_id") or ""
        if name.startswith(_TABLE_PREFIX):
            self._screen.table(name, text)
        elif kind != "update_display_data" and text:
            self._screen.text(f"{text}\n")

    def _on_signal(self, signum: int) -> None:
        self._signals.append(signum)
        if self.km is None:
            return
        is_first = len(self._signals) == 1
        stop = self.km.interrupt_kernel() if is_first else self.km.shutdown_kernel(now=True)
        self._stopping = asyncio.ensure_future(_ignore_if_gone(stop))


async def _ignore_if_gone(request: Any) -> None:
    try:
        await ensure_async(request)
    except RuntimeError:
        return  # the kernel has not started, or has ended; raise_if_stopped handles the signal


def _is_executed(cell: Any) -> bool:
    return bool(cell.cell_type == "code" and cell.source.strip())


def execute(notebook: Any, folder: Path, screen: Screen, kernel_name: str) -> None:
    """Run all cells in a fresh kernel and store the outputs in the notebook, even if a cell raises an exception.

    Args:
        notebook: notebook as read by nbformat; changed in place.
        folder: working folder of the kernel.
        screen: receives output.
        kernel_name: name of the kernel; empty = the kernel named in the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an exception.
        NotebookStopped: a signal stopped the notebook.
    """
    with tempfile.TemporaryDirectory(prefix="nb-") as sockets:
        # Use Unix sockets, because other users of the machine could connect to TCP ports.
        connection = {"transport": "ipc", "connection_file": str(Path(sockets, "k.json"))}
        options: dict[str, Any] = {"kernel_name": kernel_name} if kernel_name else {}
        client = ShowingClient(
            notebook,
            screen,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"AsyncKernelManager": connection}),
            **options,
        )
        try:
            # Suppress the debugger's warning about frozen modules, which older Jupyter packages also print here.
            with env.patched({"PYDEVD_DISABLE_FILE_VALIDATION": "1"}):
                asyncio.run(client.async_execute())
        except Exception as error:
            if not isinstance(error, NotebookStopped):
                client.raise_if_stopped()
            raise
        finally:
            screen.end_cell()
        client.raise_if_stopped()

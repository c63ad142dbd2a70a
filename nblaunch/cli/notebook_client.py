"""Execution of a notebook in its own kernel, with the output of its cells on a screen.

terminal                          kernel
Ctrl-C  ──interrupt──>            the cell gets KeyboardInterrupt, a launch in it stops its workers
Ctrl-C, again, or a kernel
that does not stop ──kill──>      workers end with their kernel
        <──output, updates──      output of cells; the table of processes as text
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from pathlib import Path
from typing import Any

from jupyter_core.utils import ensure_async
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError
from traitlets.config import Config

from nblaunch import env
from nblaunch.cli.screen import Screen

_TABLE_PREFIX = "nblaunch-"
"""Prefix of the display ids of dashboards."""


class NotebookStopped(Exception):
    """A signal stopped the notebook; ``signum`` is the first one."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class ShowingClient(NotebookClient):
    """nbclient's client, with output on a screen and with its own signal handlers.

    Args:
        notebook: executed in place.
        screen: receives output.
        **options: further options of :class:`nbclient.NotebookClient`.
    """

    def __init__(self, notebook: Any, screen: Screen, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._screen = screen
        self._signals: list[int] = []
        self.is_late = False
        self._num_code_cells = sum(_is_executed(cell) for cell in notebook.cells)
        self.on_cell_start = self._begin_cell

    async def async_start_new_kernel(self, **options: Any) -> None:
        """Start the kernel, after replacing the signal handlers that nbclient has just set."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        await super().async_start_new_kernel(**options)

    async def _async_handle_timeout(self, timeout: int, cell: Any = None) -> Any:
        # nbclient would kill the kernel at once; interrupt it first, so that a launch in the cell stops its workers.
        if self.is_late or self.km is None:
            return await super()._async_handle_timeout(timeout, cell)
        self.is_late = True
        await ensure_async(self.km.interrupt_kernel())
        return None

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Show an output of the cell, then pass it to nbclient."""
        self._show(msg["msg_type"], msg["content"])
        return super().process_message(msg, cell, cell_index)

    def raise_if_stopped(self) -> None:
        """Raise NotebookStopped if a signal was received."""
        if self._signals:
            raise NotebookStopped(self._signals[0])

    def _begin_cell(self, cell: Any, cell_index: int) -> None:
        self.raise_if_stopped()  # also if the cell before caught KeyboardInterrupt
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


def execute(notebook: Any, folder: Path, screen: Screen, timeout_s: int | None, kernel_name: str) -> None:
    """Run all cells in a fresh kernel and store the outputs in the notebook, also if a cell raises.

    Args:
        notebook: from nbformat; changed in place.
        folder: working folder of the kernel.
        screen: receives output.
        timeout_s: for each cell; None = no timeout.
        kernel_name: empty = the kernel named in the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.CellTimeoutError: a cell timed out; it was interrupted.
        NotebookStopped: a signal stopped the notebook.
    """
    with tempfile.TemporaryDirectory(prefix="nb-") as sockets:
        # Unix sockets, since other users of the machine could connect to TCP ports.
        connection = {"transport": "ipc", "connection_file": str(Path(sockets, "k.json"))}
        options: dict[str, Any] = {"kernel_name": kernel_name} if kernel_name else {}
        client = ShowingClient(
            notebook,
            screen,
            timeout=timeout_s,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"AsyncKernelManager": connection}),
            **options,
        )
        try:
            # Suppress the debugger's warning about frozen modules, which older Jupyter packages print here as well.
            with env.patched({"PYDEVD_DISABLE_FILE_VALIDATION": "1"}):
                asyncio.run(client.async_execute())
        except Exception as error:
            if not isinstance(error, NotebookStopped):
                client.raise_if_stopped()
            if client.is_late:
                raise CellTimeoutError(f"a cell took more than {timeout_s} s") from error
            raise
        finally:
            screen.end_cell()
        client.raise_if_stopped()

"""Saved notebooks, and their display by GitHub, nbconvert and a page without scripts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from tests import forked_kernels
from tests.kernels import forkserver_for

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class _Interactive(NotebookClient):  # type: ignore[misc]
    """Executes notebooks like an interactive front end, which can answer ``input()``."""

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        client.allow_stdin = True
        return client

    start_new_kernel_client = NotebookClient.start_new_kernel_client


class _Typing(NotebookClient):  # type: ignore[misc]
    """Types the lines ``typed`` from a cell's metadata when the cell calls ``input()``."""

    async def async_execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
        lines = list(cell.metadata.get("typed", ()))
        self.kc.allow_stdin = bool(lines)
        typing = asyncio.ensure_future(self._type(lines))
        try:
            return await super().async_execute_cell(cell, cell_index, *args, **options)
        finally:
            typing.cancel()

    async def _type(self, lines: list[str]) -> None:
        for line in lines:
            while (await self.kc.get_stdin_msg())["msg_type"] != "input_request":
                continue
            self.kc.input(line)


def executed(
    cells: Sequence[str], folder: Path, *, is_interactive: bool = False, keeps_widgets: bool = True
) -> Any:
    """Return an executed notebook with these code cells.

    Args:
        cells: sources of the cells.
        folder: working folder.
        is_interactive: execute like a front end; False: like papermill and nbconvert.
        keeps_widgets: store the widgets' state in the notebook, which is nbclient's default.
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = _Interactive if is_interactive else NotebookClient
    execute(notebook, folder, timeout_s=60, client=client, store_widget_state=keeps_widgets)
    return notebook


def execute(
    notebook: Any,
    folder: Path,
    timeout_s: int,
    client: type[NotebookClient] = _Typing,
    is_new: bool = False,
    **options: Any,
) -> None:
    """Run all cells in a fresh kernel; the outputs are then in the notebook, even if a cell raised.

    Args:
        notebook: a notebook of nbformat; changed in place.
        folder: working folder.
        timeout_s: timeout of each cell.
        client: class that executes it.
        is_new: start a new interpreter instead of forking one that has imported torch.
        options: further options of ``client``, such as ``kernel_name``.
    """
    kernels = nullcontext() if is_new else forked_kernels.launching(forkserver_for)
    with kernels, tempfile.TemporaryDirectory(prefix="nbk-") as sockets:
        # Use Unix sockets rather than TCP, because new kernels warn about unencrypted TCP.
        connection = {"transport": "ipc", "connection_file": str(Path(sockets, "k.json"))}
        client(
            notebook,
            timeout=timeout_s,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"AsyncKernelManager": connection}),
            **({"kernel_name": "python3"} | options),
        ).execute()


def check_for_github(notebook: Any) -> None:
    """Fail if GitHub would not show the notebook, because ``metadata.widgets`` lacks ``state``.

    nbformat's schema does not require it, but GitHub's renderer does
    (https://github.com/googlecolab/colabtools/issues/5288).
    """
    nbformat.validate(notebook)
    for mime_type, stored in notebook.metadata.get("widgets", {}).items():
        assert mime_type == WIDGET_STATE, f"metadata.widgets has {mime_type!r}"
        assert isinstance(stored.get("state"), dict), (
            "metadata.widgets has no 'state': GitHub shows 'Invalid Notebook'"
        )
        for model_id, model in stored["state"].items():
            assert {"model_name", "model_module", "state"} <= model.keys(), f"widget {model_id} is incomplete"


def outputs(notebook: Any) -> list[Any]:
    """Return all outputs of all cells."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(notebook: Any) -> str:
    """Return all plain text that the notebook shows."""
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook)
    )


class _WithoutScripts(HTMLParser):
    """The text of a page in a browser that runs no scripts."""

    _UNSEEN = frozenset({"script", "style", "title"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._unseen = self._tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in self._UNSEEN
        self._tables += tag == "table"

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in self._UNSEEN
        self._tables -= tag == "table"
        if tag in ("tr", "table", "p", "pre") or (tag == "div" and not self._tables):
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(data)


def visible_text(page: str) -> str:
    """Return the visible text of a page without scripts, with a line for each table row."""
    reader = _WithoutScripts()
    reader.feed(page)
    reader.close()
    return "".join(reader.parts)

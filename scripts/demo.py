"""Run the quickstart notebook on every core of this machine and print its table of ranks and the accuracy.

The notebook is executed as it is, by a real kernel; nothing is written but ``artifacts/`` (the executed copy, which
any notebook viewer opens). Called by ``make demo``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# Also as an entry of a dictionary; of its digits, four are enough.
ACCURACY = re.compile(r"accuracy\W{1,6}(\d*\.?\d{1,4})\d*( ?%)?", re.IGNORECASE)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", nargs="?", type=Path, default=ROOT / "notebooks" / "01_quickstart.ipynb")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="for each cell (600)")
    arguments = parser.parse_args()

    notebook = nbformat.read(arguments.notebook, as_version=4)
    print(f"running {arguments.notebook.name} on {num_cores()} cores", flush=True)
    started_s = time.monotonic()
    try:
        execute(notebook, arguments.notebook.parent, arguments.timeout)
    except CellExecutionError as error:
        print(ANSI.sub("", str(error)), file=sys.stderr)
        return 1
    finally:
        executed = save(notebook, arguments.notebook.name)

    texts = list(launch_outputs(notebook))
    print(*texts, sep="\n")
    accuracies = ACCURACY.findall("\n".join(all_outputs(notebook)))
    if not accuracies:
        print(f"no accuracy among the outputs of {executed}", file=sys.stderr)
        return 1
    number, percent = accuracies[-1]
    print(f"\naccuracy {number}{percent} after {time.monotonic() - started_s:.1f} s, kernel start included")
    print(f"executed notebook: {executed}")
    return 0


def execute(notebook: Any, folder: Path, timeout_s: int, kernel_name: str = "python3") -> None:
    """Run all cells in a fresh kernel; the outputs are then in the notebook, also if a cell raised."""
    with tempfile.TemporaryDirectory(prefix="nbk-") as sockets:
        # Over Unix sockets rather than TCP, of which new kernels warn that it is not encrypted.
        connection = {"transport": "ipc", "connection_file": str(Path(sockets, "k.json"))}
        NotebookClient(
            notebook,
            timeout=timeout_s,
            kernel_name=kernel_name,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"AsyncKernelManager": connection}),
        ).execute()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def save(notebook: Any, name: str) -> Path:
    """Write the executed notebook; returns where, relative to the current folder if it lies there."""
    target = ROOT / "artifacts" / name
    target.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, target)
    return target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target


def launch_outputs(notebook: Any) -> Iterator[str]:
    """What the cells that launch something show: the table of ranks, and the workers' lines."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and "notebook_launcher(" in cell.source:
            yield from output_texts(cell)


def all_outputs(notebook: Any) -> Iterator[str]:
    """What all cells show."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield from output_texts(cell)


def output_texts(cell: Any) -> Iterator[str]:
    """The plain text of a cell's outputs. Pictures and widgets have none that says something."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text.rstrip("\n")
        elif "data" in output and WIDGET_VIEW not in output.data and "image/png" not in output.data:
            yield output.data.get("text/plain", "").rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())

"""``nblaunch run-notebook``: executes a notebook, and shows the progress of its processes in the terminal.

This module reads and writes the notebook, sets its parameters and reports failures; ``notebook_client.py`` runs it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nblaunch.cli import UsageError, named_value
from nblaunch.host.files import replace_file
from nblaunch.packages import is_installed

_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Words that parameters may have as values in addition to Python literals, and what they stand for."""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Execute a notebook from top to bottom in a fresh kernel, and show the output of its cells and the "
        "progress of every process. If a cell fails, show its error and exit with code 1. Ctrl-C or SIGTERM (as "
        "from `timeout 1h nblaunch run-notebook ...`) interrupts the running cell; a second signal kills the kernel."
    )
    parser.set_defaults(run=run)
    parser.add_argument("notebook", type=Path, help="an .ipynb file")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file for the executed copy, which is also written after a failure",
    )
    parser.add_argument(
        "--parameters", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
        help="values for the parameters in the cell tagged `parameters`",
    )  # fmt: skip
    parser.add_argument("--kernel", default="", metavar="NAME", help="default: the notebook's kernel")


def run(arguments: argparse.Namespace) -> int:
    """Execute the notebook and return the exit code."""
    _check_packages()
    notebook = _read(arguments.notebook)
    set_parameters(notebook, dict(named_value("--parameters", text, _WORDS) for text in arguments.parameters))
    folder = arguments.notebook.absolute().parent
    if arguments.output is not None:
        _check_output(arguments.output)
    began_s = time.monotonic()
    try:
        code, what = _execute(notebook, folder, arguments)
    finally:
        if arguments.output is not None:
            _write(notebook, arguments.output)
    where = f"; executed copy: {arguments.output}" if arguments.output is not None else ""
    print(f"{arguments.notebook.name}: {what} after {time.monotonic() - began_s:.1f} s{where}", flush=True)
    return code


def _execute(notebook: Any, folder: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """Execute the notebook; return the exit code and the outcome, and print the error of a failed cell to stderr."""
    # Imported here, because it needs nbclient.
    client: Any = importlib.import_module("nblaunch.cli.notebook_client")
    exceptions: Any = importlib.import_module("nbclient.exceptions")
    kernelspec: Any = importlib.import_module("jupyter_client.kernelspec")
    try:
        client.execute(notebook, folder, client.Screen(sys.stdout), arguments.kernel)
    except client.NotebookStopped as error:
        signum = signal.Signals(error.signum)
        return 128 + signum, f"stopped by {signum.name}"  # as shells report it
    except exceptions.CellExecutionError as error:
        text = _error_text(notebook, error)
        print(text if sys.stderr.isatty() else client.without_colours(text), file=sys.stderr, flush=True)
        return 1, f"a cell failed with {error.ename}"
    except exceptions.DeadKernelError:
        return 1, "the kernel died (memory may have run out); the last output is above"
    except kernelspec.NoSuchKernel as error:
        kernels = ", ".join(kernelspec.KernelSpecManager().find_kernel_specs())
        raise UsageError(
            f"no kernel named {error.name!r} is installed, only {kernels}; choose one with --kernel"
            if kernels
            else "no kernel is installed; install one, for example with pip install ipykernel"
        ) from None
    return 0, "done"


def _error_text(notebook: Any, error: Any) -> str:
    """Return which cell failed, and its error as the notebook shows it."""
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    failed = [
        number
        for number, cell in enumerate(code_cells, 1)
        if any(output.output_type == "error" for output in cell.get("outputs", ()))
    ]
    where = f"cell {failed[-1]} of {len(code_cells)} failed:\n" if failed else ""
    return f"{where}{error.traceback}".rstrip()


# --- the file --------------------------------------------------------------------------------------------------------


def _check_packages() -> None:
    missing = [name for name in ("nbclient", "nbformat") if not is_installed(name)]
    if missing:
        raise UsageError(f'{" and ".join(missing)} must be installed: pip install "nblaunch[notebooks]"')


def _read(path: Path) -> Any:
    nbformat: Any = importlib.import_module("nbformat")
    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    except (nbformat.ValidationError, nbformat.reader.NotJSONError, AttributeError, ValueError) as error:
        raise UsageError(f"{path} is not a notebook: {str(error).splitlines()[0]:.120}") from error


def _check_output(path: Path) -> None:
    """Raise UsageError if the executed notebook could not be written to ``path`` after all cells have run."""
    if path.is_dir():
        raise UsageError(f"--output: {path} is a folder; name a file, such as {path / 'executed.ipynb'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--output: no such folder: {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--output: the folder {folder} is not writable")


def _write(notebook: Any, path: Path) -> None:
    """Write the notebook atomically."""
    nbformat: Any = importlib.import_module("nbformat")
    replace_file(path, lambda aside: nbformat.write(notebook, aside))


# --- parameters ------------------------------------------------------------------------------------------------------


def set_parameters(notebook: Any, values: Mapping[str, Any]) -> None:
    """After the cell tagged ``parameters``, add a cell that assigns ``values``. Use papermill's tags.

    Raises:
        UsageError: no cell has this tag, or the cell does not assign one of the names.
    """
    if not values:
        return
    notebook.cells = [cell for cell in notebook.cells if not _has_tag(cell, "injected-parameters")]
    positions = [index for index, cell in enumerate(notebook.cells) if _has_tag(cell, "parameters")]
    if not positions:
        raise UsageError("--parameters: no cell in the notebook has the tag `parameters`")
    parameters = _assigned(notebook.cells[positions[0]].source)
    unknown = [name for name in values if parameters is not None and name not in parameters]
    if unknown:
        raise UsageError(
            f"--parameters {unknown[0]}: the notebook's parameters are {', '.join(parameters)}"
            if parameters
            else f"--parameters {unknown[0]}: the cell tagged `parameters` assigns no names"
        )
    nbformat: Any = importlib.import_module("nbformat")
    source = "\n".join(["# Parameters", *(f"{name} = {value!r}" for name, value in values.items())])
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
    if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):
        del cell["id"]
    notebook.cells.insert(positions[0] + 1, cell)


def _has_tag(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def _assigned(source: str) -> list[str] | None:
    """Return the names that a cell assigns; None if it is not plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    targets: list[ast.expr] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]

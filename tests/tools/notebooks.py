"""Execute the notebooks and store them with their outputs: ``make notebooks``, or only the named ones.

    python -m tests.tools.notebooks                      # all
    python -m tests.tools.notebooks 01_quickstart 03_tpu

They are executed without a user, so the output of a job is its table without scripts, which GitHub and the
documentation can show. Numbers differ between runs; :func:`fingerprint` shows whether outputs belong to the sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

from tests.notebooks.saved import WIDGET_VIEW, check_for_github, execute
from tests.profiles import python_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
XLA_PYTHON = ROOT / ".venv-xla" / "bin" / "python"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # no download
    "PJRT_DEVICE": "CPU",  # torch_xla without chips
    "PYTHONPATH": str(ROOT),  # install nothing if the interpreter lacks nblaunch
    "DS_ACCELERATOR": "cpu",  # DeepSpeed, which other libraries import, should not report its search for a GPU
}
OF_XLA = "03_tpu"
"""The notebook that is executed with torch_xla on the CPU, to show the cost of compiling."""


def main(names: Sequence[str]) -> int:
    paths = [FOLDER / f"{name.removesuffix('.ipynb')}.ipynb" for name in names] or sorted(
        FOLDER.glob("*.ipynb")
    )
    os.environ |= ENVIRONMENT
    for path in paths:
        python = str(XLA_PYTHON) if path.stem == OF_XLA else python_of("newest")
        notebook = nbformat.read(path, as_version=4)
        with kernel_of(python) as name:
            execute(
                notebook,
                path.parent,
                timeout_s=600,
                is_new=True,
                kernel_name=name,
                record_timing=False,
                store_widget_state=False,
            )
        tidy(notebook)
        check_for_github(notebook)
        nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB", flush=True)
    return 0


def fingerprint(notebook: Any) -> str:
    """Return a digest of the sources of all code cells, in order."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def tidy(notebook: Any) -> None:
    """Drop outputs that mean nothing to a reader, and record which sources were executed."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "nblaunch": {"executed": fingerprint(notebook)},
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # A widget without stored state, such as a bar of tqdm, is an empty space.
            kept = (output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {}))
            cell.outputs = [shortened(output) for output in kept]


def shortened(output: Any) -> Any:
    """Return an output without paths of the machine that created it."""
    text = json.dumps(output).replace(f"{ROOT}/", "")
    return nbformat.from_dict(json.loads(text))


@contextmanager
def kernel_of(python: str) -> Iterator[str]:
    """Make Jupyter find a kernel of this interpreter while the block runs; yield its name."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = Path(folder) / "kernels" / "stored" / "kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"argv": arguments, "display_name": "stored", "language": "python"}))
        before = os.environ.get("JUPYTER_PATH")
        os.environ["JUPYTER_PATH"] = folder
        try:
            yield "stored"
        finally:
            os.environ.pop("JUPYTER_PATH")
            if before is not None:
                os.environ["JUPYTER_PATH"] = before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

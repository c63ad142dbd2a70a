"""Libraries that keep threads or processes give the kernel's values in workers; ``pool_zoo.py`` tries more of them.

One kernel uses all libraries, and one launch uses them again, because imports and starts take most of the time.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.kernels import Kernel
from tests.worker.pool_zoo import SPECIMENS, is_installed

LIBRARIES = (
    "joblib, threads",
    "torch, threads of an operation",
    "torch, threads of backward",
    "NumPy, threads of BLAS",
    "pyarrow",
    "tokenizers",
    "TensorBoard",
)
PREPARED = """
import nblaunch
uses = {}
def use_all(): return {name: use() for name, use in uses.items()}
def launch(function):
    return nblaunch.notebook_launcher(
        function, num_processes=2, start_method="fork", dashboard="text", return_all=True, backend="cpu"
    )
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """Return a kernel that has used the libraries, each with variables of its own."""
    with Kernel.start() as kernel:
        kernel.run(PREPARED)
        for name in LIBRARIES:
            if is_installed(SPECIMENS[name].modules, sys.executable):
                body = textwrap.indent(SPECIMENS[name].cell, "    ")
                kernel.run(f"def prepare():\n{body}\n    return use\nuses[{name!r}] = prepare()")
        kernel.run("expected = use_all()")
        yield kernel


def test_libraries_work_in_forked_workers_as_in_the_kernel(shared: Kernel) -> None:
    shared.run("values = launch(use_all)")
    assert (
        shared.run("[name for name in uses if any(each[name] != expected[name] for each in values)]").value
        == []
    )
    assert shared.run("use_all() == expected").value

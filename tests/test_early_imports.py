"""Imports that workers need are made between cells or in the launch, never in the cell that imports nblaunch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

pytestmark = pytest.mark.slow

IMPORT = "from nblaunch import Accelerator, notebook_launcher"
TIMEOUT_S = 60

FOLLOW = f"""
import os, signal, sys, threading
from pathlib import Path
from nblaunch.packages import when_imported

folder = Path({{folder!r}})

def write(name):
    def change(module):
        (folder / name).write_text(threading.current_thread().name)
    return change

when_imported("torch._dynamo", write("compiler"))
{IMPORT}
"torch._dynamo" in sys.modules
"""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Start a kernel in a new interpreter, because other tests' kernels have imported the compiler from the
    beginning.
    """
    with Kernel.start(is_new=True) as kernel:
        yield kernel


def test_the_importing_cell_leaves_the_compiler_to_the_idle_kernel(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.run(FOLLOW.format(folder=str(tmp_path))).value is False
    kernel.wait_until((tmp_path / "compiler").exists, TIMEOUT_S, "the import of torch's compiler")
    # No other thread may hold an import lock while the kernel forks.
    assert (tmp_path / "compiler").read_text() == "MainThread"
    assert kernel.run("'torch._dynamo' in sys.modules").value is True


def test_an_early_launch_imports_before_forking(kernel: Kernel) -> None:
    found = kernel.run(
        f"import sys\n{IMPORT}\n"
        "def loaded(): return 'torch._dynamo' in sys.modules\n"
        "(loaded(), notebook_launcher(loaded, num_processes=2, return_all=True, dashboard='none'), loaded())"
    ).value
    assert found == (False, [True, True], True)


PLAIN = """
import torch
import nblaunch
def train(reports=True):
    import sys
    modules = [name in sys.modules for name in ("torch._dynamo", "nblaunch.training.accelerator")]
    if reports:
        return modules
    accelerator = nblaunch.Accelerator()
    torch.ones(1, requires_grad=True).sum().backward()
def launch(function, start_method):
    return nblaunch.notebook_launcher(
        function, num_processes=2, start_method=start_method, return_all=True, dashboard="none", backend="cpu"
    )
"""


@pytest.mark.parametrize("start_method", ["fork", thorough("forkserver")])
def test_a_loop_that_names_the_accelerator_only_inside_imports_before_forking(
    kernel: Kernel, start_method: str
) -> None:
    kernel.run(PLAIN)
    assert kernel.run(f"launch(train, {start_method!r})").value == [[True, True]] * 2


def test_a_function_that_does_not_train_imports_no_compiler(kernel: Kernel) -> None:
    kernel.run(PLAIN)
    kernel.run("def compute(): import sys; return torch.ones(2).sum().item(), 'torch._dynamo' in sys.modules")
    assert kernel.run("launch(compute, 'fork')").value == [(2.0, False)] * 2


@pytest.mark.thorough
def test_an_interrupt_of_an_importing_launch_leaves_no_partial_module(kernel: Kernel) -> None:
    kernel.run(PLAIN)
    kernel.run(
        "import os, signal\n"
        "from nblaunch.packages import when_imported\n"
        "when_imported('torch._dynamo.variables', lambda module: os.kill(os.getpid(), signal.SIGINT))"
    )
    kernel.run("launch(train, 'fork')", raises="KeyboardInterrupt")
    assert kernel.run("import sympy; sympy.Symbol('x').name").value == "x"
    assert kernel.run("launch(train, 'fork')").value == [[True, True]] * 2


@pytest.mark.thorough
def test_an_interrupt_of_an_awaiting_cell_leaves_no_partial_module(kernel: Kernel, tmp_path: Path) -> None:
    """The event loop imports while the cell awaits, and the interrupt comes in the middle."""
    interrupt = 'when_imported("sympy.core", lambda module: os.kill(os.getpid(), signal.SIGINT))'
    awaits = (
        FOLLOW.format(folder=str(tmp_path))
        + f"\n{interrupt}\nimport asyncio\nawait asyncio.sleep({TIMEOUT_S})"
    )
    cell = kernel.submit(awaits).wait()
    assert cell.raised.name in ("CancelledError", "KeyboardInterrupt")  # ipykernel does the same
    assert kernel.run("sys.modules['sympy'].Symbol('x').name").value == "x"
    kernel.wait_until((tmp_path / "compiler").exists, TIMEOUT_S, "the import of torch's compiler")
    assert kernel.run("import torch; torch._dynamo.is_compiling()").value is False


def test_a_launch_waits_for_a_thread_that_imports_the_compiler(kernel: Kernel) -> None:
    """After a fork in the middle, the import lock would stay taken in the workers."""
    found = kernel.run(
        "import importlib, sys, threading\n"
        f"{IMPORT}\n"
        "from nblaunch.packages import when_imported\n"
        "has_begun = threading.Event()\n"
        "when_imported('sympy.core', lambda module: has_begun.set())\n"
        "thread = threading.Thread(target=importlib.import_module, args=('torch._dynamo',))\n"
        "thread.start()\n"
        "has_begun.wait()\n"
        "def imports():\n"
        "    import torch._dynamo\n"
        "    return torch._dynamo.is_compiling()\n"
        "value = notebook_launcher(imports, num_processes=2, return_all=True, dashboard='none')\n"
        "thread.join()\n"
        "value"
    ).value
    assert found == [False, False]


def test_import_errors_are_left_to_the_user() -> None:
    with Kernel.start() as kernel:
        (name,) = kernel.run(
            f"{IMPORT}\nfrom nblaunch import early_imports\nearly_imports.plan('nblaunch_has_no_such_module')\n"
            "[notebook_launcher(lambda: __name__, num_processes=2, dashboard='none')]"
        ).value
    assert name == "__main__"


def test_a_script_imports_no_compiler_with_the_accelerator() -> None:
    code = f"import torch, sys\n{IMPORT}\nassert not {{'torch._dynamo', 'sympy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)

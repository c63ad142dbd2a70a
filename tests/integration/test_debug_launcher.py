"""``debug_launcher``: a few CPU processes, whatever devices there are."""

from __future__ import annotations

from tests.kernels import Kernel

CELL = """
import torch
from nblaunch import Accelerator, debug_launcher

def function(offset):
    accelerator = Accelerator()
    assert accelerator.device.type == "cpu"
    ranks = accelerator.gather(torch.tensor([accelerator.process_index + offset]))
    return ranks.tolist(), accelerator.mixed_precision
"""


def test_runs_on_cpu_processes_that_know_each_other(kernel: Kernel) -> None:
    kernel.run(CELL)
    cell = kernel.run("print(debug_launcher(function, (10,)), debug_launcher(function, (0,), 3))")
    assert cell.stdout == "([10, 11], 'no') ([0, 1, 2], 'no')\n"


def test_its_errors_are_the_functions(kernel: Kernel) -> None:
    kernel.run("from nblaunch import debug_launcher\ndef fails():\n    raise ValueError('of the function')")
    cell = kernel.run("debug_launcher(fails)", raises="ValueError")
    assert cell.raised.value == "of the function"
    assert "in fails()" in cell.raised.text

"""``debug_launcher`` starts a few CPU processes, whatever devices exist."""

from __future__ import annotations

from tests.kernels import Kernel


def test_debug_launcher_joins_processes_and_raises_errors(shared: Kernel) -> None:
    cell = shared.run(
        """
from nblaunch import Accelerator, debug_launcher
def function(offset):
    accelerator = Accelerator()
    assert accelerator.device.type == "cpu"
    ranks = accelerator.gather(torch.tensor([accelerator.process_index + offset]))
    return ranks.tolist(), accelerator.mixed_precision
debug_launcher(function, (10,)), debug_launcher(function, (0,), 3)
"""
    )
    assert cell.value == (([10, 11], "no"), ([0, 1, 2], "no"))
    cell = shared.run(
        "def fails():\n    raise ValueError('its own')\ndebug_launcher(fails)", raises="ValueError"
    )
    assert cell.raised.value == "its own"
    assert "in fails()" in cell.raised.text


def test_torch_rendezvous_on_one_machine_needs_no_address(shared: Kernel) -> None:
    cell = shared.run(
        """
from nblaunch import PartialState, notebook_launcher
def function():
    return PartialState().num_processes
notebook_launcher(function, num_processes=2, rdzv_backend="c10d")
"""
    )
    assert cell.value == 2

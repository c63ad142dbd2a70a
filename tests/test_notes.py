"""Switching notes on and off, and their log records."""

from __future__ import annotations

from tests.kernels import Kernel

LAUNCH = """
import logging
from nblaunch import notebook_launcher

def change(model):
    with torch.no_grad():
        model.weight.fill_(1.0)

def launch():
    notebook_launcher(change, (torch.nn.Linear(1, 1),), num_processes=1)
"""


def test_the_level_of_the_logger_turns_notes_off_and_on(kernel: Kernel) -> None:
    kernel.run("import torch" + LAUNCH)
    noted = "copied trained weights"
    assert noted in kernel.run("launch()").shown
    assert noted not in kernel.run("logging.getLogger('nblaunch').setLevel('WARNING'); launch()").shown
    assert noted in kernel.run("logging.getLogger('nblaunch').setLevel('INFO'); launch()").shown


def test_a_handler_of_the_logger_gets_the_notes_that_are_shown(kernel: Kernel) -> None:
    kernel.run("import torch" + LAUNCH)
    kernel.run(
        "records = []\n"
        "class Keeping(logging.Handler):\n"
        "    def emit(self, record): records.append((record.levelname, record.getMessage()))\n"
        "logging.getLogger('nblaunch.notes').addHandler(Keeping())\n"
        "logging.basicConfig(level='DEBUG')\n"
        "launch()"
    )
    records = kernel.run("records").value
    assert any(level == "INFO" and "copied trained weights" in text for level, text in records)

"""The guard of tests/alarms.py finds alarms in this process and in kernels, and leaves other notes alone."""

from __future__ import annotations

import logging

from tests.alarms import noted, undeclared
from tests.kernels import Kernel

WARNING = "gradients of the SGD are never cleared. (NBLAUNCH_CHECKS=-gradients_not_cleared silences this)"
HINTS = "2 hints about the training loop (loss_divided_twice, no_optimizer_steps): see nblaunch.last_job().hints()"


def names_in(kind: str, text: str, *declared: str) -> str:
    return "".join(undeclared([(kind, text)], set(declared))).partition(": ")[0]


def test_an_alarm_is_found_by_name_unless_it_was_declared() -> None:
    assert names_in("warning", WARNING) == "gradients_not_cleared"
    assert names_in("warning", WARNING, "gradients_not_cleared") == ""
    assert names_in("note", HINTS, "no_optimizer_steps") == "loss_divided_twice"
    assert names_in("slow", "62 % of each step is spent waiting for data on all ranks") == "slow_steps"
    assert names_in("hang", "rank 1 hangs") == "hang"


def test_notes_about_the_machine_are_not_alarms() -> None:
    assert names_in("note", "copied trained weights") == ""
    assert names_in("warning", "logs of earlier jobs could not be removed") == ""
    assert names_in("slow", "rank 1 shares its core with another process (python, pid 3)") == ""


def test_notes_of_this_process_and_of_kernels_are_collected(kernel: Kernel) -> None:
    with noted() as notes:
        logging.getLogger("nblaunch.notes").warning("here", extra={"kind": "note"})
        kernel.run(
            "import logging\nlogging.getLogger('nblaunch.notes').warning('a line\\nanother', extra={'kind': 'slow'})"
        )
    assert notes == [("note", "here"), ("slow", "a line\nanother")]

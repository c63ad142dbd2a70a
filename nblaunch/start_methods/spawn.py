"""Workers that are fresh interpreters: the default of ``nblaunch launch``, where each worker loads the script.

For a function from a notebook, this is the last resort, because every worker must load everything itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import NoReturn

from nblaunch.start_methods.interpreter import read_boot, report_left, start_interpreter
from nblaunch.start_methods.saved_call import SavedCall, saved_or_now
from nblaunch.start_methods.worker_group import Children, WorkerGroup, disown, kill_and_reap
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board
from nblaunch.wire.originals import Originals
from nblaunch.worker import bootstrap


def start(
    call: FunctionCall, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None
) -> WorkerGroup:
    """Start every worker as a new Python process."""
    with saved_or_now(saved, call) as file:
        return Children(spawn_workers(assignments, file))


def spawn_workers(assignments: Sequence[Assignment], call: SavedCall) -> dict[int, int]:
    """Start one interpreter per assignment; return rank -> process id.

    Raises:
        LaunchError: the system could not start a process; those already started have been killed.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for assignment in assignments:
            processes[assignment.rank] = start_interpreter(__name__, [assignment], call)
    except BaseException:
        kill_and_reap(map(disown, processes.values()))
        raise
    return {rank: disown(process) for rank, process in processes.items()}


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the worker that this interpreter was started for."""
    boot = read_boot(arguments)
    boot.call.restore_surroundings()  # connects displays to the launcher before the call is loaded
    os.set_inheritable(boot.call.fd, False)
    originals = Originals(boot.call.fd)

    def load() -> FunctionCall:
        call, originals.address = boot.call.load()
        report_left(boot)
        return call

    bootstrap.run(boot.assignments[0], load, originals=originals)

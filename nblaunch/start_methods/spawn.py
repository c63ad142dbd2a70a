"""Workers that are fresh interpreters, one each: the last resort, since every one loads everything by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from nblaunch.start_methods.base import WorkerGroup
from nblaunch.start_methods.children import Children, disown, kill_and_reap
from nblaunch.start_methods.interpreter import start_interpreter
from nblaunch.start_methods.saved_call import SavedCall, saved_or_now
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board


def start(
    call: FunctionCall, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None
) -> WorkerGroup:
    """Start every worker as a new Python process."""
    with saved_or_now(saved, call) as file:
        return Children(spawn_workers(assignments, file))


def spawn_workers(assignments: Sequence[Assignment], call: SavedCall) -> dict[int, int]:
    """Start one interpreter per assignment; return rank -> process id.

    Raises:
        LaunchError: the system refused a process; those already started are gone again.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for assignment in assignments:
            processes[assignment.rank] = start_interpreter([assignment], call)
    except BaseException:
        kill_and_reap(map(disown, processes.values()))
        raise
    return {rank: disown(process) for rank, process in processes.items()}

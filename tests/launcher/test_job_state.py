"""What is known of a job, from its events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nblaunch.events import Started
from nblaunch.launcher.job_state import JobState


def test_processes_are_in_the_order_of_ranks_whichever_starts_first() -> None:
    anything: Any = SimpleNamespace(num_processes=3, master_addr="", interrupts=0)
    job = JobState(anything, anything, anything, anything)
    for rank in (2, 0, 1):
        job.emit(Started(rank, 0.0, pid=100 + rank))
    assert list(job.pids.items()) == [(0, 100), (1, 101), (2, 102)]

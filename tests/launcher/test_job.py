"""A job's attributes, from its events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nblaunch.events import Metric, Started
from nblaunch.launcher.job import Job


@pytest.fixture
def job() -> Job:
    anything: Any = SimpleNamespace(num_processes=3, master_addr="", interrupts=0)
    return Job(anything, anything, anything, anything)


def test_processes_are_in_rank_order(job: Job) -> None:
    for rank in (2, 0, 1):
        job.emit(Started(rank, 0.0, pid=100 + rank))
    assert list(job.pids.items()) == [(0, 100), (1, 101), (2, 102)]


def test_logged_values_become_rows(job: Job) -> None:
    job.emit(Metric(0, 103.0, step=3, values={"loss": 0.5}))
    assert job.metrics == [{"step": 3, "time_s": 103.0, "rank": 0, "attempt": 0, "loss": 0.5}]
    # A value may be named "step": without an explicit step, it is the step.
    for given, shown in ((None, 7), (3, 3)):
        job.emit(Metric(2, 0.0, step=given, values={"step": 7}))
        assert job.metrics[-1] == {"step": shown, "time_s": 0.0, "rank": 2, "attempt": 0}


def test_metrics_do_not_grow_while_they_are_read(job: Job) -> None:
    """pandas reads a list several times, and raises if the thread that watches the job adds rows in the meantime."""
    job.emit(Metric(0, 103.0, step=1, values={"loss": 0.5}))
    rows = job.metrics
    job.emit(Metric(0, 104.0, step=2, values={"loss": 0.4}))
    assert (len(rows), len(job.metrics)) == (1, 2)


def test_completion_offers_what_users_call(job: Job) -> None:
    offered = [name for name in dir(job) if not name.startswith("_")]
    assert all(hasattr(Job, name) or hasattr(job, name) for name in offered)
    assert {"result", "stop", "logs", "metrics", "status", "wait"} <= set(offered)
    assert set(offered).isdisjoint(
        {"spec", "plan", "requests", "emit", "show_with", "find_debugger", "outcome"}
    )


def test_ipython_completes_a_job(job: Job) -> None:
    from IPython.core.completer import IPCompleter, provisionalcompleter

    completer = IPCompleter(shell=None, namespace={"job": job}, global_namespace={}, use_jedi=True)
    with provisionalcompleter():
        offered = {completion.text.lstrip(".") for completion in completer.completions("job.", 4)}
    assert "result" in offered
    assert offered.isdisjoint({"spec", "requests", "emit", "show_with"})

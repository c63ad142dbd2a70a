"""The positions of the ranks, requested while no rank runs the function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nblaunch.launcher.hang_watch import HangWatch
from nblaunch.launcher.requests import JobRequests


def test_stacks_say_if_no_rank_runs_the_function() -> None:
    attempt: Any = SimpleNamespace(
        spec=SimpleNamespace(hang_timeout_s=300.0),
        plan=SimpleNamespace(start_method="fork"),
        log=None,
        number=0,
        ranks=range(0),
    )
    requests = JobRequests()
    watch = HangWatch(attempt, list, requests, print)
    with requests.answering():
        answer = requests.ask_stacks()
        (query,) = requests.take_queries()
        watch.ask(query, {})
        while not answer.done():
            watch.poll(())
        assert answer.result(0) == "no rank is running the function"
    requests.close()

"""A signal handler raises at any line of a launch: nothing is left, and the exception arrives unchanged."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import psutil
import pytest

from nblaunch import last_job, notebook_launcher
from tests.left_behind import Snapshot
from tests.signals_at_lines import with_signal_at_line
from tests.thorough import thorough

STRIDE = 37
"""Lines between two tested lines; a prime, because otherwise the same lines of a loop would be hit."""

SAMPLED = 4
"""Of so many of these lines, one is tested without ``--thorough``: another one in each run."""


class Limit(TimeoutError):
    """The timeout of a cell; an OSError, like the system's own."""


def on_alarm(number: int, frame: object) -> None:
    raise Limit("the time of the cell is over")


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, on_alarm)
    yield
    signal.signal(signal.SIGALRM, before)


def nothing() -> None:
    """Do nothing, in a worker."""


def launch() -> None:
    notebook_launcher(nothing, num_processes=2, backend="cpu", dashboard="none")


def launch_in_background() -> None:
    job = notebook_launcher(nothing, num_processes=2, backend="cpu", dashboard="none", background=True)
    job.result()


def children() -> frozenset[psutil.Process]:
    return Snapshot.take().processes


@pytest.mark.parametrize("call", [launch, launch_in_background])
@pytest.mark.parametrize("sampled", [SAMPLED, thorough(1)])
def test_raising_handlers_leave_nothing_behind(call: object, sampled: int) -> None:
    assert callable(call)
    call()
    before = children()
    for number in range(1 + STRIDE * random.randrange(sampled), 10_000, STRIDE * sampled):
        place, error = with_signal_at_line(number, signal.SIGALRM, call)
        if not place:
            break
        assert type(error) is Limit, (place, error)
        job = last_job()
        assert job is not None
        job.wait(180)
        assert children() == before, place
        assert signal.getsignal(signal.SIGALRM) is on_alarm, place
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, place
    assert number > 500, "few lines have run"


def test_workers_have_the_handlers_of_the_kernel() -> None:
    def send() -> str:
        try:
            os.kill(os.getpid(), signal.SIGALRM)
        except Limit as limit:
            return str(limit)
        return ""

    assert notebook_launcher(send, num_processes=1, backend="cpu", start_method="fork", dashboard="none") == (
        "the time of the cell is over"
    )

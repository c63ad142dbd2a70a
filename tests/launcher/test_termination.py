"""The times at which ranks are interrupted after SIGTERM, with a clock that the test advances."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nblaunch.host import proc
from nblaunch.launcher.escalation import LISTEN_S, Termination
from nblaunch.launcher.requests import JobRequests
from nblaunch.wire.board import private_slot

RUNNING = {0: 1 << 30}
"""Rank 0, in a process that does not exist."""


@pytest.fixture
def requests() -> Iterator[JobRequests]:
    made = JobRequests()
    yield made
    made.close()


def handler(program: str) -> subprocess.Popen[str]:
    """Start a process that has run ``program``."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # A signal that arrives just before a sleep is handled after it, so the sleeps are short.
            f"import signal, time\n{program}\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_ranks_that_check_get_the_whole_grace(requests: JobRequests) -> None:
    slot = private_slot()
    slot.begin_check()
    termination = Termination(requests, 100.0, 20.0, RUNNING, {0: slot})
    assert requests.wants_stop
    assert termination.poll(119.9, RUNNING) == ""
    assert requests.interrupts == 0
    assert "20 s" in termination.poll(120.0, RUNNING)
    assert requests.interrupts == 1
    assert termination.poll(121.0, RUNNING) == "", "reported once"
    assert requests.interrupts == 1


def test_ranks_that_never_check_are_interrupted_soon(requests: JobRequests) -> None:
    termination = Termination(requests, 100.0, 20.0, RUNNING, {0: private_slot()})
    assert termination.poll(100.0 + LISTEN_S - 0.1, RUNNING) == ""
    assert "should_stop" in termination.poll(100.0 + LISTEN_S, RUNNING)
    assert requests.interrupts == 1


def test_a_timely_first_check_gives_the_whole_grace(requests: JobRequests) -> None:
    slot = private_slot()
    termination = Termination(requests, 100.0, 20.0, RUNNING, {0: slot})
    slot.begin_check()
    assert termination.poll(100.0 + LISTEN_S, RUNNING) == ""
    assert termination.poll(120.0, RUNNING)


def test_only_a_process_with_a_handler_gets_the_signal(requests: JobRequests) -> None:
    plain = handler("")
    handling = handler("signal.signal(signal.SIGTERM, lambda *args: exit(5))")
    try:
        assert not proc.catches(plain.pid, signal.SIGTERM)
        assert proc.catches(handling.pid, signal.SIGTERM)
        slots = {0: private_slot(), 1: private_slot()}
        termination = Termination(requests, 0.0, 20.0, {0: plain.pid, 1: handling.pid}, slots)
        assert handling.wait(timeout=30) == 5
        assert plain.poll() is None
        assert termination.poll(LISTEN_S + 1, RUNNING) == "", "the rank that handles it has the whole grace"
    finally:
        for process in (plain, handling):
            process.kill()
            process.communicate()


def test_a_rank_that_begins_later_gets_the_signal_once(requests: JobRequests) -> None:
    counting = handler(
        "got = []\n"
        # Pending signals are handled in the order of their numbers, so this one comes after all SIGTERMs.
        "signal.signal(signal.SIGWINCH, lambda *args: exit(len(got)))\n"
        "signal.signal(signal.SIGTERM, lambda *args: (got.append(1), print('got', flush=True)))"
    )
    try:
        slots = {0: private_slot(), 1: private_slot()}
        termination = Termination(requests, 0.0, 20.0, {}, slots)
        late = {1: counting.pid}
        assert termination.poll(0.1, late) == ""
        assert counting.stdout is not None
        assert counting.stdout.readline() == "got\n"
        assert termination.poll(LISTEN_S + 1, late) == "", "it has the whole grace"
        counting.send_signal(signal.SIGWINCH)
        assert counting.wait(timeout=30) == 1
    finally:
        counting.kill()
        counting.communicate()


def test_interrupted_ranks_keep_their_grace(requests: JobRequests) -> None:
    termination = Termination(requests, 100.0, 20.0, RUNNING, {0: private_slot()})
    requests.interrupt()
    assert termination.poll(100.0 + LISTEN_S, RUNNING) == ""
    assert termination.poll(121.0, RUNNING) == ""
    assert requests.interrupts == 1, "a second one would kill them"


def test_the_second_request_interrupts_at_once(requests: JobRequests) -> None:
    requests.terminate(20.0)
    assert (requests.terminations, requests.interrupts) == (1, 0)
    requests.terminate(20.0)
    assert requests.interrupts == 1

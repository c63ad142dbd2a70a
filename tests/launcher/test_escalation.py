"""The times at which ranks are signalled, after SIGTERM too, with a clock that the test advances."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.host import proc
from nblaunch.launcher.escalation import (
    COLLECT_S,
    LISTEN_S,
    TERM_GRACE_S,
    UNRESPONSIVE_GRACE_S,
    Escalation,
    Termination,
)
from nblaunch.launcher.requests import JobRequests
from nblaunch.wire.board import private_slot

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def walk(
    escalation: Escalation, noticed: set[int], alive: set[int], until_s: float
) -> list[tuple[float, int, int]]:
    """Follow the escalation at its own times; return (time, rank, signal)."""
    sent, now = [], 100.0
    while now <= 100.0 + until_s:
        sent += [
            (round(now - 100.0, 6), rank, number)
            for rank, number in escalation.due(now, alive, noticed.__contains__)
        ]
        following = escalation.next_s(alive, noticed.__contains__)
        if following is None:
            break
        assert following > now, "a step that is due was not given out"
        now = following
    return sent


def test_every_rank_has_the_whole_grace_after_an_interrupt() -> None:
    sent = walk(Escalation.after_interrupt(100.0, 5.0), noticed={0}, alive={0, 1}, until_s=60)
    expected = [(0.0, INT), (5.0, TERM), (5.0 + TERM_GRACE_S, KILL)]
    for rank in (0, 1):
        assert [(at, number) for at, who, number in sent if who == rank] == expected


@pytest.mark.parametrize("at_s", [0.0, COLLECT_S + 0.1])
def test_an_interrupt_after_a_failure_delays_nothing(at_s: float) -> None:
    escalation = Escalation.after_failure(100.0, 5.0)
    escalation.due(100.0 + at_s, {1}, set[int]().__contains__)
    escalation.add_interrupt(100.0 + at_s)
    sent = walk(escalation, noticed=set(), alive={1}, until_s=60)
    assert [number for _, _, number in sent] == [INT, TERM, KILL]
    assert sent[1][0] == pytest.approx(min(at_s, COLLECT_S) + UNRESPONSIVE_GRACE_S)


def test_unresponsive_ranks_have_less_grace_after_a_failure() -> None:
    sent = walk(Escalation.after_failure(100.0, 5.0), noticed={0}, alive={0, 1}, until_s=60)
    assert [(at, number) for at, who, number in sent if who == 0] == [
        (COLLECT_S, INT),
        (COLLECT_S + 5.0, TERM),
        (COLLECT_S + 5.0 + TERM_GRACE_S, KILL),
    ]
    assert [(at, number) for at, who, number in sent if who == 1] == [
        (COLLECT_S, INT),
        (COLLECT_S + UNRESPONSIVE_GRACE_S, TERM),
        (COLLECT_S + UNRESPONSIVE_GRACE_S + TERM_GRACE_S, KILL),
    ]


def test_a_short_grace_is_not_lengthened_for_unresponsive_ranks() -> None:
    sent = walk(Escalation.after_failure(100.0, 0.0), noticed=set(), alive={0}, until_s=60)
    assert [at for at, _, number in sent if number == TERM] == [COLLECT_S]


def test_killing_is_immediate() -> None:
    escalation = Escalation.kill(100.0)
    assert escalation.due(100.0, [3, 5], lambda rank: True) == [(3, KILL), (5, KILL)]
    assert escalation.due(200.0, [3, 5], lambda rank: True) == []
    assert escalation.next_s([3, 5], lambda rank: True) is None


def test_a_rank_that_notices_late_keeps_its_place() -> None:
    escalation = Escalation.after_failure(100.0, 5.0)
    noticed: set[int] = set()
    assert escalation.due(100.0 + COLLECT_S, [0], noticed.__contains__) == [(0, INT)]
    noticed.add(0)
    assert escalation.due(100.0 + COLLECT_S + UNRESPONSIVE_GRACE_S, [0], noticed.__contains__) == []
    assert escalation.next_s([0], noticed.__contains__) == pytest.approx(100.0 + COLLECT_S + 5.0)


@given(
    grace_s=st.floats(0, 100),
    looks_s=st.lists(st.floats(0, 200), max_size=30).map(sorted),
    noticed=st.sets(st.integers(0, 3)),
)
def test_each_signal_is_sent_once_in_order_and_never_early(
    grace_s: float, looks_s: list[float], noticed: set[int]
) -> None:
    escalation = Escalation.after_interrupt(0.0, grace_s)
    sent: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(4)}
    for now in looks_s:
        for rank, number in escalation.due(now, range(4), noticed.__contains__):
            sent[rank].append((now, number))
    earliest = {INT: 0.0, TERM: grace_s, KILL: grace_s + TERM_GRACE_S}
    for signals in sent.values():
        assert [number for _, number in signals] == [INT, TERM, KILL][: len(signals)]
        assert all(now >= earliest[number] for now, number in signals)
        last = looks_s[-1] if looks_s else -1.0
        assert len(signals) == sum(last >= at for at in earliest.values())


# --- SIGTERM to the launcher ------------------------------------------------------------------------------------------


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
        assert handling.wait(timeout=180) == 5
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
        assert counting.wait(timeout=180) == 1
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

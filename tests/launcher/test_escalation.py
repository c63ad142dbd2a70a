"""The steps that end workers, over a simulated clock."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.launcher.escalation import COLLECT_S, TERM_GRACE_S, UNRESPONSIVE_GRACE_S, Escalation

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

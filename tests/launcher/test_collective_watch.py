"""Reports about ranks that call different collectives: their time, and the named ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import Event
from nblaunch.launcher.collective_watch import CollectiveWatch
from nblaunch.wire.collective_calls import Call, Group, RankCalls, Site

ALL = Group((0, 1, 2, 3), 0, True)
NUM_KEPT = 20


def calls_of(rank: int, number: int) -> RankCalls:
    """Return the last of ``number`` calls of a rank; rank 3 uses MAX from call 21 on."""
    chain, calls = 0, []
    for serial in range(1, number + 1):
        reduction = "MAX" if rank == 3 and serial > 20 else "SUM"
        chain = hash((chain, reduction))
        site = Site("all_reduce", ALL, "float32", 1, 1, reduction, filename="train.py", line=9)
        calls.append(Call(serial, site, serial, chain, 4, (4,), float(serial), 0.0))
    return RankCalls(tuple(calls[-NUM_KEPT:]), number)


class Source:
    """Returns the next numbers of calls of the ranks at each reading; the last ones remain."""

    def __init__(self, looks: Sequence[Sequence[int]]) -> None:
        self._looks = list(looks)

    def may_differ(self) -> bool:
        return True

    def read(self) -> Mapping[int, RankCalls]:
        known = self.last()
        if len(self._looks) > 1:
            self._looks.pop(0)
        return known

    def last(self) -> Mapping[int, RankCalls]:
        return {rank: calls_of(rank, number) for rank, number in enumerate(self._looks[0])}

    def steps(self) -> Mapping[int, int]:
        return {}


def reported(
    *looks: Sequence[int], is_session: bool = False, emit: Callable[[Event], None] = print
) -> AttemptReport:
    """Return the report after one check per reading, half a second apart, and after the end."""
    attempt: Any = SimpleNamespace(spec=SimpleNamespace(is_session=is_session), compares_ranks=True)
    now_s = [100.0]
    watch = CollectiveWatch(Source(looks), attempt, emit, lambda: now_s[0])
    report = AttemptReport()
    ended: list[float] = []
    for _ in looks:
        now_s[0] += 0.5
        watch.compare(report, range(4), lambda: ended.append(now_s[0]))
    assert is_session or len(ended) == 1
    watch.conclude(report)
    return report


EVERY_RANK = (
    "collective 21: rank 3 all_reduce float32[4] MAX (train.py, line 9); "
    "ranks 0-2 all_reduce float32[4] SUM (train.py, line 9)"
)


def test_ranks_of_a_node_that_answers_late_are_named() -> None:
    late = (20, 20, 25, 25)
    for looks in (
        [late, (30, 30, 30, 30)],
        [late, late, late, (30, 30, 30, 30)],
        [late] * 5 + [(26, 26, 26, 26)],  # the answers come while the job ends
    ):
        report = reported(*looks)
        assert report.disagreement is not None
        assert report.disagreement.headline == EVERY_RANK


def test_ranks_that_are_faster_than_the_comparison_are_reported() -> None:
    report = reported(*[(number, number, number, number) for number in (30, 60, 90)])
    assert report.disagreement is not None
    assert report.disagreement.headline == EVERY_RANK


def test_a_session_warns_once_of_a_mistake_in_a_loop() -> None:
    notes: list[Event] = []
    reported(
        *[(number, number, number, number) for number in range(30, 300, 20)],
        is_session=True,
        emit=notes.append,
    )
    assert len(notes) == 1

"""How often workers' memory is read, and what is told in between."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field

import pytest

from nblaunch.host.memory import proportional_bytes
from nblaunch.launcher.memory_watch import INTERVAL_S, MemoryWatch

MB = 1_000_000


@dataclass
class Host:
    """A system whose clock moves by what reading costs."""

    now_s: float = 100.0
    cost_s: float = 0.0
    shared: int | None = 40 * MB
    own: dict[int, int] = field(default_factory=lambda: {1: 10 * MB, 2: 20 * MB})
    reads: list[tuple[int, float]] = field(default_factory=list)

    def watch(self) -> MemoryWatch:
        return MemoryWatch(
            proportional_bytes=self.proportional_bytes, own_bytes=self.own.get, clock=lambda: self.now_s
        )

    def proportional_bytes(self, pid: int) -> int | None:
        self.reads.append((pid, self.now_s))
        self.now_s += self.cost_s
        return None if self.shared is None else self.shared + self.own[pid]

    def run(self, watch: MemoryWatch, pids: dict[int, int], seconds: float) -> list[tuple[int, int]]:
        told = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            told += [(event.rank, event.num_bytes) for event in watch.look(pids)]
            self.now_s += 0.1
        return told


def test_every_rank_is_told_about_once_a_second() -> None:
    host = Host()
    told = host.run(host.watch(), {0: 1, 1: 2}, 9.95)
    assert set(told) == {(0, 50 * MB), (1, 60 * MB)}
    assert 17 <= len(told) <= 20


def test_all_ranks_are_told_about_at_once_though_they_are_read_one_by_one() -> None:
    host = Host(cost_s=0.2)
    told = host.watch().look({0: 1, 1: 2})
    assert [(event.rank, event.num_bytes) for event in told] == [(0, 50 * MB), (1, 60 * MB)]
    assert [pid for pid, _ in host.reads] == [1]


def test_a_rank_is_read_at_most_every_two_seconds() -> None:
    host = Host()
    host.run(host.watch(), {0: 1, 1: 2}, 20)
    for pid in (1, 2):
        times = [when for one, when in host.reads if one == pid]
        assert 9 <= len(times) <= 11
        assert min(after - before for before, after in itertools.pairwise(times)) >= INTERVAL_S


def test_dear_reads_take_a_hundredth_of_the_time_and_ranks_take_turns() -> None:
    host = Host(cost_s=0.05)
    host.run(host.watch(), {0: 1, 1: 2}, 100)
    assert 18 <= len(host.reads) <= 21
    assert [pid for pid, _ in host.reads[:4]] == [1, 2, 1, 2]


def test_growth_between_readings_is_told() -> None:
    host = Host(cost_s=1.0)
    watch = host.watch()
    host.run(watch, {0: 1}, 2)
    host.own[1] += 5 * MB
    assert host.run(watch, {0: 1}, 3)[-1] == (0, 55 * MB)
    assert len(host.reads) == 1


def test_without_the_true_number_own_pages_are_told_as_such() -> None:
    host = Host(shared=None)
    (event,) = host.watch().look({0: 2})
    assert (event.num_bytes, event.is_proportional) == (20 * MB, False)


def test_a_process_that_is_gone_is_left_out() -> None:
    host = Host()
    assert [event.rank for event in host.watch().look({0: 999})] == []


def test_a_real_process_is_read() -> None:
    (event,) = MemoryWatch().look({3: os.getpid()})
    if not event.is_proportional:
        assert proportional_bytes("self") is None
        return
    assert event.rank == 3
    assert event.num_bytes == pytest.approx(proportional_bytes("self"), rel=0.2)

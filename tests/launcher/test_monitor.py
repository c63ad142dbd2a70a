"""Samples of workers' host memory and devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from nblaunch.backends.cpu import CpuBackend
from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.view import JobView
from nblaunch.events import AttemptStarted, Exited, Started, WorkerState
from nblaunch.host.gpus import DeviceMeter, NvmlMeter
from nblaunch.host.memory import proportional_bytes
from nblaunch.launcher.monitor import DeviceSampler, MemorySampler
from nblaunch.wire.board import SlotReading
from tests.host.fake_nvml import FakeGpu, FakeNvml

MB = 1_000_000


@dataclass
class Host:
    """A system whose clock advances by the cost of each reading."""

    now_s: float = 100.0
    cost_s: float = 0.0
    shared: int | None = 40 * MB
    own: dict[int, int] = field(default_factory=lambda: {1: 10 * MB, 2: 20 * MB})
    reads: list[tuple[int, float]] = field(default_factory=list)

    def sampler(self) -> MemorySampler:
        return MemorySampler(
            proportional_bytes=self.proportional_bytes, own_bytes=self.own.get, clock=lambda: self.now_s
        )

    def proportional_bytes(self, pid: int) -> int | None:
        self.reads.append((pid, self.now_s))
        self.now_s += self.cost_s
        return None if self.shared is None else self.shared + self.own[pid]

    def run(self, sampler: MemorySampler, pids: dict[int, int], seconds: float) -> list[tuple[int, int]]:
        seen = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            seen += [(event.rank, event.num_bytes) for event in sampler.sample(pids)]
            self.now_s += 0.1
        return seen


def test_every_rank_is_sampled_once_a_second() -> None:
    host = Host()
    seen = host.run(host.sampler(), {0: 1, 1: 2}, 9.95)
    assert set(seen) == {(0, 50 * MB), (1, 60 * MB)}
    assert 17 <= len(seen) <= 20


def test_a_rank_that_starts_late_is_sampled_at_once() -> None:
    host = Host()
    sampler = host.sampler()
    seen = []
    for pids in ({}, {0: 1}, {0: 1}, {0: 1, 1: 2}, {0: 1, 1: 2}):
        seen.append([event.rank for event in sampler.sample(pids)])
        host.now_s += 0.1
    assert seen == [[], [0], [], [1], []]


def test_a_sample_reports_all_ranks_but_reads_one() -> None:
    host = Host(cost_s=0.2)
    seen = host.sampler().sample({0: 1, 1: 2})
    assert [(event.rank, event.num_bytes) for event in seen] == [(0, 50 * MB), (1, 60 * MB)]
    assert [pid for pid, _ in host.reads] == [1]


def test_slow_reads_take_a_hundredth_of_the_time_and_ranks_take_turns() -> None:
    host = Host(cost_s=0.05)
    host.run(host.sampler(), {0: 1, 1: 2}, 100)
    assert 18 <= len(host.reads) <= 21
    assert [pid for pid, _ in host.reads[:4]] == [1, 2, 1, 2]


def test_growth_between_readings_is_reported() -> None:
    host = Host(cost_s=1.0)
    sampler = host.sampler()
    host.run(sampler, {0: 1}, 2)
    host.own[1] += 5 * MB
    assert host.run(sampler, {0: 1}, 3)[-1] == (0, 55 * MB)
    assert len(host.reads) == 1


def test_a_peak_is_reported_at_once_and_stays() -> None:
    host = Host()
    sampler = host.sampler()
    sampler.sample({0: 1})
    host.now_s += 0.25
    host.own[1] += 4000 * MB
    (event,) = sampler.sample({0: 1})
    assert (event.num_bytes, event.peak_bytes) == (4050 * MB, 4050 * MB)
    host.now_s += 0.25
    host.own[1] -= 4000 * MB
    assert sampler.sample({0: 1}) == []
    host.now_s += 1.0
    (event,) = sampler.sample({0: 1})
    assert (event.num_bytes, event.peak_bytes) == (50 * MB, 4050 * MB)


def test_a_slightly_higher_peak_is_kept_for_the_next_event() -> None:
    host = Host()
    sampler = host.sampler()
    sampler.sample({0: 1})
    for change in (MB, -MB):
        host.now_s += 0.25
        host.own[1] += change
        assert sampler.sample({0: 1}) == []
    host.now_s += 1.0
    assert [event.peak_bytes for event in sampler.sample({0: 1})] == [51 * MB]


def test_joint_peak_is_not_the_sum_of_peaks() -> None:
    host = Host(cost_s=0.1)
    sampler = host.sampler()
    sampler.sample({0: 1, 1: 2})
    host.now_s += 1.0
    host.own.update({1: 110 * MB, 2: 10 * MB})
    sampler.sample({0: 1, 1: 2})
    host.now_s += 2.0
    host.own.update({1: 10 * MB, 2: 30 * MB})
    seen = sampler.sample({0: 1, 1: 2})
    assert [(event.peak_bytes, event.job_peak_bytes) for event in seen] == [
        (150 * MB, 200 * MB),
        (70 * MB, 200 * MB),
    ]


def test_each_command_has_its_own_peak() -> None:
    host = Host()
    sampler = host.sampler()
    host.own[1] += 4000 * MB
    sampler.sample({0: 1})
    sampler.sample({})  # the command has ended
    host.own[1] -= 4000 * MB
    host.now_s += 0.25
    (event,) = sampler.sample({0: 1})
    assert (event.peak_bytes, event.job_peak_bytes) == (50 * MB, 50 * MB)


def test_without_proportional_sizes_own_pages_are_reported() -> None:
    host = Host(shared=None)
    (event,) = host.sampler().sample({0: 2})
    assert (event.num_bytes, event.is_proportional) == (20 * MB, False)


def test_a_process_that_is_gone_is_left_out() -> None:
    host = Host()
    assert [event.rank for event in host.sampler().sample({0: 999})] == []


def test_a_real_process_is_read() -> None:
    (event,) = MemorySampler().sample({3: os.getpid()})
    if not event.is_proportional:
        assert proportional_bytes("self") is None
        return
    assert event.rank == 3
    assert event.num_bytes == pytest.approx(proportional_bytes("self"), rel=0.2)


class _TwoDevices(CpuBackend, DeviceMeter):
    """A backend with its own meter for two devices."""

    is_closed = False
    num_reads = 0
    uses: Sequence[float | None] = (0.25, None)

    def open_meter(self) -> DeviceMeter:
        return self

    def read(self) -> list[float | None]:
        self.num_reads += 1
        return list(self.uses)

    def close(self) -> None:
        self.is_closed = True


def test_devices_are_read_once_a_second_and_shared_in_turn() -> None:
    backend, now_s = _TwoDevices(), 100.0
    sampler = DeviceSampler(backend, first_rank=4, num_workers=3, clock=lambda: now_s)
    assert sampler.sample() == [], "no device is in use yet"
    now_s = 101.5
    assert [(one.rank, one.share) for one in sampler.sample()] == [(4, 0.25), (6, 0.25)], (
        "devices are taken in turn"
    )
    assert sampler.sample() == []
    assert backend.num_reads == 1
    now_s = 103.0
    backend.uses = ()
    assert sampler.sample() == []
    sampler.close()
    assert backend.is_closed


def test_a_lost_gpu_does_not_shift_others() -> None:
    gpus = [FakeGpu(f"GPU-{index}", utilisation=10 * index) for index in range(3)]
    backend, now_s = _TwoDevices(), 100.0
    backend.open_meter = lambda: NvmlMeter([gpu.uuid for gpu in gpus], driver)  # type: ignore[method-assign]
    driver = FakeNvml(gpus)
    driver.nvmlInit()
    gpus[0].is_lost = True  # lost when the meter is opened, or later
    sampler = DeviceSampler(backend, 0, 4, clock=lambda: now_s)
    gpus[1].is_lost = True
    now_s = 102.0
    assert [(one.rank, one.share) for one in sampler.sample()] == [(2, 0.2)]
    sampler.close()


def test_the_table_shows_the_utilisation_while_the_rank_runs() -> None:
    view = fold(fold(JobView(), AttemptStarted(-1, 1.0, num_processes=1)), Started(0, 1.0, pid=7))
    now_s = 100.0
    sampler = DeviceSampler(_TwoDevices(), 0, 1, clock=lambda: now_s)
    now_s = 102.0
    for event in sampler.sample():
        view = fold(view, event)
    sample = SlotReading(
        0, WorkerState.TRAINING, device_bytes=2_000_000_000, device_limit_bytes=16_000_000_000
    )
    view = fold_readings(view, [sample], 3.0)
    table = tabulate(view)
    assert "2.00 GB of 16.0 GB, 25% busy" in table.rows[0].cells
    ended = tabulate(fold(view, Exited(0, 4.0)))
    assert not any("busy" in cell for cell in ended.rows[0].cells)

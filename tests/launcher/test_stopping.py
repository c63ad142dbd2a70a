"""The supervisor, and processes that do not end at once on request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from unittest import mock

import pytest

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import Event, Exited, ExitStatus, Note
from nblaunch.launcher import supervisor as module
from nblaunch.launcher.attempt import Attempt, start_attempt
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.requests import JobRequests
from nblaunch.launcher.supervisor import Supervisor
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods import STARTERS
from nblaunch.start_methods.worker_group import WorkerGroup
from nblaunch.topology import Topology


class Group(WorkerGroup):
    """Ranks 0 and 1, which only some signals end.

    Args:
        ends_by: rank -> signals that end it.
        on_signal: called after each signal.
        failed: ranks that have ended at the start.
    """

    def __init__(
        self,
        ends_by: Mapping[int, Collection[int]],
        on_signal: Callable[[], None] = lambda: None,
        failed: Collection[int] = (),
    ) -> None:
        self.is_closed = False
        self.known_pids = {0: os.getpid(), 1: os.getpid()}
        self.signals: list[tuple[int, int]] = []
        self.abandoned: list[int] = []
        self._ends_by = ends_by
        self._on_signal = on_signal
        self._ended = [(rank, ExitStatus(1)) for rank in failed]

    def pids(self) -> dict[int, int]:
        return self.known_pids

    def process_groups(self) -> list[int]:
        return []

    def waitables(self) -> list[int]:
        return []

    def poll(self) -> list[tuple[int, ExitStatus]]:
        ended, self._ended = self._ended, []
        return ended

    def signal(self, rank: int, signum: int) -> None:
        self.signals.append((rank, signum))
        if signum in self._ends_by[rank]:
            self._ended.append((rank, ExitStatus(-signum)))
        self._on_signal()

    def abandon(self, rank: int) -> None:
        self.abandoned.append(rank)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Return a group in which nothing ends rank 0, and an interrupt ends rank 1, even a double one."""
    monkeypatch.setattr(module, "KILL_PATIENCE_S", 0.3)
    return Group({0: (), 1: (signal.SIGINT, signal.SIGKILL)})


def watch(
    group: Group, requests: JobRequests, events: list[Event], folder: Path, grace_s: float = 0.1
) -> AttemptReport:
    spec = LaunchSpec(print, (), 2, backend="cpu", interrupt_grace_s=grace_s, log_dir=str(folder))
    topology = Topology(world_size=2, local_world_size=2)
    attempt = Attempt(spec, plan_launch(spec), 0, 0, topology, JobLog(spec.log_dir))
    with mock.patch.dict(STARTERS, {attempt.plan.start_method: lambda *args: group}):
        running = start_attempt(attempt)
    report, rank_results = Supervisor(running, requests, events.append, lambda samples: None).run()
    assert rank_results == {}
    assert group.is_closed
    return report


def test_unkillable_processes_are_abandoned(group: Group, tmp_path: Path) -> None:
    requests, events = JobRequests(), list[Event]()
    requests.interrupt()
    report = watch(group, requests, events, tmp_path)
    assert [signum for rank, signum in group.signals if rank == 0] == [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGKILL,
    ]
    assert group.abandoned == [0]
    assert report.interrupted
    assert list(report.unkillable) == [0]
    assert f"rank 0 (pid {os.getpid()})" in report.unkillable[0]
    assert [event.text for event in events if isinstance(event, Note)] == [report.unkillable[0]]
    ended = {event.rank: event.was_stopped for event in events if isinstance(event, Exited)}
    assert ended == {0: True, 1: True}
    assert report.exits.keys() == {0, 1}
    requests.close()


def test_an_unkillable_rank_without_a_process_is_described(group: Group, tmp_path: Path) -> None:
    """For example, a forkserver is blocked before it has started its workers."""
    group.known_pids = {1: os.getpid()}
    requests = JobRequests()
    requests.interrupt()
    report = watch(group, requests, [], tmp_path)
    assert report.unkillable[0].startswith("rank 0 did not end")
    assert "None" not in report.unkillable[0]
    assert "/proc" not in report.unkillable[0]
    requests.close()


def test_further_interrupts_do_not_delay_it(group: Group, tmp_path: Path) -> None:
    requests, is_over = JobRequests(), threading.Event()

    def press_again_and_again() -> None:
        while not is_over.wait(0.05):
            requests.interrupt()

    thread = threading.Thread(target=press_again_and_again)
    thread.start()
    try:
        report = watch(group, requests, [], tmp_path)
    finally:
        is_over.set()
        thread.join()
    assert list(report.unkillable) == [0]
    requests.close()


def test_an_interrupt_after_a_failure_delays_nothing(tmp_path: Path) -> None:
    requests = JobRequests()

    def interrupt_once() -> None:
        if not requests.interrupts:
            requests.interrupt()

    group = Group({0: (), 1: [signal.SIGTERM]}, interrupt_once, failed=[0])
    report = watch(group, requests, [], tmp_path, grace_s=3600.0)
    assert group.signals == [(1, signal.SIGINT), (1, signal.SIGINT), (1, signal.SIGTERM)]
    assert not report.interrupted
    requests.close()


def test_an_interrupt_does_not_take_back_a_cancel(tmp_path: Path) -> None:
    requests = JobRequests()
    requests.cancel()
    requests.interrupt()
    group = Group({0: [signal.SIGKILL], 1: [signal.SIGKILL]})
    assert watch(group, requests, [], tmp_path, grace_s=3600.0).cancelled
    assert group.signals == [(0, signal.SIGKILL), (1, signal.SIGKILL)]
    requests.close()

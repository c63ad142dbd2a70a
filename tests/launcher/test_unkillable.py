"""The supervisor and a process that does not end, whatever it is sent."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.engines.base import WorkerGroup
from nblaunch.events import Event, Exited, ExitStatus, Note
from nblaunch.launcher import supervisor as module
from nblaunch.launcher.requests import StopRequests
from nblaunch.launcher.supervisor import Supervisor
from nblaunch.wire.board import Board
from nblaunch.wire.channel import EventReceiver

pytestmark = pytest.mark.timeout(30)


class Immortal(WorkerGroup):
    """Rank 0 ends by nothing; rank 1 by SIGINT."""

    def __init__(self) -> None:
        self.signals: list[tuple[int, int]] = []
        self.abandoned: list[int] = []
        self._ended: list[tuple[int, ExitStatus]] = []

    def pids(self) -> dict[int, int]:
        return {0: os.getpid(), 1: os.getpid()}

    def process_groups(self) -> list[int]:
        return []

    def waitables(self) -> list[int]:
        return []

    def poll(self) -> list[tuple[int, ExitStatus]]:
        ended, self._ended = self._ended, []
        return ended

    def signal(self, rank: int, signum: int) -> None:
        self.signals.append((rank, signum))
        if rank == 1 and signum == signal.SIGINT:
            self._ended.append((1, ExitStatus(-signum)))

    def abandon(self, rank: int) -> None:
        self.abandoned.append(rank)

    def close(self) -> None:
        raise AssertionError("the supervisor does not close its group")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Immortal:
    monkeypatch.setattr(module, "KILL_PATIENCE_S", 0.3)
    return Immortal()


def watch(group: Immortal, requests: StopRequests, events: list[Event], folder: Path) -> AttemptReport:
    pipes = [os.pipe(), os.pipe()]
    board = Board.create(2)
    supervisor = Supervisor(
        group=group,
        receivers={rank: EventReceiver(reading) for rank, (reading, _) in enumerate(pipes)},
        tails={},
        board=board,
        rendezvous=None,
        requests=requests,
        emit=events.append,
        show=lambda samples: None,
        settle=lambda: None,
        grace_s=0.1,
        stacks_paths={rank: folder / f"{rank}.stacks" for rank in range(2)},
        hang_timeout_s=None,
        stops_on_hang=False,
    )
    try:
        return supervisor.run()
    finally:
        board.close()
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)


def test_what_sigkill_does_not_end_is_left_behind(group: Immortal, tmp_path: Path) -> None:
    requests, events = StopRequests(), list[Event]()
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
    assert "state " in report.unkillable[0]
    assert [event.text for event in events if isinstance(event, Note)] == [report.unkillable[0]]
    assert {event.rank for event in events if isinstance(event, Exited)} == {0, 1} == report.exits.keys()
    requests.close()


def test_further_interrupts_do_not_put_it_off(group: Immortal, tmp_path: Path) -> None:
    requests, is_over = StopRequests(), threading.Event()

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

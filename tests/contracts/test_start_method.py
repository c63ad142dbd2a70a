"""Requirements for every start method and its worker group."""

from __future__ import annotations

import errno
import os
import posix
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from nblaunch.errors import LaunchError, PayloadError
from nblaunch.events import ExitStatus, Returned, Started
from nblaunch.start_methods import STARTERS
from nblaunch.start_methods.worker_group import WorkerGroup
from nblaunch.topology import Topology
from nblaunch.wire import outbox
from nblaunch.wire.assignment import Assignment
from nblaunch.wire.board import Board, create_memory_file
from nblaunch.wire.channel import EventReceiver

NUM = 2
LIMIT_S = 180.0


class Stage:
    """The arguments of a start method, and its result."""

    def __init__(self, method: str, folder: Path) -> None:
        self.method = method
        self.folder = folder
        self.stack = ExitStack()
        self.board = Board.create(NUM)
        self.stack.callback(self.board.close)
        self.receivers: dict[int, EventReceiver] = {}
        self.assignments: list[Assignment] = []
        self.worker_ends: list[int] = []
        for rank in range(NUM):
            reading, writing = os.pipe()
            self.receivers[rank] = EventReceiver(reading)
            self.stack.callback(os.close, reading)
            box = create_memory_file("outbox")
            self.stack.callback(os.close, box)
            self.worker_ends.append(writing)
            self.assignments.append(self._assignment(rank, writing, box))
        self.events: dict[int, list[Any]] = {rank: [] for rank in range(NUM)}
        self.ended: dict[int, ExitStatus] = {}

    def _assignment(self, rank: int, event_fd: int, outbox_fd: int) -> Assignment:
        topology = Topology(rank, rank, 0, NUM, NUM, master_port=1)
        return Assignment(
            topology=topology,
            backend="cpu",
            environment=topology.to_env(),
            accelerator_defaults={},
            attempt=0,
            board_fd=self.board.fd,
            event_fd=event_fd,
            outbox_fd=outbox_fd,
            log_path=str(self.folder / f"rank_{rank}.log"),
            stacks_path=str(self.folder / f"rank_{rank}.stacks"),
            num_threads=1,
        )

    def start(self, function: Callable[..., Any], *args: Any) -> WorkerGroup:
        try:
            group = STARTERS[self.method]((function, args), self.assignments, self.board, None)
        finally:
            for fd in self.worker_ends:
                os.close(fd)
            self.worker_ends = []
        self.stack.callback(group.close)
        self.group = group
        return group

    def run(self, group: WorkerGroup, until: Callable[[], bool] | None = None) -> None:
        """Poll until every rank has ended, or until a condition is true."""
        deadline = time.monotonic() + LIMIT_S
        while not (until() if until is not None else len(self.ended) == NUM):
            assert time.monotonic() < deadline, (self.ended, self.events, self.logs())
            fds = [*group.waitables(), *(receiver.fd for receiver in self.receivers.values())]
            select.select(fds, [], [], 0.05)
            for rank, status in group.poll():
                assert rank not in self.ended, "an end is reported once"
                self.ended[rank] = status
            for rank, receiver in self.receivers.items():
                self.events[rank] += receiver.receive()[0]

    def has_started(self) -> bool:
        """Return whether every worker runs and the group knows it; a forkserver may report a worker later than the
        worker itself.
        """
        is_known = len(self.group.pids()) == NUM
        return is_known and all(
            any(isinstance(event, Started) for event in events) for events in self.events.values()
        )

    def values(self) -> list[Any]:
        finished = {
            rank: [e for e in events if isinstance(e, Returned)] for rank, events in self.events.items()
        }
        return [
            outbox.read(a.outbox_fd, finished[a.rank][0].value_location, {}).value for a in self.assignments
        ]

    def logs(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("*.log"))]


@pytest.fixture(params=["fork", "forkserver", "spawn"])
def stage(request: pytest.FixtureRequest, tmp_path: Path, nothing_left_behind: None) -> Iterator[Stage]:
    stage = Stage(request.param, tmp_path)
    with stage.stack:
        yield stage
    for fd in stage.worker_ends:
        os.close(fd)


def report(number: int) -> Any:
    print("seen", flush=True)
    return os.environ["RANK"], number, os.getpid(), os.getpgid(0), os.getsid(0)


def test_ranks_run_in_their_own_posix_session(stage: Stage) -> None:
    group = stage.start(report, 7)
    stage.run(group)
    assert stage.ended == {0: ExitStatus(0), 1: ExitStatus(0)}
    values = stage.values()
    assert [value[:2] for value in values] == [("0", 7), ("1", 7)]
    for rank, (_, _, pid, process_group, posix_session) in enumerate(values):
        assert group.pids()[rank] == pid == process_group == posix_session
    # Other processes may have their numbers now.
    assert not set(group.pids().values()) & set(group.process_groups())
    assert stage.logs() == ["seen\n"] * NUM
    assert group.poll() == []


def leave(codes: list[int]) -> None:
    os._exit(codes[int(os.environ["RANK"])])


def test_each_exit_status_is_reported(stage: Stage) -> None:
    stage.run(stage.start(leave, [3, 0]))
    assert stage.ended == {0: ExitStatus(3), 1: ExitStatus(0)}


def wait_with_child(path: str) -> None:
    child = subprocess.Popen(["/bin/sleep", "100"])
    Path(path, os.environ["RANK"]).write_text(str(child.pid))
    signal.pause()


def test_a_signal_reaches_one_rank_with_its_children(stage: Stage, tmp_path: Path) -> None:
    group = stage.start(wait_with_child, str(tmp_path))
    files = [tmp_path / str(rank) for rank in range(NUM)]
    stage.run(group, lambda: all(file.exists() and file.read_text() for file in files))
    children = [psutil.Process(int(file.read_text())) for file in files]
    group.signal(1, signal.SIGKILL)
    stage.run(group, lambda: 1 in stage.ended)
    assert stage.ended == {1: ExitStatus(-signal.SIGKILL)}
    assert group.pids()[0] in group.process_groups()
    assert group.pids()[1] not in group.process_groups()
    psutil.wait_procs(children[1:], 30)
    assert not (children[1].is_running() and children[1].status() != psutil.STATUS_ZOMBIE)
    assert children[0].is_running()
    group.signal(1, signal.SIGKILL)  # the rank has ended, so nothing happens
    group.signal(0, signal.SIGTERM)
    stage.run(group)
    assert stage.ended[0] == ExitStatus(-signal.SIGTERM)


def test_closing_ends_what_still_runs(stage: Stage) -> None:
    group = stage.start(time.sleep, 100)
    stage.run(group, stage.has_started)
    pids = list(group.pids().values())
    assert set(pids) <= set(group.process_groups())
    group.close()
    stage.stack.pop_all()  # the group's process first; the others below, in the same order
    stage.board.close()
    for receiver in stage.receivers.values():
        receiver.close()
    for assignment in stage.assignments:
        os.close(assignment.outbox_fd)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 5)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_closing_does_not_wait_for_abandoned_ranks(stage: Stage) -> None:
    group = stage.start(time.sleep, 100)
    stage.run(group, stage.has_started)
    abandoned = psutil.Process(group.pids()[0])
    group.abandon(0)
    assert abandoned.pid in group.process_groups()
    group.signal(1, signal.SIGKILL)
    stage.run(group, lambda: 1 in stage.ended)
    group.signal(0, signal.SIGKILL)  # no longer sent
    assert group.poll() == []
    assert abandoned.status() != psutil.STATUS_ZOMBIE
    stage.stack.callback(kill_child, abandoned)  # after the group is closed


def kill_child(process: psutil.Process) -> None:
    if process.is_running():
        process.kill()
        process.wait()


def test_closing_at_once_leaves_no_process(stage: Stage) -> None:
    """This also holds while workers, or the process that forks them, are still starting."""
    stage.start(time.sleep, 100)


def test_unpicklable_calls_are_rejected_by_name(stage: Stage) -> None:
    gate = threading.Lock()

    def train() -> bool:
        return gate.locked()

    if stage.method == "fork":
        stage.run(stage.start(train))
        assert stage.values() == [False, False]
    else:
        with pytest.raises(PayloadError, match=r"train can't be sent .* gate \(TypeError"):
            stage.start(train)


def test_a_rejected_pipe_leaves_no_copy_of_the_call(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage.method != "forkserver":
        pytest.skip("makes no pipe of its own")

    def reject() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "pipe", reject)
    with pytest.raises(OSError, match="Too many open files"):
        stage.start(time.sleep, 100)
    assert len(os.listdir("/proc/self/fd")) == len(before) - NUM  # the workers' ends of the pipes


def test_a_rejected_process_ends_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage.method == "forkserver":
        pytest.skip("its workers start in another process")
    fork, popen, started = posix.fork, subprocess.Popen, []

    def second_is_rejected(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            if started:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            started.append(start(*args, **kwargs))
            return started[0]

        return begin

    monkeypatch.setattr(posix, "fork", second_is_rejected(fork))
    monkeypatch.setattr(subprocess, "Popen", second_is_rejected(popen))
    with pytest.raises(LaunchError, match="Resource temporarily unavailable"):
        stage.start(time.sleep, 100)
    first = started[0] if isinstance(started[0], int) else started[0].pid
    assert not psutil.pid_exists(first)

"""The client of a session, with both ends of its connections in this process."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from nblaunch.launcher.debug_client import DebugClient
from nblaunch.session import client
from nblaunch.session.client import SessionClient
from nblaunch.session.output import SessionOutput
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.worker_commands import CommandConnection, Reply, SetVariables, connect, send_reply


class Ranks:
    """Two ranks, and the client of their session. They answer before they are asked."""

    def __init__(self) -> None:
        pairs, debugger = [connect() for _ in range(2)], [connect() for _ in range(2)]
        self.workers = [CommandConnection(fd) for _, fd in pairs]
        self.debuggers = [CommandConnection(fd) for _, fd in debugger]
        self.cancelled: list[bool] = []
        self.output = SessionOutput()
        self.kernels = {rank: kernel for rank, (kernel, _) in enumerate(pairs)}
        runner: Any = SimpleNamespace(
            command_connections=self.kernels,
            debugger=DebugClient({rank: kernel for rank, (kernel, _) in enumerate(debugger)}),
            requests=SimpleNamespace(cancel=lambda: self.cancelled.append(True), ask_logs=Future),
            pids={},
            is_running=True,
        )
        self.client = SessionClient(runner, self.output)

    def answer(self, *values: Any) -> None:
        for worker, value in zip(self.workers, values, strict=True):
            worker.send(Reply(value=value))

    def values(self) -> list[Any]:
        replies = self.client.request([0, 1], SetVariables())
        return [received.value_of(rank) for rank, received in replies.items()]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.client.close()
    for ends in (ranks.workers, ranks.debuggers, ranks.kernels):
        ends.clear()  # which closes them


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, hard))
    fillers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_reply_whose_file_finds_no_descriptor_is_that_of_its_rank_alone(ranks: Ranks) -> None:
    fd = create_memory_file("outbox")
    send_reply(ranks.workers[0], Reply.of_value(0, [1], fd), fd)
    ranks.workers[1].send(Reply(value=1))
    with no_descriptor_left():
        replies = ranks.client.request([0, 1], SetVariables())
    os.close(fd)
    with pytest.raises(ValueError, match="no descriptor left"):
        replies[0].value_of(0)
    assert replies[1].value_of(1) == 1
    ranks.answer(2, 2)
    assert ranks.values() == [2, 2]


def test_a_default_timeout_of_the_user_s_sockets_does_not_hold_for_connections() -> None:
    socket.setdefaulttimeout(10.0)
    try:
        kernel, fd = connect()
        worker = CommandConnection(fd)
        worker.send(Reply(), [0])
        _, (file,) = kernel.receive()
        os.close(file)
        assert os.get_blocking(kernel.fileno())
        assert os.get_blocking(worker.fileno())
    finally:
        socket.setdefaulttimeout(None)


def test_replies_to_a_command_that_an_error_in_the_kernel_has_ended_are_not_those_to_the_next(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    ranks.workers[0].send(Reply(value=1))
    with monkeypatch.context() as patch:
        patch.setattr(ranks.output, "pump", fails)  # as a dashboard's error
        with pytest.raises(ZeroDivisionError):
            ranks.client.request([0, 1], SetVariables())
    ranks.workers[1].send(Reply(value=1))
    ranks.answer(2, 2)
    assert ranks.values() == [2, 2]


def test_an_interrupt_while_no_command_runs_does_nothing(ranks: Ranks) -> None:
    """As of a timer that was to end a command, and is late."""
    ranks.answer(1, 1)
    assert ranks.values() == [1, 1]
    ranks.client.interrupt()
    ranks.client.interrupt()
    assert (ranks.client.num_interrupts, ranks.cancelled) == (0, [])


def test_an_interrupt_as_a_command_begins_is_one_of_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def with_one_at_once(request: Callable[[], None]) -> Iterator[None]:
        request()
        yield

    monkeypatch.setattr(client, "interrupts_as_requests", with_one_at_once)
    ranks.answer(1, 1)
    assert ranks.values() == [1, 1]
    assert ranks.client.num_interrupts == 1


def test_the_second_interrupt_of_a_command_kills_the_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_twice() -> None:
        ranks.client.interrupt()
        ranks.client.interrupt()
        monkeypatch.undo()
        ranks.answer(1, 1)

    monkeypatch.setattr(ranks.output, "pump", interrupt_twice)
    assert ranks.values() == [1, 1]
    assert (ranks.client.num_interrupts, ranks.cancelled) == (2, [True])

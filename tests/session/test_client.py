"""The client of a session, with both ends of its connections in this process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from nblaunch.events import CommandEvent, EpochEnded, Event, Exited, Fact, LogLines, Metric, Returned, Started
from nblaunch.launcher.debug_client import DebugClient
from nblaunch.session import client, output
from nblaunch.session.client import SessionClient
from nblaunch.session.output import SessionOutput
from nblaunch.session.session import Session
from nblaunch.wire.board import SlotReading, private_slot
from nblaunch.wire.outbox import Outbox
from nblaunch.wire.worker_commands import Close, CommandConnection, Reply, SetVariables, connect
from tests.no_descriptors import no_descriptor_left


class Ranks:
    """Two ranks, each a thread, and the client of their session.

    Attributes:
        answers: for each rank, the values that it returns, one for each command; None = it does not end the command.
    """

    def __init__(self) -> None:
        pairs = [connect() for _ in range(2)]
        self.answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in pairs]
        self.cancelled: list[bool] = []
        self.output = SessionOutput()
        runner: Any = SimpleNamespace(
            debugger=DebugClient({rank: kernel for rank, (kernel, _) in enumerate(pairs)}),
            requests=SimpleNamespace(cancel=lambda: self.cancelled.append(True), ask_logs=Future),
            pids={},
            slots={rank: private_slot() for rank in range(2)},
            keep_weights=lambda wanted: None,
            is_running=True,
        )
        self.client = SessionClient(runner, self.output)
        ends = [CommandConnection(fd) for _, fd in pairs]
        self.threads = [Thread(target=self._serve, args=end, daemon=True) for end in enumerate(ends)]
        for thread in self.threads:
            thread.start()

    def _serve(self, rank: int, connection: CommandConnection) -> None:
        unanswered: list[int] = []
        while not isinstance((received := connection.receive())[0], Close):
            command, (outbox_fd,) = received
            value = self.answers[rank].get()
            if value is None:
                unanswered.append(command.number)
            else:
                for number in unanswered:
                    self._report(rank, number, Returned(rank), Exited(rank))
                returned = Returned(rank, value_location=Outbox(outbox_fd).put_value(value))
                self._report(rank, command.number, Started(rank), returned, Exited(rank))
            os.close(outbox_fd)

    def _report(self, rank: int, number: int, *events: Event) -> None:
        for event in events:
            self.output.on_event(CommandEvent(rank, number=number, event=event))

    def answer(self, *values: Any) -> None:
        for answers, value in zip(self.answers, values, strict=True):
            answers.put(value)

    def values(self) -> list[Any]:
        with self.client.command():
            results = self.client.request([0, 1], SetVariables()).results()
            return [result.value_of(rank) for rank, result in results.items()]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.client.close()
    for thread in ranks.threads:
        thread.join()
    vars(ranks).clear()  # closes the connections


def test_without_descriptors_nothing_is_sent(ranks: Ranks) -> None:
    with no_descriptor_left(), pytest.raises(OSError, match="open files"):
        ranks.values()
    ranks.answer(2, 2)
    assert ranks.values() == [2, 2]


def test_default_socket_timeout_is_ignored() -> None:
    socket.setdefaulttimeout(10.0)
    try:
        kernel, fd = connect()
        worker = CommandConnection(fd)
        worker.send(Reply(0), [0])
        _, (file,) = kernel.receive()
        os.close(file)
        assert os.get_blocking(kernel.fileno())
        assert os.get_blocking(worker.fileno())
    finally:
        socket.setdefaulttimeout(None)


def test_late_replies_do_not_answer_the_next_command(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    ranks.answer(1, None)
    with monkeypatch.context() as patch:
        patch.setattr(ranks.output, "pump", fails)  # for example, a dashboard's error
        with pytest.raises(ZeroDivisionError):
            ranks.values()
    ranks.answer(2, 2)
    assert ranks.values() == [2, 2]


def test_an_interrupt_while_no_command_runs_does_nothing(ranks: Ranks) -> None:
    """For example, the interrupt comes from a late timer that was to end a command."""
    ranks.answer(1, 1)
    assert ranks.values() == [1, 1]
    ranks.client.interrupt()
    ranks.client.interrupt()
    assert (ranks.client.num_interrupts, ranks.cancelled) == (0, [])


def test_an_interrupt_as_a_command_begins_belongs_to_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def with_one_at_once(request: Callable[[], None]) -> Iterator[None]:
        request()
        yield

    monkeypatch.setattr(client, "interrupts_as_requests", with_one_at_once)
    with pytest.raises(KeyboardInterrupt):
        ranks.values()  # sends nothing
    assert ranks.client.num_interrupts == 1
    monkeypatch.undo()
    ranks.answer(1, 1)
    assert ranks.values() == [1, 1]


def test_a_late_interrupt_kills_no_rank(ranks: Ranks) -> None:
    def interrupt_late() -> None:
        with ranks.client.command():
            ranks.answer(1, 1)
            ranks.client.request([0, 1], SetVariables())
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_late()
    assert (ranks.client.num_interrupts, ranks.cancelled) == (2, [])


def test_the_second_interrupt_of_a_command_kills_the_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_twice() -> None:
        ranks.client.interrupt()
        ranks.client.interrupt()
        monkeypatch.undo()
        ranks.answer(1, 1)

    monkeypatch.setattr(ranks.output, "pump", interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        ranks.values()
    assert (ranks.client.num_interrupts, ranks.cancelled) == (2, [True])


class _Shown:
    """A dashboard that stores its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.readings: list[SlotReading] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        self.readings.extend(readings)

    def close(self) -> None:
        pass


def test_the_rows_of_a_long_command_include_earlier_events(monkeypatch: pytest.MonkeyPatch) -> None:
    of_session, lines, rows = SessionOutput(), _Shown(), _Shown()
    early = [
        Fact(-1, 1.0, name="precision", text="bf16"),
        EpochEnded(0, 1.0, 1, 0.8, 2.0),
        Metric(0, 1.0, step=1, values={"accuracy": 0.5}),
    ]
    printed = LogLines(0, 1.0, lines=("printed",))
    with of_session.shown_by([lines], lambda: [rows]):  # type: ignore[list-item]
        for event in (*early, printed):
            of_session.on_event(event)
        of_session.pump()
        assert (lines.events, rows.events) == ([*early, printed], [])
        late = time.monotonic() + output._LONG_S
        monkeypatch.setattr(output.time, "monotonic", lambda: late)
        of_session.on_event(EpochEnded(0, 2.0, 2, 0.8, 2.0))
    assert rows.events == [*early, EpochEnded(0, 2.0, 2, 0.8, 2.0)]


def test_a_signal_handler_that_outlasts_the_timeout_does_not_prolong_the_wait() -> None:
    """On a busy machine, the handler of an interrupt may take longer than the client waits at a time."""
    of_session = SessionOutput()
    before = signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(0.2))
    limit = Timer(20.0, of_session.wake)
    limit.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        of_session.wait(0.1)
        assert limit.is_alive()
    finally:
        limit.cancel()
        signal.signal(signal.SIGALRM, before)


def test_new_command_hides_old_progress() -> None:
    of_session, shown = SessionOutput(), _Shown()
    idle, begun = SlotReading(0, step=120), SlotReading(1, step=1)
    with of_session.shown_by([shown]):  # type: ignore[list-item]
        of_session.on_event(CommandEvent(1, number=of_session.command.number, event=Started(1)))
        of_session.on_readings([idle, begun])
        of_session.pump()
        assert shown.readings == [begun]


@pytest.mark.parametrize(
    "settings", [{"engine": "processes", "num_nodes": 2}, {"engine": "ray"}, {"num_nodes": "1:4"}]
)
def test_ranks_on_other_machines_are_rejected_before_anything_starts(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="run on this machine") as raised:
        Session(2, **settings)
    for name, value in settings.items():
        assert f"{name}={value!r}" in str(raised.value)

"""Events through a pipe: whole, in order, whatever the sizes and however they are cut."""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.events import Event, Note
from nblaunch.wire.channel import EventReceiver, EventSender


@pytest.fixture
def pipe() -> Iterator[tuple[EventReceiver, EventSender]]:
    reading, writing = os.pipe()
    receiver = EventReceiver(reading)
    yield receiver, EventSender(writing)
    receiver.close()
    os.close(writing)


def receive(receiver: EventReceiver, number: int) -> list[Event]:
    got: list[Event] = []
    while len(got) < number:
        events, is_closed = receiver.receive()
        got += events
        assert not is_closed
    return got


def test_threads_send_events_larger_than_the_pipe(pipe: tuple[EventReceiver, EventSender]) -> None:
    receiver, sender = pipe
    texts = {f"{i} " + "x" * (i * 30_000) for i in range(12)}
    threads = [threading.Thread(target=sender.send, args=(Note(0, 0.0, text),)) for text in texts]
    for thread in threads:
        thread.start()
    assert {event.text for event in receive(receiver, len(texts)) if isinstance(event, Note)} == texts
    for thread in threads:
        thread.join()


def test_the_order_of_one_sender_is_kept(pipe: tuple[EventReceiver, EventSender]) -> None:
    receiver, sender = pipe
    for i in range(200):
        sender.send(Note(0, float(i), ""))
    assert [event.time_s for event in receive(receiver, 200)] == list(range(200))
    assert receiver.receive() == ([], False)


def test_forked_processes_that_send_at_the_same_time_are_senders_of_their_own(
    pipe: tuple[EventReceiver, EventSender],
) -> None:
    receiver, sender = pipe

    def send_many(name: str) -> None:
        for i in range(20):
            sender.send(Note(0, float(i), name * 100_000))

    pids = []
    for name in "abc":
        pid = os.fork()
        if pid == 0:
            sender.become_another()
            send_many(name)
            os._exit(0)
        pids.append(pid)
    own = threading.Thread(target=send_many, args=("d",))
    own.start()
    events = receive(receiver, 80)
    own.join()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    by_sender = {
        name: [event.time_s for event in events if isinstance(event, Note) and event.text == name * 100_000]
        for name in "abcd"
    }
    assert by_sender == {name: list(range(20)) for name in "abcd"}


def test_a_sender_that_is_killed_in_the_middle_of_an_event_cuts_no_other(
    pipe: tuple[EventReceiver, EventSender],
) -> None:
    receiver, sender = pipe
    pid = os.fork()
    if pid == 0:
        sender.become_another()
        sender.send(Note(0, 0.0, "x" * 10_000_000))  # far more than a pipe takes
        os._exit(0)
    select.select([receiver.fd], [], [], 30)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert receiver.receive() == ([], False)
    sender.send(Note(0, 0.0, "whole"))
    assert [event.text for event in receive(receiver, 1) if isinstance(event, Note)] == ["whole"]


def test_nothing_is_written_to_a_file_that_has_got_the_number_of_the_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sender = EventSender(writing)
    os.close(writing)
    with pytest.raises(RuntimeError, match="closerange"):
        sender.send(Note(0, 0.0, ""))
    with (tmp_path / "other").open("wb") as file:
        os.dup2(file.fileno(), writing)
        with pytest.raises(RuntimeError, match="closerange"):
            sender.send(Note(0, 0.0, ""))
        if file.fileno() != writing:
            os.close(writing)
    assert (tmp_path / "other").read_bytes() == b""


@given(st.lists(st.text(max_size=50), max_size=6), st.lists(st.integers(1, 300), min_size=1))
def test_however_the_bytes_are_cut(texts: list[str], cuts: list[int]) -> None:
    reading, writing = os.pipe()
    sender = EventSender(writing)
    for text in texts:
        sender.send(Note(0, 0.0, text))
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        stream = file.read()
    reading, writing = os.pipe()
    receiver, got = EventReceiver(reading), []
    for cut in itertools.cycle(cuts):
        os.write(writing, stream[:cut])
        stream = stream[cut:]
        events, _ = receiver.receive()
        got += events
        if not stream:
            break
    os.close(writing)
    assert receiver.receive() == ([], True)
    receiver.close()
    assert [event.text for event in got] == texts


def test_a_launcher_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    EventSender(writing).send(Note(0, 0.0, "unheard"))
    os.close(writing)

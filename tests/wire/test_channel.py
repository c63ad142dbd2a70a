"""Events through a pipe arrive complete and in order, whatever their sizes and however they are split."""

from __future__ import annotations

import enum
import errno
import itertools
import os
import select
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.events import Displayed, Event, Metric, Note
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


def test_reused_descriptors_are_left_alone(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    sender = EventSender(writing)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        os.dup2(file.fileno(), writing)
        with pytest.raises(OSError, match="closed in this process") as raised:
            sender.send(Note(0, 0.0, ""))
    assert raised.value.errno == errno.EBADF
    assert (tmp_path / "file").read_bytes() == b""
    os.close(reading)
    os.close(writing)


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


def test_forked_processes_send_at_the_same_time(pipe: tuple[EventReceiver, EventSender]) -> None:
    receiver, sender = pipe

    def send_many(name: str) -> None:
        for i in range(20):
            sender.send(Note(0, float(i), name * 100_000))

    pids = []
    for name in "abc":
        pid = os.fork()
        if pid == 0:
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


def test_a_killed_sender_does_not_damage_other_events(
    pipe: tuple[EventReceiver, EventSender],
) -> None:
    receiver, sender = pipe
    pid = os.fork()
    if pid == 0:
        sender.send(Note(0, 0.0, "x" * 10_000_000))  # far more than fits into a pipe
        os._exit(0)
    select.select([receiver.fd], [], [], 30)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert receiver.receive() == ([], False)
    sender.send(Note(0, 0.0, "whole"))
    assert [event.text for event in receive(receiver, 1) if isinstance(event, Note)] == ["whole"]


@contextmanager
def handled(number: signal.Signals, handle: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(number, lambda signum, frame: handle())
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def signalled_in_the_middle_of_an_event(
    receiver: EventReceiver, got: list[Event], num: int
) -> Iterator[None]:
    """Signal the main thread once the pipe is not empty, and only then receive ``num`` events."""

    def signal_and_receive() -> None:
        select.select([receiver.fd], [], [], 30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        got.extend(receive(receiver, num))

    thread = threading.Thread(target=signal_and_receive)
    thread.start()
    yield
    thread.join()


LARGE = "x" * 1_000_000
"""More bytes than fit into a pipe."""


def test_signal_handlers_can_send(
    pipe: tuple[EventReceiver, EventSender],
) -> None:
    receiver, sender = pipe
    got: list[Event] = []
    with (
        handled(signal.SIGUSR1, lambda: sender.send(Note(0, 1.0, "handled"))),
        signalled_in_the_middle_of_an_event(receiver, got, 2),
    ):
        sender.send(Note(0, 0.0, LARGE))
    assert [event.text for event in got if isinstance(event, Note)] == ["handled", LARGE]


def test_raising_signal_handler_loses_only_one_event(
    pipe: tuple[EventReceiver, EventSender],
) -> None:
    receiver, sender = pipe
    got: list[Event] = []
    with (
        handled(signal.SIGUSR1, lambda: sys.exit(1)),
        signalled_in_the_middle_of_an_event(receiver, got, 1),
    ):
        with pytest.raises(SystemExit):
            sender.send(Note(0, 0.0, LARGE))
        sender.send(Note(0, 1.0, "whole"))
    assert [event.text for event in got if isinstance(event, Note)] == ["whole"]


@given(st.lists(st.text(max_size=50), max_size=6), st.lists(st.integers(1, 300), min_size=1))
def test_events_may_arrive_in_any_parts(texts: list[str], cuts: list[int]) -> None:
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


class Level(enum.IntEnum):
    LOW = 1


def test_user_classes_arrive_as_builtin_types(
    pipe: tuple[EventReceiver, EventSender],
) -> None:
    class Local(enum.IntEnum):
        A = 7

    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            raise ValueError

    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    receiver, sender = pipe
    values = {
        "global": Level.LOW, "local": Local.A, "text": Text("ok"), "half": np.float32(0.5), "is": np.bool_(True),
        "tensor": torch.tensor(3), "ordered": OrderedDict(a=[Local.A]), "class": Odd, "odd": Odd(),
    }  # fmt: skip
    sender.send(Metric(0, 0.0, step=np.int64(3), values=values))  # type: ignore[arg-type]
    (event,) = receive(receiver, 1)
    assert isinstance(event, Metric)
    assert repr(event.step) == "3"
    assert repr({**event.values, "class": "", "odd": ""}) == repr(
        {
            "global": 1, "local": 7, "text": "ok", "half": 0.5, "is": True, "tensor": 3, "ordered": {"a": [7]},
            "class": "", "odd": "",
        }
    )  # fmt: skip
    assert {type(event.values[name]) for name in ("class", "odd")} == {str}


def test_unsendable_values_are_named(pipe: tuple[EventReceiver, EventSender]) -> None:
    receiver, sender = pipe
    endless: dict[str, Any] = OrderedDict()
    endless["self"] = endless
    sender.send(Displayed(3, 1.0, data=endless))
    sender.send(Note(3, 2.0, "whole"))
    lost, whole = receive(receiver, 2)
    assert isinstance(lost, Note)
    assert (lost.rank, lost.kind) == (3, "warning")
    assert "'Displayed' (RecursionError: " in lost.text
    assert isinstance(whole, Note)


class Unknown(Note):
    """A class that can be pickled here, but does not exist in the reading process."""


def test_unreadable_event_is_named_and_loses_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    receiver, sender = EventReceiver(reading, "rank 3"), EventSender(writing)
    monkeypatch.setattr("nblaunch.wire.channel._OURS", ("",))
    sender.send(Unknown(3, 0.0, "lost"))
    sender.send(Note(3, 1.0, "whole"))
    monkeypatch.delattr(sys.modules[__name__], "Unknown")
    lost, whole = receive(receiver, 2)
    assert isinstance(lost, Note)
    assert (lost.rank, lost.kind) == (-1, "warning")
    assert lost.text.startswith("an event of rank 3 could not be read and is lost: AttributeError: ")
    assert isinstance(whole, Note)
    assert whole.text == "whole"
    receiver.close()
    os.close(writing)


def test_a_missing_launcher_is_not_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    EventSender(writing).send(Note(0, 0.0, "unheard"))
    os.close(writing)

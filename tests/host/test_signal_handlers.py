"""Signal handlers are held back in a block, and called at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nblaunch.host import signal_handlers
from nblaunch.host.signal_handlers import held_back


class Limit(TimeoutError):
    """An exception that a handler raises."""


calls: list[int] = []


def limit(number: int, frame: object) -> None:
    calls.append(number)
    raise Limit


def note(number: int, frame: object) -> None:
    calls.append(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    calls.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGUSR1)}
    signal.signal(signal.SIGALRM, limit)
    signal.signal(signal.SIGUSR1, note)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_handlers_are_called_at_the_end_of_the_outermost_block() -> None:
    def hold() -> None:
        with held_back():
            with held_back():
                send(signal.SIGUSR1)
                send(signal.SIGALRM)
                send(signal.SIGALRM)
            assert calls == []

    with pytest.raises(Limit):
        hold()
    assert calls == [signal.SIGUSR1, signal.SIGALRM]
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGUSR1)) == (limit, note)
    with pytest.raises(Limit):
        send(signal.SIGALRM)


def test_handlers_run_where_exceptions_are_safe() -> None:
    with held_back():
        send(signal.SIGALRM)
        with pytest.raises(Limit):
            signal_handlers.run_arrived()
        signal_handlers.run_arrived()
    assert calls == [signal.SIGALRM]


def test_taken_signals_call_no_handler() -> None:
    with held_back():
        assert not signal_handlers.take(signal.SIGINT)
        send(signal.SIGINT)
        assert signal_handlers.take(signal.SIGINT)


def test_handlers_set_in_the_block_stay() -> None:
    with held_back():
        signal.signal(signal.SIGALRM, note)
        send(signal.SIGALRM)
        assert calls == [signal.SIGALRM]
    assert signal.getsignal(signal.SIGALRM) is note


def test_a_forked_child_has_the_handlers_of_its_parent() -> None:
    with held_back():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if signal.getsignal(signal.SIGALRM) is limit else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

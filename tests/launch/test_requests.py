"""Requests to a job: counted, never lost, and the interrupt handler put back."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from nblaunch.launch.requests import StopRequests, interrupts_as_requests


def is_readable(requests: StopRequests) -> bool:
    return bool(select.select([requests], [], [], 0)[0])


def test_requests_wake_the_loop_and_are_counted() -> None:
    requests = StopRequests()
    assert not is_readable(requests)
    for _ in range(100_000):  # more than fits in the pipe
        requests.interrupt()
    assert requests.interrupts == 100_000
    while is_readable(requests):
        requests.acknowledge()
    requests.acknowledge()
    requests.cancel()
    assert is_readable(requests)
    requests.close()
    requests.interrupt()  # a click after the end
    requests.cancel()


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN, lambda *_: None])
def test_the_handler_is_put_back_also_after_an_error(handler: object) -> None:
    before = signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    requests = StopRequests()

    def interrupt_and_fail() -> None:
        with interrupts_as_requests(requests):
            os.kill(os.getpid(), signal.SIGINT)
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            interrupt_and_fail()
        assert requests.interrupts == 1
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
        requests.close()


def test_in_another_thread_nothing_changes() -> None:
    requests, seen = StopRequests(), []

    def run() -> None:
        with interrupts_as_requests(requests):
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
    requests.close()

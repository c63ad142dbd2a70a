"""Requests to a job are counted and never lost, and the interrupt handler is restored."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from nblaunch.launcher.requests import JobRequests, interrupts_as_requests


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Make threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def is_readable(requests: JobRequests) -> bool:
    return bool(select.select([requests], [], [], 0)[0])


def test_requests_wake_the_loop_and_are_counted() -> None:
    requests = JobRequests()
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
    requests = JobRequests()

    def interrupt_and_fail() -> None:
        with interrupts_as_requests(requests.interrupt):
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


def test_other_threads_keep_their_handlers() -> None:
    requests, seen = JobRequests(), []

    def run() -> None:
        with interrupts_as_requests(requests.interrupt):
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
    requests.close()


def test_a_wake_byte_never_lands_in_a_reused_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, write, opened = JobRequests(), os.write, []

    def write_late(fd: int, data: bytes) -> int:
        requests.close()  # in another thread, between the check of the pipe and the byte
        opened.append(os.pipe())  # takes the lowest free numbers
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_late)
    requests.interrupt()
    monkeypatch.undo()
    ((reading, writing),) = opened
    os.write(writing, b"the user's")
    assert os.read(reading, 100) == b"the user's"
    os.close(reading)
    os.close(writing)


def test_the_pipe_closes_only_in_its_process() -> None:
    requests = JobRequests()
    fd = requests.fileno()
    pid = os.fork()
    if pid == 0:
        taken = os.dup2(os.open(os.devnull, os.O_RDONLY), fd)  # the child uses the number for another file
        requests.close()
        os._exit(0 if os.fstat(taken) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.fstat(fd)
    requests.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert requests.fileno() == -1


def test_every_query_gets_a_reply() -> None:
    requests = JobRequests()
    assert requests.ask_stacks().result(0) == "no worker of the job is running"
    with requests.answering():
        answered, in_progress, cancelled = (requests.ask_stacks() for _ in range(3))
        assert requests.take_queries() == [answered, in_progress, cancelled]
        waiting = requests.ask_stacks()
        cancelled.cancel()
        requests.answer(answered, "here")
        requests.answer(cancelled, "no caller waits")
        assert not in_progress.done()
    assert answered.result(0) == "here"
    assert in_progress.result(0) == waiting.result(0) == "no worker of the job is running"
    assert requests.ask_stacks().result(0) == "no worker of the job is running"
    requests.close()
    assert requests.ask_stacks().result(0) == "no worker of the job is running"


@pytest.mark.usefixtures("often_switching")
def test_queries_at_the_end_get_a_reply() -> None:
    for _ in range(50):
        requests, queries = JobRequests(), list[Future[str]]()
        is_over = threading.Event()

        def ask(requests: JobRequests, queries: list[Future[str]], is_over: threading.Event) -> None:
            while not is_over.is_set():
                queries.append(requests.ask_stacks())

        threads = [threading.Thread(target=ask, args=(requests, queries, is_over)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            with requests.answering():
                for query in requests.take_queries()[::2]:
                    requests.answer(query, "here")
        requests.close()
        is_over.set()
        for thread in threads:
            thread.join()
        assert all(query.done() for query in queries)


def test_interrupts_of_threads_and_handlers_are_all_counted() -> None:
    requests = JobRequests()
    before = signal.signal(signal.SIGALRM, lambda signum, frame: requests.interrupt())
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        threads = [
            threading.Thread(target=lambda: [requests.interrupt() for _ in range(2000)]) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert requests.interrupts >= 4000
    requests.close()

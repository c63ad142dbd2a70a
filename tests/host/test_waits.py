"""Waits that nothing outside a process can end, in real processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nblaunch.host import proc, waits

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        waits._FUTEX < 0 or not proc.read("/proc/self/syscall"), reason="needs /proc/N/syscall"
    ),
]

ENDLESS = {
    "an event": "threading.Event().wait()",
    "a queue": "queue.Queue().get()",
    "a queue in C": "queue.SimpleQueue().get()",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a thread that waits": "t = threading.Thread(target=threading.Event().wait); t.start(); t.join()",
    "a task": "concurrent.futures.Future().result()",
}
ENDED_BY_OTHERS = {
    "an event with a deadline": "threading.Event().wait(1000)",
    "a clock": "time.sleep(1000)",
    "a pipe": "os.read(os.pipe()[0], 1)",
    "a lock between processes": "multiprocessing.Semaphore(0).acquire()",
    "an event between processes": "multiprocessing.Event().wait()",
    "a queue between processes": "multiprocessing.Queue().get()",
    "a socket": "socket.socketpair()[0].recv(1)",
    "a process": "os.waitpid(subprocess.Popen('cat', stdin=subprocess.PIPE).pid, 0)",
    "a selector": "import selectors; selectors.DefaultSelector().select()",
    "a signal": "signal.signal(signal.SIGALRM, print); threading.Event().wait()",
    "an event loop": "asyncio.run(asyncio.sleep(1000))",
}
ELSEWHERE = {
    "a thread that sleeps": "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "a thread that reads": "threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start()",
}
"""Another thread can continue, and may then end the main thread's wait."""


@contextmanager
def process(body: str) -> Iterator[int]:
    """Run a program that is about to wait; yield its process id."""
    code = (
        "import asyncio, concurrent.futures, multiprocessing, os, queue, signal, socket, subprocess, threading, time\n"
        "def wait():\n"
        "    print('ready', flush=True)\n"
        f"    {body}\n"
        "wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            yield started.pid
        finally:
            started.kill()


def sleeps(pid: int) -> str:
    return waits._num_sleeps(f"/proc/{pid}/task/{pid}")


@pytest.mark.parametrize("body", ENDLESS.values(), ids=ENDLESS.keys())
def test_waits_for_own_threads_are_endless(body: str) -> None:
    with process(body) as pid:
        while (found := waits.endless_waits(pid)) is None or not found.are_endless:
            time.sleep(0.01)
        assert found.main[0] == pid


@pytest.mark.parametrize("body", ENDED_BY_OTHERS.values(), ids=ENDED_BY_OTHERS.keys())
def test_waits_for_other_processes_are_not_endless(body: str) -> None:
    with process(body) as pid:
        seen = []
        while len(seen) < 20 or len(set(seen[-10:])) > 1:  # wait until it sleeps, and keeps sleeping
            seen.append(sleeps(pid))
            assert waits.endless_waits(pid) is None
            time.sleep(0.01)


@pytest.mark.parametrize("body", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_waits_with_a_running_thread_are_not_endless(body: str) -> None:
    with process(f"{body}; threading.Event().wait()") as pid:
        while (found := waits.endless_waits(pid)) is None:
            time.sleep(0.01)
        while found is None or found.others is not None:  # wait until that thread has begun its own wait
            found = waits.endless_waits(pid)
        assert not found.are_endless


def test_ended_processes_have_no_waits() -> None:
    with process("pass") as pid:
        pass
    assert waits.endless_waits(pid) is None


@pytest.mark.parametrize("is_shared", [False, True])
def test_full_pipe_of_the_caller_is_recognised(is_shared: bool) -> None:
    reading, writing = os.pipe()
    fd = writing if is_shared else "os.pipe()[1]"
    code = f"import os; os.write({fd}, bytes(1 << 20))"
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[writing] if is_shared else []) as writer:
        try:
            assert_waits_for(writer.pid, is_shared)
        finally:
            writer.kill()
            os.close(reading)
            os.close(writing)


@pytest.mark.parametrize("is_shared", [False, True])
def test_semaphore_of_the_caller_is_recognised(is_shared: bool) -> None:
    context = multiprocessing.get_context("fork")
    semaphore = context.Semaphore(0)

    def wait() -> None:
        (semaphore if is_shared else context.Semaphore(0)).acquire()

    process = context.Process(target=wait)
    process.start()
    try:
        assert process.pid is not None
        assert_waits_for(process.pid, is_shared)
    finally:
        process.kill()
        process.join()


def assert_waits_for(pid: int, is_shared: bool) -> None:
    while waits.wait_for_others(pid) is None:
        time.sleep(0.01)
    assert waits.has_awaited_object(pid) is is_shared

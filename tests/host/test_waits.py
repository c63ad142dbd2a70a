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
    "beside a pipe of its own": "in_thread(os.read, os.pipe()[0], 1); threading.Event().wait()",
    "beside an event loop": ("in_thread(asyncio.new_event_loop().run_forever); threading.Event().wait()"),
    "beside a loop that counts events": (
        "poll = select.epoll(); poll.register(os.eventfd(0), select.EPOLLIN); in_thread(poll.poll); "
        "threading.Event().wait()"
    ),
    "beside a pool": (
        "import multiprocessing.pool; multiprocessing.pool.ThreadPool(2).apply(threading.Event().wait)"
    ),
    "beside an idle thread that serves": "in_thread(serve); threading.Event().wait()",
}
ENDED_BY_OTHERS = {
    "an event with a deadline": "threading.Event().wait(1000)",
    "a clock": "time.sleep(1000)",
    "a pipe": "os.read(os.pipe()[0], 1)",
    "a lock between processes": "multiprocessing.Semaphore(0).acquire()",
    "an event between processes": "multiprocessing.Event().wait()",
    "a queue between processes": "multiprocessing.Queue().get()",
    "a socket": "pair = socket.socketpair(); pair[0].recv(1)",
    "a process": "os.waitpid(subprocess.Popen('cat', stdin=subprocess.PIPE).pid, 0)",
    "a selector": "import selectors; selectors.DefaultSelector().select()",
    "a signal": "signal.signal(signal.SIGALRM, print); threading.Event().wait()",
    "an event loop": "asyncio.run(asyncio.sleep(1000))",
}
ELSEWHERE = {
    "a thread that sleeps": "in_thread(time.sleep, 1000)",
    "a thread with a deadline": "in_thread(threading.Event().wait, 1000)",
    "a thread that reads a child's pipe": (
        "in_thread(subprocess.Popen('cat', stdin=subprocess.PIPE, stdout=subprocess.PIPE).stdout.read)"
    ),
    "a thread that reads a pipe that a child has as well": (
        "pipe = os.pipe(); child = subprocess.Popen('cat', stdin=subprocess.PIPE, pass_fds=pipe); "
        "in_thread(os.read, pipe[0], 1)"
    ),
    "a process pool": "pool = multiprocessing.Pool(1)",
    "a thread that polls pipes and a server": (
        "server = socket.create_server(('127.0.0.1', 0)); poll = select.poll(); poll.register(os.pipe()[0]); "
        "poll.register(server, select.POLLIN); in_thread(poll.poll)"
    ),
    "a thread that polls a pipe with a deadline": (
        "poll = select.poll(); poll.register(os.pipe()[0]); in_thread(poll.poll, 10**6)"
    ),
    "a thread that reads a socket": "pair = socket.socketpair(); in_thread(pair[0].recv, 1)",
    "an event loop with a timer": "in_thread(asyncio.run, asyncio.sleep(1000))",
    "an event loop that serves": (
        "server = socket.create_server(('127.0.0.1', 0)); poll = select.epoll(); poll.register(server); "
        "in_thread(poll.poll)"
    ),
    "a loop whose counter a child has as well": (
        "counter = os.eventfd(0); poll = select.epoll(); poll.register(counter, select.EPOLLIN); "
        "child = subprocess.Popen('cat', stdin=subprocess.PIPE, pass_fds=[counter]); in_thread(poll.poll)"
    ),
    "a loop whose socket a child can reach": (
        "pair = socket.socketpair(); poll = select.epoll(); poll.register(pair[0], select.EPOLLIN); "
        "child = subprocess.Popen('cat', stdin=subprocess.PIPE, pass_fds=[pair[1].fileno()]); in_thread(poll.poll)"
    ),
    "a thread that serves": "in_thread(serve, time.sleep)",
}
"""Another thread can continue, and may then end the main thread's wait."""


@contextmanager
def process(body: str) -> Iterator[int]:
    """Run a program that is about to wait; yield its process id."""
    code = (
        "import asyncio, concurrent.futures, multiprocessing, os, queue, select, signal, socket, subprocess\n"
        "import threading, time\n"
        "from nblaunch.host import waits\n"
        "def in_thread(function, *args, **kwargs):\n"
        "    threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True).start()\n"
        "def serve(wait=threading.Event().wait):\n"
        "    waits.name_as_clock('tensorboard')\n"
        "    wait(1000)\n"
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


def sleeps(pid: int, thread: int | None = None) -> str:
    return waits._num_sleeps(f"/proc/{pid}/task/{thread or pid}")


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
        seen: list[list[str]] = []
        while len(seen) < 20 or any(
            names != seen[-1] for names in seen[-10:]
        ):  # until all threads keep sleeping
            seen.append([sleeps(pid, int(name)) for name in os.listdir(f"/proc/{pid}/task")])
            found = waits.endless_waits(pid)
            assert found is None or not found.are_endless
            time.sleep(0.01)
        assert len(seen[-1]) > 1
        assert found is not None


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

"""Locks between workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from nblaunch.wire.board import create_memory_file
from nblaunch.wire.locks import MAX_HOLDERS, WorkerLocks


def _hold(fd: int, rank: int, is_exclusive: bool = False) -> tuple[int, int, int]:
    """Fork a child that reports when it holds a lock, and releases it on request; return its pid and both pipes."""
    entered, entering = os.pipe()
    leave, leaving = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(leaving)
        locks = WorkerLocks(fd, rank)
        with locks.lock() if is_exclusive else locks.semaphore():
            os.write(entering, b"in")
            os.read(leave, 1)
        os._exit(0)
    os.close(entering)
    os.close(leave)
    return pid, entered, leaving


def _end(held: tuple[int, int, int]) -> None:
    """Make a child release its lock, if it is still running, and wait for its end."""
    pid, entered, leaving = held
    with contextlib.suppress(BrokenPipeError):
        os.write(leaving, b"x")
    os.waitpid(pid, 0)
    os.close(entered)
    os.close(leaving)


def _waits_for_a_lock(pid: int) -> bool:
    return f" {pid} " in "".join(
        line for line in Path("/proc/locks").read_text().splitlines(True) if "->" in line
    )


def _wait_until_blocked(pid: int) -> None:
    deadline = time.monotonic() + 120
    while not _waits_for_a_lock(pid):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_every_second_rank_waits_and_others_do_not() -> None:
    fd = create_memory_file("locks")
    first = _hold(fd, 0)
    assert os.read(first[1], 2) == b"in"
    second = _hold(fd, MAX_HOLDERS)
    other = _hold(fd, 1)
    assert os.read(other[1], 2) == b"in"
    _wait_until_blocked(second[0])
    _end(first)
    assert os.read(second[1], 2) == b"in"
    _end(second)
    _end(other)
    os.close(fd)


def test_a_process_killed_inside_does_not_block_others() -> None:
    fd = create_memory_file("locks")
    first = _hold(fd, 0)
    assert os.read(first[1], 2) == b"in"
    second = _hold(fd, MAX_HOLDERS)
    _wait_until_blocked(second[0])
    os.kill(first[0], signal.SIGKILL)
    assert os.read(second[1], 2) == b"in"
    _end(first)
    _end(second)
    os.close(fd)


def test_exclusive_blocks_do_not_block_turns() -> None:
    fd = create_memory_file("locks")
    first = _hold(fd, 0, is_exclusive=True)
    other, same = _hold(fd, 1), _hold(fd, 0)
    try:
        assert os.read(first[1], 2) == os.read(other[1], 2) == os.read(same[1], 2) == b"in"
        second = _hold(fd, 1, is_exclusive=True)
        _wait_until_blocked(second[0])
        _end(first)
        assert os.read(second[1], 2) == b"in"
        _end(second)
    finally:
        _end(other)
        _end(same)
        os.close(fd)

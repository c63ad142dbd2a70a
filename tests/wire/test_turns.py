"""Turns that processes take."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from nblaunch.wire import turns
from nblaunch.wire.board import create_memory_file

pytestmark = pytest.mark.timeout(30)


def _hold(fd: int, rank: int, is_alone: bool = False) -> tuple[int, int, int]:
    """A child that says when it is in its turn, and leaves it when told to: its pid, and both pipes."""
    said, saying = os.pipe()
    hearing, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        with turns.turn(fd, rank, is_alone):
            os.write(saying, b"in")
            os.read(hearing, 1)
        os._exit(0)
    os.close(saying)
    os.close(hearing)
    return pid, said, tell


def _end(held: tuple[int, int, int]) -> None:
    """Tell a child to leave its turn, if it can still hear it, and wait for its end."""
    pid, said, tell = held
    with contextlib.suppress(BrokenPipeError):
        os.write(tell, b"x")
    os.waitpid(pid, 0)
    os.close(said)
    os.close(tell)


def _waits_for_a_lock(pid: int) -> bool:
    return f" {pid} " in "".join(
        line for line in Path("/proc/locks").read_text().splitlines(True) if "->" in line
    )


def _wait_until_blocked(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not _waits_for_a_lock(pid):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_ranks_of_one_lane_take_turns_and_others_do_not_wait() -> None:
    fd = create_memory_file("turns")
    first = _hold(fd, 0)
    assert os.read(first[1], 2) == b"in"
    second = _hold(fd, turns.NUM_LANES)
    other_lane = _hold(fd, 1)
    assert os.read(other_lane[1], 2) == b"in"
    _wait_until_blocked(second[0])
    _end(first)
    assert os.read(second[1], 2) == b"in"
    _end(second)
    _end(other_lane)
    os.close(fd)


def test_a_process_that_is_killed_in_its_turn_holds_nobody_up() -> None:
    fd = create_memory_file("turns")
    first = _hold(fd, 0)
    assert os.read(first[1], 2) == b"in"
    second = _hold(fd, turns.NUM_LANES)
    _wait_until_blocked(second[0])
    os.kill(first[0], signal.SIGKILL)
    assert os.read(second[1], 2) == b"in"
    _end(first)
    _end(second)
    os.close(fd)


def test_blocks_for_one_at_a_time_exclude_each_other_and_no_turn() -> None:
    fd = create_memory_file("turns")
    first = _hold(fd, 0, is_alone=True)
    other_lane, same_lane = _hold(fd, 1), _hold(fd, 0)
    try:
        assert os.read(first[1], 2) == os.read(other_lane[1], 2) == os.read(same_lane[1], 2) == b"in"
        second = _hold(fd, 1, is_alone=True)
        _wait_until_blocked(second[0])
        _end(first)
        assert os.read(second[1], 2) == b"in"
        _end(second)
    finally:
        _end(other_lane)
        _end(same_lane)
        os.close(fd)


def test_the_turn_to_build_is_had_by_one_and_freed_by_its_end() -> None:
    fd = create_memory_file("turns")
    said, saying = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(saying, b"1" if turns.take_building_turn(fd, 0) else b"0")
        signal.pause()
        os._exit(0)
    assert os.read(said, 1) == b"1"
    assert not turns.take_building_turn(fd, 0), "another one has it, and patience is over"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert turns.take_building_turn(fd, 10)
    turns.end_building_turn(fd)
    for one in (fd, said, saying):
        os.close(one)

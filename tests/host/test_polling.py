"""Waiting for descriptors: also for those with numbers that ``select.select`` refuses."""

import contextlib
import fcntl
import os
import resource
import time
from collections.abc import Iterator

import pytest

from nblaunch.host.descriptors import is_writable, wait_until_readable

_BEYOND_SELECT = 1100


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose ends have high numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _BEYOND_SELECT), hard))
    low = os.pipe()
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _BEYOND_SELECT) for fd in low]
    for fd in low:
        os.close(fd)
    try:
        yield ends[0], ends[1]
    finally:
        for fd in ends:
            with contextlib.suppress(OSError):  # a test has closed it
                os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _waited_s(fds: list[int], timeout_s: float) -> float:
    began_s = time.monotonic()
    wait_until_readable(fds, timeout_s)
    return time.monotonic() - began_s


def test_waits_until_there_is_something_to_read(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    assert reading >= _BEYOND_SELECT
    assert _waited_s([reading], 0.05) >= 0.045
    os.write(writing, b"x")
    wait_until_readable([reading])  # for as long as it takes: the test's own limit is the bound


def test_an_end_that_was_closed_ends_the_wait(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(writing)
    wait_until_readable([reading])


def test_waits_out_the_time_where_there_is_nothing_to_wait_for() -> None:
    assert _waited_s([], 0.05) >= 0.045


def test_a_full_pipe_is_not_writable(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    assert is_writable(writing)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(65536)):
            pass
    assert not is_writable(writing)

"""Whether descriptors are writable, including numbers that ``select.select`` rejects."""

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from nblaunch.host.descriptors import is_writable

_BEYOND_SELECT = 1100


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe whose ends have high numbers."""
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
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_pipe_is_not_writable(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    assert is_writable(writing)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(65536)):
            pass
    assert not is_writable(writing)

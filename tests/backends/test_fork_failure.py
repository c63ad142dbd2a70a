"""The throw-away child process that tries a backward."""

from __future__ import annotations

import os
import resource
import signal
import threading

import pytest

from nblaunch.backends import first_use


def _raise() -> None:
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


def test_a_working_backward_is_not_a_failure() -> None:
    import torch

    torch.ones((), requires_grad=True).backward()
    assert first_use.fork_failure(first_use.small_backward) is None


def test_the_childs_error_comes_back_as_text(capfd: pytest.CaptureFixture[str]) -> None:
    failure = first_use.fork_failure(_raise)
    assert failure is not None
    assert failure.startswith("RuntimeError: Unable to handle autograd's threading")
    assert capfd.readouterr() == ("", "")


def test_a_child_that_dies_is_a_failure() -> None:
    failure = first_use.fork_failure(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert failure == "a forked process died in backward()"


def test_a_child_that_hangs_is_killed() -> None:
    failure = first_use.fork_failure(lambda: threading.Event().wait() and None, timeout_s=0.2)
    assert failure == "backward() did not finish within 0.2 s in a forked process"


def test_a_process_with_many_open_files() -> None:
    """Some ways of waiting for a descriptor fail above 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip(f"no more than {limits[1]} files may be open here")
    if limits[0] != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    try:
        assert first_use.fork_failure(lambda: None) is None
        assert first_use.fork_failure(_raise) is not None
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

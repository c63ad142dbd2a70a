"""The check after every test must find all kinds of remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import left_behind
from tests.left_behind import Snapshot

WAIT_FOR_EVER = "import signal; signal.pause()"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_nothing_is_found_if_nothing_is_left() -> None:
    before = Snapshot.take()
    assert left_behind.find(before) == []


@linux_only
def test_the_pipe_of_multiprocessings_tracker_is_process_wide() -> None:
    script = """
from multiprocessing import resource_tracker
from tests import left_behind
before = left_behind.Snapshot.take()
resource_tracker.ensure_running()
# The process itself may have no command line yet.
print([line for line in left_behind.find(before, grace_s=0) if line.startswith("file descriptor")])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


@linux_only
def test_a_child_is_found_and_ended() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "wb") as writer:
        before = Snapshot.take()
        program = f"print('here', flush=True); {WAIT_FOR_EVER}"
        with subprocess.Popen([sys.executable, "-c", program], stdout=writer) as child:
            try:
                # Popen may return while the system still starts the program, whose command line is empty until then.
                assert reader.readline() == b"here\n"
                (line,) = left_behind.find(before, grace_s=0)
            finally:
                left_behind.kill_processes(before)
            assert line.startswith(f"process {child.pid}: ")
            assert WAIT_FOR_EVER in line
            assert child.wait(10) == -9


@linux_only
def test_an_orphaned_grandchild_in_a_posix_session_of_its_own_is_found() -> None:
    before = Snapshot.take()
    parent = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {WAIT_FOR_EVER!r}], start_new_session=True,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    run = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=30, check=True
    )
    (line,) = left_behind.find(before, grace_s=0)
    assert line.startswith(f"process {int(run.stdout)}: ")
    left_behind.kill_processes(before)
    assert left_behind.find(before) == []


@linux_only
def test_an_open_file_is_found(tmp_path: Path) -> None:
    before = Snapshot.take()
    fd = os.open(tmp_path / "left.txt", os.O_CREAT | os.O_WRONLY)
    try:
        assert left_behind.find(before, grace_s=0) == [f"file descriptor {fd}: {tmp_path / 'left.txt'}"]
    finally:
        os.close(fd)


def test_a_thread_is_found_unless_it_ends_in_time() -> None:
    before = Snapshot.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(30,), name="left over")
    thread.start()
    (line,) = left_behind.find(before, grace_s=0)
    assert line.startswith("thread 'left over'")
    release.set()
    assert left_behind.find(before) == []


def test_inherited_ignored_or_blocked_signal_is_found() -> None:
    before = Snapshot.take()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        assert left_behind.find(before, grace_s=0) == ["signal SIGINT: ignored", "signal SIGTERM: blocked"]
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert left_behind.find(before) == []

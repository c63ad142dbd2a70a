"""Requesting workers' stacks, and parsing them."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch import packages
from nblaunch.diagnosis.stacks import Position, StackDump, StackFrame, describe, parse, position_of
from nblaunch.wire.assignment import STACKS_SIGNAL
from nblaunch.worker import collective_hooks

_WORKER = """
import ctypes, sys
from nblaunch.worker import process_control

def compute():
    print("ready", flush=True)
    while True:
        sum(range(1000))

def wait_in_native_code():
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    library.pthread_mutex_lock(mutex)  # for ever, with the GIL

process_control.watch_faults(sys.argv[1])
globals()[sys.argv[2]]()
"""


@contextmanager
def _worker(path: Path, function: str) -> Iterator[int]:
    command = [sys.executable, "-c", _WORKER, str(path), function]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def test_running_python_writes_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with _worker(path, "compute") as pid:
        os.kill(pid, STACKS_SIGNAL)
        while "in <module>" not in path.read_text():  # the outermost frame, which comes last
            time.sleep(0.01)
    (thread,) = parse(path.read_text())
    assert thread.frames[0].filename.endswith("nblaunch/worker/process_control.py")
    assert [frame.name for frame in thread.frames[1:]] == ["compute", "<module>"]


def test_blocked_native_code_writes_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with _worker(path, "wait_in_native_code") as pid:
        while (
            psutil.Process(pid).status() != psutil.STATUS_SLEEPING
        ):  # it reports that it is ready before it waits
            time.sleep(0.001)
        dump = StackDump({3: pid}, {3: path})
        while not dump.is_done:
            dump.poll()
    assert "wait_in_native_code" in dump.positions()[3].where


def test_a_real_dump_of_two_threads(tmp_path: Path) -> None:
    ready, go = threading.Event(), threading.Event()

    def wait_here() -> None:
        ready.set()
        go.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    ready.wait(180)
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = parse(file.read())
    go.set()
    thread.join(180)
    (current,) = (thread for thread in threads if thread.is_current)
    assert current.frames[0].name == "test_a_real_dump_of_two_threads"
    assert current.frames[0].filename == __file__
    assert any(
        frame.name == "wait_here" for other in threads if not other.is_current for frame in other.frames
    )


def test_the_stack_of_a_real_crash() -> None:
    program = (
        "import faulthandler, os, signal; faulthandler.enable()\n"
        "def crash(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "crash()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == -11
    (thread,) = parse(ended.stderr)
    assert thread.is_current
    assert [frame.name for frame in thread.frames] == ["crash", "<module>"]


def test_names_of_threads_and_unknown_lines_are_understood() -> None:
    text = (
        "Thread 0x00007f1 [worker] (most recent call first):\n"
        '  File "a b.py", line ??? in f\n'
        "  <no Python frame>\n"
        "Current thread 0x00007f2 [main] (most recent call first):\n"
        '  File "c.py", line 3 in <lambda>\n'
        "\nExtension modules: torch._C (total: 1)\n"
    )
    first, second = parse(text)
    assert (first.is_current, first.frames) == (False, (StackFrame("a b.py", 0, "f"),))
    assert (second.is_current, second.frames) == (True, (StackFrame("c.py", 3, "<lambda>"),))


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    assert all(thread.frames == () for thread in parse(text)) or "File" in text


def test_a_wait_of_a_work_waits_for_ranks() -> None:
    """The hook on ``Work.wait`` is the only Python frame between the user's line and torch's C++ code."""
    hook = f"{collective_hooks.__file__}{packages.UNCOUNTED}"
    position = position_of(
        f'Current thread 0x01 (most recent call first):\n  File "{hook}", line 5 in wait_and_record\n'
        '  File "/home/me/train.py", line 7 in train\n'
    )
    assert position is not None
    assert position.waiting_in == "Work.wait"


def test_frames_are_described_with_their_source(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("first\n    while not ready:\n")
    described = describe(
        [
            StackFrame(str(file), 2, "train"),
            StackFrame(str(file), 9, "main"),
            StackFrame("<frozen runpy>", 1, "run"),
        ]
    )
    assert described == [f"{file}, line 2 in train: while not ready:", f"{file}, line 9 in main"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("cell 5, line 9 in train: x = 1", "cell 5, line 9"),
        ("/home/me/project/train.py, line 14 in train", "train.py, line 14"),
        ("the function has returned, and it is sent: /home/me/train.py, line 3 in f",
         "the function has returned, and it is sent: train.py, line 3"),
    ],
)  # fmt: skip
def test_a_place_is_short_and_keeps_its_line(where: str, expected: str) -> None:
    assert Position(where).place == expected

"""Finding the descendants of a process, and nothing else."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from nblaunch.host import descendants
from nblaunch.host.descendants import Descendants

LIMIT_S = 180.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tags are a matter of Linux")

# Becomes a worker in the relevant respects, and starts a sleeper in a separate POSIX session with its own environment.
WORKER = """
import subprocess, sys, time
from nblaunch.host import descendants
for tag in sys.argv[1:]:
    descendants.carry(int(tag))
child = subprocess.Popen(["/bin/sleep", "100"], start_new_session=True, env={}, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


@pytest.fixture
def other() -> Iterator[psutil.Process]:
    """Start a similar process without a tag."""
    process = subprocess.Popen(["/bin/sleep", "100"], start_new_session=True)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def orphan(*tags: int) -> psutil.Process:
    """Start a sleeper whose parent carried the tags, one after the other, and has ended."""
    command = [sys.executable, "-c", WORKER, *map(str, tags)]
    return psutil.Process(int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


@pytest.mark.parametrize("is_short", [True, False])
def test_an_orphan_ends_and_is_named(
    is_short: bool, other: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descendants, "_SHORT_S", 1000.0 if is_short else 0.0)
    job = Descendants()
    sleeper = orphan(job.tag)
    assert job.end(groups=[]) == [f"sleep (pid {sleeper.pid})"]
    assert psutil.wait_procs([sleeper], LIMIT_S)[1] == []
    assert job.end(groups=[]) == []
    assert other.is_running()


def test_descendants_are_found_after_process_ids_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([1 << 30, 5, 5, 5, 5])
    monkeypatch.setattr(descendants, "_newest_pid", lambda: next(numbers))
    monkeypatch.setattr(descendants, "_SHORT_S", 1000.0)
    job = Descendants()
    sleeper = orphan(job.tag)
    assert job.end(groups=[]) == [f"sleep (pid {sleeper.pid})"]


def test_a_short_job_without_descendants_lists_no_processes(
    other: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descendants, "_SHORT_S", 1000.0)
    newest = iter([other.pid - 1, other.pid])
    monkeypatch.setattr(descendants, "_newest_pid", lambda: next(newest))
    job, lists = Descendants(), list[str]()
    monkeypatch.setattr(descendants.os, "listdir", lambda path: lists.append(path) or [])
    assert job.end(groups=[]) == []
    assert lists == []
    assert other.is_running()


def test_a_short_job_reads_no_older_processes(other: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_SHORT_S", 1000.0)
    # Pretend that process ids have wrapped around: the older process has a higher id than any process of the job.
    monkeypatch.setattr(descendants, "_newest_pid", lambda: other.pid - 1)
    job, read = Descendants(), list[str]()
    monkeypatch.setattr(descendants.proc, "read_bytes", lambda path: read.append(path) or b"")
    assert job.end(groups=[]) == []
    assert read == []


def test_processes_killed_with_their_group_are_not_named() -> None:
    job = Descendants()
    sleeper = orphan(job.tag)
    assert job.end(groups=[os.getpgid(sleeper.pid)]) == []
    assert psutil.wait_procs([sleeper], LIMIT_S)[1] == []


def test_inner_job_tag_replaces_the_outer() -> None:
    outer, inner = Descendants(), Descendants()
    sleeper = orphan(outer.tag, inner.tag)
    assert outer.end(groups=[]) == []
    assert inner.end(groups=[]) == [f"sleep (pid {sleeper.pid})"]


def test_an_effective_limit_is_kept() -> None:
    tag = Descendants().tag
    pid = os.fork()
    if pid == 0:
        _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        resource.setrlimit(resource.RLIMIT_RTTIME, (1_000_000, hard))
        descendants.carry(tag)
        os._exit(resource.getrlimit(resource.RLIMIT_RTTIME)[0] != 1_000_000)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

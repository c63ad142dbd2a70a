"""The process that ends workers when their launcher is gone, and the processes that it must not touch."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nblaunch import notebook_launcher
from nblaunch.launcher.guardian import Guardian

LIMIT_S = 180.0

LAUNCHER = """
import sys, time
from nblaunch.host.descendants import Descendants
from nblaunch.launcher.guardian import Guardian
reaped, running, late = map(int, sys.argv[1:])
guardian = Guardian([reaped, running], Descendants().tag)
guardian.start()
guardian.watch_only([running, late])
print("watching", flush=True)
time.sleep(100)
"""


def test_groups_whose_leader_was_reaped_are_left_alone() -> None:
    """Another process may have such a number by then; here, one has had it from the beginning."""
    groups = [subprocess.Popen(["/bin/sleep", "100"], start_new_session=True) for _ in range(3)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *(str(group.pid) for group in groups)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "watching\n"
        [guardian] = psutil.Process(launcher.pid).children()
        launcher.kill()
        assert [group.wait(LIMIT_S) for group in groups[1:]] == [-9, -9]
        psutil.wait_procs([guardian], LIMIT_S)
        assert groups[0].poll() is None
    finally:
        for process in [launcher, *groups]:
            process.kill()
            process.wait()
        assert launcher.stdout is not None
        launcher.stdout.close()


SCRIPT = """
import os, signal, sys, time
from nblaunch import notebook_launcher

def report():
    print("at work", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    job = notebook_launcher(report, num_processes=2, backend="cpu", background=True, dashboard="none",
                            start_method=sys.argv[1])
    print(job.logs and job.log_dir, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_log_reports_the_launchers_end(tmp_path: Path, method: str, signum: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        process = psutil.Process(launcher.pid)
        limit_s = time.monotonic() + LIMIT_S
        while not any("guardian" in " ".join(child.cmdline()) for child in process.children()):
            assert time.monotonic() < limit_s, "no guardian has started"
        family = process.children(recursive=True)
        launcher.send_signal(signum)
    _, alive = psutil.wait_procs(family, LIMIT_S)
    assert not alive
    [log] = folder.rglob("rank_0.log")
    assert f"process {launcher.pid}, which launched this job, has ended" in log.read_text()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ended_ranks_are_not_watched(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[set[int]] = []
    watch_only = Guardian.watch_only

    def spy(guardian: Guardian, groups: Any) -> None:
        watched.append(set(groups))
        watch_only(guardian, groups)

    monkeypatch.setattr(Guardian, "watch_only", spy)
    pids = notebook_launcher(os.getpid, (), 2, return_all=True, start_method=method, dashboard="none")
    assert all(any(pid in groups for groups in watched) for pid in pids)
    assert not watched[-1].intersection(pids)


def test_concurrent_forks_do_not_delay_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a worker of another job: the first job would wait until the second has ended."""
    open_pipe, num_pipes = os.pipe, itertools.count(1)
    is_in_popen, has_forked = threading.Event(), threading.Event()

    def open_pipe_slowly() -> tuple[int, int]:
        ends = open_pipe()
        if next(num_pipes) == 2:  # the first pipe belongs to the guardian
            is_in_popen.set()
            has_forked.wait(0.2)
        return ends

    monkeypatch.setattr(os, "pipe", open_pipe_slowly)
    guardian = Guardian([], tag=1)
    starting = threading.Thread(target=guardian.start)
    starting.start()
    assert is_in_popen.wait(LIMIT_S)
    if (pid := os.fork()) == 0:
        signal.pause()
        os._exit(0)
    has_forked.set()
    try:
        starting.join(LIMIT_S / 3)
        assert guardian.is_started
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        starting.join()
        guardian.dismiss()


def test_kernel_variables_do_not_affect_the_guardian(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LARGE", "x" * 200_000)
    before = psutil.Process().children()
    guardian = Guardian([], 0)
    guardian.start()
    try:
        [process] = set(psutil.Process().children()) - set(before)
        # For a moment after exec, the system does not show the new program's variables.
        while not (environment := process.environ()):
            time.sleep(0.001)
    finally:
        guardian.dismiss()
    assert "LARGE" not in environment
    assert "PATH" in environment

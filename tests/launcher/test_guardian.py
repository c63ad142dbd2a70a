"""The process that ends workers when their launcher is gone, and what it must leave alone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from nblaunch import notebook_launcher
from nblaunch.launcher.guardian import Guardian

LIMIT_S = 30.0

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


@pytest.mark.timeout(60)
def test_groups_whose_leader_was_reaped_are_left_alone() -> None:
    """Another process may have such a number by now; here one that has it all along stands for it."""
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_rank_that_has_ended_is_watched(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[set[int]] = []
    watch_only = Guardian.watch_only

    def spy(guardian: Guardian, groups: Any) -> None:
        watched.append(set(groups))
        watch_only(guardian, groups)

    monkeypatch.setattr(Guardian, "watch_only", spy)
    pids = notebook_launcher(os.getpid, (), 2, return_all=True, start_method=method, dashboard="none")
    assert all(any(pid in groups for groups in watched) for pid in pids)
    assert not watched[-1].intersection(pids)

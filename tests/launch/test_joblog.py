"""Folders of log files: private, pruned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nblaunch.errors import LaunchError
from nblaunch.launch import joblog
from nblaunch.launch.joblog import JobLog


@pytest.fixture
def keep_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", "3")


def test_foreign_files_and_jobs_of_living_kernels_are_not_pruned(tmp_path: Path, keep_three: None) -> None:
    kept = ["notes.txt", "20200101-000000-1-1", "20200101-000000-x-1", "20200101-000000"]  # pid 1 lives
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for name in (*kept, f"20200102-000000-{pid}-1", f"20200102-000000-{pid}-2"):
        (tmp_path / name).mkdir()
    logs = [JobLog(str(tmp_path)) for _ in range(4)]
    for log in logs:
        log.prune()
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= set(kept)
    assert not any(f"-{pid}-" in name for name in names)
    assert [log.path.exists() for log in logs][-2:] == [True, True]


def test_a_job_that_runs_keeps_its_logs(tmp_path: Path, keep_three: None) -> None:
    running, *ended = [JobLog(str(tmp_path)) for _ in range(6)]
    for log in ended:
        log.end()
    ended[-1].prune()
    assert [log.path.exists() for log in ended] == [False, False, True, True, True]
    assert running.path.exists()
    running.end()
    ended[-1].prune()
    assert not running.path.exists()


def test_jobs_that_are_over_at_once_do_not_pile_up(tmp_path: Path, keep_three: None) -> None:
    for _ in range(70):
        JobLog(str(tmp_path)).end()
        assert len(list(tmp_path.iterdir())) < 3 + 20


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder has a name that others can guess, in a place where others can write."""
    monkeypatch.delenv("NBLAUNCH_LOG_DIR", raising=False)
    monkeypatch.setattr(joblog.tempfile, "gettempdir", lambda: str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"nblaunch-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(LaunchError, match="belongs to somebody else"):
        JobLog()
    assert list(elsewhere.iterdir()) == []

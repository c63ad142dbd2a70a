"""Folders of log files: private, pruned."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nblaunch.errors import LaunchError
from nblaunch.launch import joblog
from nblaunch.launch.joblog import JobLog


@pytest.fixture
def keep_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", "3")


def test_folders_of_others_are_not_pruned_whatever_their_names(tmp_path: Path, keep_three: None) -> None:
    """``2024-01-15-093000`` has four numbers, as a job's folder has, and there is no process 15 any more."""
    dates = [f"2024-01-{day:02}-093000" for day in range(1, 31)]
    kept = ["notes.txt", "20200101-000000-1-1", f"20200102-000000-{_dead_pid()}-1", *dates]
    for name in kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    for _ in range(6):
        log = JobLog(str(tmp_path))
        log.end()
        log.prune()
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= set(kept)
    assert len(left) == len(kept) + 3


def test_jobs_of_kernels_that_have_ended_are_pruned_and_of_others_not(
    tmp_path: Path, keep_three: None
) -> None:
    def launch_in_another_process() -> str:
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(writing, JobLog(str(tmp_path)).path.name.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        with os.fdopen(reading) as file:
            return file.read()

    def change(job: str, **values: object) -> None:
        mark = tmp_path / job / ".nblaunch_job.json"
        mark.write_text(json.dumps(json.loads(mark.read_text()) | values))

    ended, renamed, alive, elsewhere, broken = (launch_in_another_process() for _ in range(5))
    (tmp_path / renamed).rename(tmp_path / "the good one")
    change(alive, pid=1)
    change(elsewhere, host="another.machine")
    change(broken, pid=1 << 70)
    logs = [JobLog(str(tmp_path)) for _ in range(4)]
    for log in logs:
        log.prune()
    left = {path.name for path in tmp_path.iterdir()}
    assert ended not in left
    assert left >= {"the good one", alive, elsewhere, broken, *(log.path.name for log in logs)}


def test_what_a_link_leads_to_is_not_pruned(tmp_path: Path, keep_three: None) -> None:
    elsewhere, logs = tmp_path / "elsewhere", tmp_path / "logs"
    log = JobLog(str(elsewhere))
    log.end()
    logs.mkdir()
    (logs / log.path.name).symlink_to(log.path)
    (logs / "linked mark").mkdir()
    (logs / "linked mark" / ".nblaunch_job.json").symlink_to(log.path / ".nblaunch_job.json")
    os.mkfifo(logs / "pipe")
    (logs / "piped mark").mkdir()
    os.mkfifo(logs / "piped mark" / ".nblaunch_job.json")
    for _ in range(5):
        log = JobLog(str(logs))
        log.end()
        log.prune()
    assert len(list(elsewhere.iterdir())) == 1
    assert len(list(logs.iterdir())) == 4 + 3


def _dead_pid() -> int:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


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

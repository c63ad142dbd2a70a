"""Folders of log files: private to the user, and pruned."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from nblaunch.errors import LaunchError
from nblaunch.host import files, machine, proc
from nblaunch.launcher import joblog
from nblaunch.launcher.joblog import JobLog


@pytest.fixture
def keep_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", "3")
    # A process prunes whenever it has created a certain number of folders; keep that from happening in this test.
    monkeypatch.setattr(joblog, "_job_numbers", itertools.count(1))


def test_foreign_folders_are_not_pruned(tmp_path: Path, keep_three: None) -> None:
    """``2024-01-15-093000`` has four numbers, like a job's folder, and process 15 no longer exists."""
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


def test_only_jobs_of_ended_kernels_are_pruned(tmp_path: Path, keep_three: None) -> None:
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
        path = tmp_path / job / ".nblaunch_job.json"
        stamp = json.loads(path.read_text())
        path.write_text(json.dumps({**stamp, "process": {**stamp["process"], **values}}))

    ended, renamed, alive, elsewhere, copied = (launch_in_another_process() for _ in range(5))
    (tmp_path / renamed).rename(tmp_path / "the good one")
    change(alive, pid=1, started=proc.start_ticks(1))
    here = asdict(machine.this_machine())
    change(elsewhere, machine={**here, "id": "another", "boot_id": "another"})
    # and it has written since this machine was started
    change(copied, machine={**here, "boot_id": "another"})
    logs = [JobLog(str(tmp_path)) for _ in range(4)]
    for log in logs:
        log.prune()
    left = {path.name for path in tmp_path.iterdir()}
    assert ended not in left
    assert left >= {"the good one", alive, elsewhere, copied, *(log.path.name for log in logs)}


def test_link_targets_are_not_pruned(tmp_path: Path, keep_three: None) -> None:
    elsewhere, logs = tmp_path / "elsewhere", tmp_path / "logs"
    log = JobLog(str(elsewhere))
    log.end()
    logs.mkdir()
    (logs / log.path.name).symlink_to(log.path)
    (logs / "linked stamp").mkdir()
    (logs / "linked stamp" / ".nblaunch_job.json").symlink_to(log.path / ".nblaunch_job.json")
    os.mkfifo(logs / "pipe")
    (logs / "piped stamp").mkdir()
    os.mkfifo(logs / "piped stamp" / ".nblaunch_job.json")
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


def test_jobs_are_pruned_after_a_hostname_change(
    tmp_path: Path, keep_three: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [JobLog(str(tmp_path)) for _ in range(6)]
    for log in logs:
        log.end()
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop-on-a-train")
    logs[-1].prune()
    assert [log.path.exists() for log in logs] == [False] * 3 + [True] * 3


@pytest.mark.skipif(not Path("/usr/bin/systemd-tmpfiles").exists(), reason="needs systemd-tmpfiles")
def test_tmp_cleaners_skip_running_jobs(tmp_path: Path) -> None:
    running, ended = JobLog(str(tmp_path / "logs")), JobLog(str(tmp_path / "logs"))
    for log in (running, ended):
        log.make_attempt_folder(0, range(2))
    ended.end()
    rules = tmp_path / "rules.conf"
    rules.write_text(f"e {tmp_path / 'logs'} - - - 0s\n")
    subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True, capture_output=True, timeout=300)
    assert running.log_path(1).exists()
    assert not ended.path.exists()
    running.end()


def test_short_jobs_do_not_accumulate(tmp_path: Path, keep_three: None) -> None:
    for _ in range(70):
        JobLog(str(tmp_path)).end()
        assert len(list(tmp_path.iterdir())) < 3 + 20


def test_containers_with_equal_pids_share_a_log_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joblog, "_job_numbers", itertools.repeat(1))
    logs = [JobLog(str(tmp_path)) for _ in range(3)]
    for log in logs:
        assert json.loads((log.path / ".nblaunch_job.json").read_text())["job"] == log.path.name
        log.end()
    assert len({log.path for log in logs}) == 3


def test_a_folder_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder has a predictable name, in a place where other users can write."""
    monkeypatch.delenv("NBLAUNCH_LOG_DIR", raising=False)
    monkeypatch.setattr(joblog.tempfile, "gettempdir", lambda: str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"nblaunch-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(LaunchError, match="belongs to another user"):
        JobLog()
    assert list(elsewhere.iterdir()) == []


def test_full_disks_are_reported_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JobLog(str(tmp_path))
    touch = Path.touch

    def touch_some(path: Path, *args: int, **options: int) -> None:
        if path.name == "rank_1.stacks":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        touch(path, *args, **options)

    free = os.statvfs(tmp_path)
    no_inodes = os.statvfs_result((*free[:6], 0, 0, *free[8:]))
    monkeypatch.setattr(Path, "touch", touch_some)
    monkeypatch.setattr(files.os, "statvfs", lambda _: no_inodes)
    with pytest.raises(LaunchError, match=r"no inodes are left on /.*log_dir="):
        log.make_attempt_folder(0, range(2))
    assert not log.attempt_path(0).exists()
    log.make_attempt_folder(0, range(1))
    assert {path.name for path in log.attempt_path(0).iterdir()} == {"rank_0.log", "rank_0.stacks"}


def test_a_job_begins_on_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_three: None
) -> None:
    """Training continues; only the printed output is lost."""

    def reject(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", reject)
    log = JobLog(str(tmp_path))
    log.make_attempt_folder(0, range(2))
    assert log.log_path(1).exists()


def test_a_host_without_a_temporary_folder_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.delenv("NBLAUNCH_LOG_DIR", raising=False)
    monkeypatch.setattr(joblog.tempfile, "gettempdir", find_none)
    with pytest.raises(LaunchError, match=r"temporary folder .*NBLAUNCH_LOG_DIR"):
        JobLog()

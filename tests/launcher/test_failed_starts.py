"""Failed starts: only the system's errors at the start count, not other ``OSErrors`` of a run."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence

import pytest

from nblaunch.errors import LaunchError
from nblaunch.events import Event, Note
from nblaunch.launcher import attempt, runner
from nblaunch.launcher.job import Job
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import SlotReading


class Failing:
    """A listener that raises the error of a broken disk."""

    def on_event(self, event: Event) -> None:
        pass

    def on_readings(self, samples: Sequence[SlotReading]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def close(self) -> None:
        pass


class Keeping(Failing):
    """A listener that collects notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)

    def on_readings(self, samples: Sequence[SlotReading]) -> None:
        pass


def run(listener: Failing, seconds: float, *, in_background: bool = False) -> Job:
    spec = LaunchSpec(time.sleep, (seconds,), 2, backend="cpu")
    job = JobRunner(spec, plan_launch(spec), [listener])
    job.run_in_background() if in_background else job.run()
    return job


def test_errors_of_running_workers_are_not_failed_starts(nothing_left_behind: None) -> None:
    error = run(Failing(), 100.0).exception(30)
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failure_at_the_start_fails_the_launch(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    def reject(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(attempt, "DeviceSampler", reject)  # the workers are already running
    error = run(Failing(), 100.0, in_background=in_background).exception(30)
    assert isinstance(error, LaunchError)
    assert "Too many open files" in str(error)
    assert "ulimit -n" in str(error)


def test_undeletable_old_logs_do_not_end_a_job(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(log: JobLog) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(JobLog, "prune", reject)
    listener = Keeping()
    job = run(listener, 0.3)
    assert job.status == "done"
    assert any("Input/output error" in text for text in listener.texts)


def test_a_failed_thread_start_ends_the_workers(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def reject(thread: threading.Thread) -> None:
        if thread.name.startswith("nblaunch-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", reject)
    job = run(Keeping(), 100.0, in_background=True)
    error = job.exception(30)
    assert isinstance(error, LaunchError)
    assert "can't start new thread" in str(error)


def fail() -> None:
    raise ZeroDivisionError("the loss was zero")


def test_a_failed_restart_keeps_the_original_error(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*args: object) -> None:
        raise LaunchError("a fork is not possible any more")

    monkeypatch.setattr(runner, "replan_start_method", reject)
    spec = LaunchSpec(fail, (), 1, backend="cpu", max_restarts=1)
    job = JobRunner(spec, plan_launch(spec))
    job.run()
    error = job.exception(30)
    assert isinstance(error, LaunchError)
    assert "a fork is not possible any more" in str(error)
    assert "the loss was zero" in str(error)

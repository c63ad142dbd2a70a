"""The process of a detached job: :func:`start` starts it, and :func:`main` is what it does.

It is a clean process, as a forkserver is: it loads the call, forks the workers as a notebook's kernel would, and
watches them to their end. Nothing connects it with the process that launched it, once the job's folder is there. What
happens is written into that folder by a :class:`Recorder`, a listener of the job.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from nblaunch import backends
from nblaunch.detached.folder import End, JobFolder, Record, Snapshot, root
from nblaunch.detached.follower import JobFollower
from nblaunch.detached.requests import RequestServer
from nblaunch.diagnosis.exceptions import RemoteRendering
from nblaunch.errors import LaunchError, ResultError
from nblaunch.events import DeviceUse, Event, HostMemory, JobEnded, LogLines, Note, StatusLine
from nblaunch.host import descriptors, disk
from nblaunch.launcher.debug_client import release_kept_failures
from nblaunch.launcher.job import Listener
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.launcher.requests import JobRequests, interrupts_as_requests
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.interpreter import registered_backend, start_program
from nblaunch.start_methods.saved_call import SavedCall, save_call
from nblaunch.wire import payload
from nblaunch.wire.board import SlotReading
from nblaunch.wire.channel import EventSender
from nblaunch.worker import output, process_control
from nblaunch.worker.failure import describe_failure
from nblaunch.worker.inheritance import random_states

_MAX_NAME = 24  # characters of the function's name in the job's id
_REMEDY = "without detach=True, where workers are forked from the notebook, nothing needs to be pickled"

_TERMINATION_GRACE_S = 20.0
"""For a checkpoint, when this process gets SIGTERM."""

_PROGRESS_S = 0.25
"""Between two writes of the present state."""

_IN_LOGS = (LogLines, StatusLine)
"""Events that are made of the log files again, where a process attaches."""

_SAMPLES = (DeviceUse, HostMemory)
"""Events of which only the last counts."""


@dataclass(frozen=True)
class JobTask:
    """What a job process is started with.

    Args:
        record: of the launch, as far as it is known before.
        root: folder in which it makes that of the job.
        call: what the job runs, and what surrounds it.
        report_fd: pipe on which the launching process waits until the folder of the job is there.
    """

    record: Record
    job_id: str
    root: str
    call: SavedCall
    report_fd: int = -1


def start(spec: LaunchSpec, plan: LaunchPlan, listeners: Sequence[Listener]) -> JobFollower:
    """Start the process of a job, and return what follows it, when its workers run or could not be started.

    Args:
        plan: how it would run in this process, which has been checked.

    Raises:
        PayloadError: the call can't be pickled.
        LaunchError: the job process could not be started.
        PermissionError: the folder of the jobs can be changed by other users.
    """
    folder = root()
    name = re.sub(r"\W+", "-", spec.function_name.rpartition(".")[2]).strip("-_")[:_MAX_NAME] or "job"
    job_id = f"{name}-{secrets.token_hex(3)}"
    call = save_call((spec.function, spec.args), _REMEDY)
    random_states.move_on()
    try:
        record = Record(
            spec.without_call(),
            plan.backend.name,
            registered_backend(plan.backend.name),
            plan.settings,
            call.sources,
            socket.gethostname(),
        )
        task = JobTask(record, job_id, root=str(folder), call=call)
        release_kept_failures()
        interrupts: list[float] = []
        # What has started must be known here, to be ended by an interrupt.
        with interrupts_as_requests(lambda: interrupts.append(time.time())):
            _start_process(task)
            follower = JobFollower(JobFolder(folder / job_id), listeners)
            follower.follow()
            follower.wait_for_start(interrupts)
    finally:
        call.close()
    return follower


def _start_process(task: JobTask) -> None:
    reading, writing = os.pipe()
    try:
        process = start_program(
            __name__,
            replace(task, report_fd=writing),
            [writing],
            task.call,
        )
    except OSError as error:
        os.close(reading)
        raise LaunchError(
            f"the process of the job could not be started ({sys.executable}): {error}"
        ) from error
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as report:
        text = report.read().decode(errors="replace")
    process.wait()
    if text != "ok":
        raise LaunchError(f"the process of the job could not be started: {text or 'it ended at once'}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a job; the argument is the descriptor of a memory file with its pickled :class:`JobTask`."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        task: JobTask = pickle.load(file)
    if os.fork():
        os._exit(0)  # the system reaps the job process, also while the launching process lives
    try:
        job = _DetachedJob(task)
    except BaseException as error:
        os.write(task.report_fd, str(error).encode()[:4096])
        os._exit(1)
    with suppress(BrokenPipeError):  # the launching process has gone already
        os.write(task.report_fd, b"ok")
    os.close(task.report_fd)
    job.run()
    output.flush()
    os._exit(0)  # a thread of the user's modules must not keep it


class _DetachedJob:
    """The job of this process, with its folder, from which others can follow it from now on."""

    def __init__(self, task: JobTask) -> None:
        self._task = task
        self._log = JobLog(task.root, task.job_id)
        output.capture(str(self._log.new_file("job.log")))
        self._requests = JobRequests()
        self._outcome: JobOutcome | None = None
        self._runner: JobRunner | None = None
        self._folder = JobFolder(self._log.path)
        self._recorder = Recorder(self._folder, self._present_outcome)
        self._server = RequestServer(self._log.path, self._requests)
        self._record = replace(task.record, pid=os.getpid(), started_s=time.time())
        self._folder.write(self._record)

    def run(self) -> None:
        """Run it to its end. What goes wrong is in the folder, and not raised."""
        try:
            signal.signal(
                signal.SIGTERM, lambda number, frame: self._requests.terminate(_TERMINATION_GRACE_S)
            )
            process_control.unblock_signals()
            spec = self._load()
            plan = plan_launch(spec)
            self._runner = JobRunner(spec, plan, [self._recorder], log=self._log, requests=self._requests)
            del spec, plan
            self._runner.run()
        except BaseException as error:
            if self._present_outcome() is None:
                self._end_unstarted(error)
        finally:
            self._server.close()

    def _load(self) -> LaunchSpec:
        """Return the launch with its call, in a process that looks to the user's modules as the kernel did."""
        record, saved = self._record, self._task.call
        saved.restore_surroundings()
        backends.find(record.backend, record.registered_backend)
        (function, args), _ = saved.load()
        saved.close()
        return replace(record.spec, function=function, args=args, num_processes=record.plan["num_processes"])

    def _end_unstarted(self, error: BaseException) -> None:
        """Record that the job ended before it ran."""
        self._outcome = JobOutcome.of_error(error)
        ended = JobEnded(-1, time.time(), outcome=self._outcome.status, message=self._outcome.message)
        self._recorder.on_event(ended)

    def _present_outcome(self) -> JobOutcome | None:
        return self._runner.outcome if self._runner is not None else self._outcome


class Recorder:
    """Writes the events, snapshots of the ranks and the outcome of a job. What the disk has no room for is left out.

    Args:
        outcome: returns how the job ended, once it has.
    """

    def __init__(self, folder: JobFolder, outcome: Callable[[], JobOutcome | None]) -> None:
        self._folder = folder
        self._outcome = outcome
        fd = os.open(
            folder.events_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        descriptors.keep_from_children(fd)
        self._sender = EventSender(fd)
        self._samples: dict[tuple[type, int], Event] = {}
        self._readings: Sequence[SlotReading] = ()
        self._next_s = 0.0

    def on_event(self, event: Event) -> None:
        """Append an event; the last one of the job behind everything else that is kept."""
        if isinstance(event, _SAMPLES):
            self._samples[type(event), event.rank] = event
        elif isinstance(event, JobEnded):
            self._write_snapshot()
            if unsaved := self._save_end(event):
                self._append(Note.of_job(unsaved, "warning"))
            self._append(event)
        elif not isinstance(event, _IN_LOGS):
            self._append(event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Write the state of all ranks, a few times a second."""
        self._readings = readings
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_S
            self._write_snapshot()

    def close(self) -> None:
        """Do nothing: the end is written with its event."""

    def _append(self, event: Event) -> None:
        end = os.fstat(self._sender.fd).st_size
        try:
            self._sender.send(event)
        except OSError:  # the disk is full: without this event, those that follow can be read
            os.ftruncate(self._sender.fd, end)

    def _write_snapshot(self) -> None:
        try:
            self._folder.write(Snapshot(time.time(), self._readings, list(self._samples.values())))
        except OSError:  # the disk is full: the next one may find room
            self._next_s = time.monotonic() + 10 * _PROGRESS_S

    def _save_end(self, event: JobEnded) -> str:
        """Write the outcome; return why a part of it could not be, empty if all is there."""
        outcome = self._outcome()
        assert outcome is not None, "the job has ended"
        # The result first, and apart: nothing that happens to weights, which may be large, can cost it.
        unsaved = self._try("the result", lambda: _save_result(self._folder, outcome))
        unsaved_weights = self._try("the trained weights", lambda: _save_weights(self._folder, outcome))
        end = _end_of(event, outcome, unsaved, unsaved_weights)
        problem = self._try("the end of the job", lambda: self._folder.write(end))
        return "; ".join(filter(None, (unsaved, unsaved_weights, problem)))

    def _try(self, what: str, write: Callable[[], None]) -> str:
        """Write a part of the outcome; return why it could not be, empty if it is there."""
        try:
            write()
        except OSError as error:
            return f"{what} could not be written: {disk.reason(self._folder.path, error)}"
        except Exception as error:  # the user's classes have code of their own
            return f"{what} could not be written: {type(error).__name__}: {error}"
        return ""


def _end_of(event: JobEnded, outcome: JobOutcome, unsaved: str, unsaved_weights: str) -> End:
    failed, notes = None, None
    if outcome.error is not None:
        failed = describe_failure(-1 if outcome.failed_rank is None else outcome.failed_rank, outcome.error)
        shown = getattr(outcome.error, "_render_traceback_", None)
        if isinstance(shown, RemoteRendering):
            failed, notes = replace(failed, info=shown.info), shown.notes
    return End(event, failed, notes, unsaved, unsaved_weights, _partial_rank(outcome))


def _partial_rank(outcome: JobOutcome) -> int | None:
    partial = outcome.error.partial if isinstance(outcome.error, ResultError) else None
    ranks = [rank for rank, value in outcome.values.items() if value is partial]
    return ranks[0] if partial is not None and ranks else None


def _save_result(folder: JobFolder, outcome: JobOutcome) -> None:
    """Write what the ranks returned."""
    if outcome.status == "done":
        _write(folder, folder.result_path, dict(outcome.values))


def _save_weights(folder: JobFolder, outcome: JobOutcome) -> None:
    """Write the trained weights, if there are any."""
    if outcome.unloaded_weights:
        _write(folder, folder.weights_path, dict(outcome.unloaded_weights))


def _write(folder: JobFolder, path: Path, value: Any) -> None:
    folder.replace(
        path, lambda file: payload.PayloadWriter(file.fileno()).append(value, main_by_reference=True)
    )

"""The process of a detached job, which :func:`start` starts and which runs :func:`main`.

It is a clean process, like a forkserver: it loads the call, forks the workers like a kernel, and watches them until
they end. Once the job's folder exists, nothing connects this process to the process that launched the job. A
:class:`Recorder`, a listener of the job, writes all events into that folder.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from nblaunch import backends, installation
from nblaunch.detached import record
from nblaunch.detached.folder import JobFolder, Launch, open_home, own_layout
from nblaunch.detached.follower import JobFollower, follow
from nblaunch.detached.listing import Served
from nblaunch.detached.record import Record
from nblaunch.detached.recorder import Recorder
from nblaunch.detached.requests import Endpoint, RequestServer, new_address
from nblaunch.errors import LaunchError, warn
from nblaunch.host import files
from nblaunch.host.machine import ProcessMark
from nblaunch.launcher.debug_client import release_kept_failures
from nblaunch.launcher.job import Listener
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan, plan_launch
from nblaunch.launcher.requests import JobRequests, interrupts_as_requests
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.saved_call import SavedCall, save_call
from nblaunch.start_methods.spawn import registered_backend, start_program
from nblaunch.wire import schema
from nblaunch.worker import output, process_control
from nblaunch.worker.inheritance import random_states

_MAX_NAME = 24  # characters of the function's name in the job's id
_ADVICE = "without detach=True, workers are forked from the notebook and nothing needs to be pickled"

_TERMINATION_GRACE_S = 20.0
"""Time allowed for a checkpoint after this process receives SIGTERM."""


@dataclass(frozen=True)
class JobTask:
    """The input of a job process.

    Args:
        launch: the facts that other processes need in order to attach to the job.
        backend: name of the device family.
        job_id: name of the job.
        root: folder in which the process creates the job's folder.
        call: the call that the job runs, and its environment.
        report_fd: pipe that the launching process waits on until the folder of the job exists.
    """

    launch: Launch
    backend: str
    job_id: str
    root: str
    call: SavedCall
    report_fd: int = -1


def start(spec: LaunchSpec, plan: LaunchPlan, listeners: Sequence[Listener]) -> JobFollower:
    """Start the process of a job; return the job's follower once the workers are running or could not be started.

    Args:
        plan: the checked plan for a run in this process.

    Raises:
        PayloadError: the call can't be pickled.
        LaunchError: the job process could not be started.
        PermissionError: other users can access the jobs' folder.
    """
    home = open_home()
    if home.why_temporary:
        warn(
            f"detached jobs are stored in {home.path}, because {home.why_temporary}. A restart of this machine may "
            "remove their results. Set XDG_STATE_HOME or NBLAUNCH_LOG_DIR to a permanent folder"
        )
    name = re.sub(r"\W+", "-", spec.function_name.rpartition(".")[2]).strip("-_")[:_MAX_NAME] or "job"
    job_id = f"{name}-{secrets.token_hex(3)}"
    call = save_call((spec.function, spec.args), _ADVICE)
    random_states.move_on()
    try:
        launch = Launch(
            spec.without_call(), registered_backend(plan.backend.name), plan.settings, call.sources
        )
        task = JobTask(launch, plan.backend.name, job_id, root=str(home.path), call=call)
        release_kept_failures()
        interrupts: list[float] = []
        # An interrupt must be able to end whatever has started.
        with interrupts_as_requests(lambda: interrupts.append(time.time())):
            _start_process(task)
            follower = follow(JobFolder(home.path / job_id), listeners)
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
        raise LaunchError(f"the job's process could not be started ({sys.executable}): {error}") from error
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as report:
        text = report.read().decode(errors="replace")
    process.wait()
    if text != "ok":
        raise LaunchError(f"the job's process could not be started: {text or 'it ended immediately'}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a job; the argument is the descriptor of a memory file with its pickled :class:`JobTask`."""
    installation.keep_modules()  # the job may outlive the installation
    with os.fdopen(int(arguments[0]), "rb") as file:
        task: JobTask = pickle.load(file)
    if os.fork():
        os._exit(0)  # the system then reaps the job process even while the launching process is alive
    try:
        job = _DetachedJob(task)
    except BaseException as error:
        os.write(task.report_fd, str(error).encode()[:4096])
        os._exit(1)
    with suppress(BrokenPipeError):  # the launching process has already ended
        os.write(task.report_fd, b"ok")
    os.close(task.report_fd)
    job.run()
    output.flush()
    os._exit(0)  # a thread started by the user's modules must not keep the process alive


class _DetachedJob:
    """The job of this process, with the folder through which other processes follow it."""

    def __init__(self, task: JobTask) -> None:
        self._task = task
        self._log = JobLog(task.root, task.job_id)
        try:
            self._publish()
        except BaseException as error:
            why = files.reason_of(self._log.path, error) if isinstance(error, OSError) else ""
            self._log.remove()  # otherwise it would be listed as a damaged job
            if not why:
                raise
            raise LaunchError(
                f"its files in {self._log.path} can't be created: {why}. Free some space, or choose another folder "
                "with XDG_STATE_HOME or NBLAUNCH_LOG_DIR"
            ) from error

    def _publish(self) -> None:
        """Create the files and sockets of the job, after which other processes can follow it."""
        task = self._task
        output.capture(str(self._log.new_file("job.log")))
        self._requests = JobRequests()
        self._outcome: JobOutcome | None = None
        self._runner: JobRunner | None = None
        spec, plan = task.launch.spec, task.launch.plan
        self._record = Record(
            record.FORMAT, sys.modules["nblaunch"].__version__, own_layout(), task.job_id,
            spec.function_name, plan["num_processes"], task.backend,
            ProcessMark.own(), new_address(), time.time(),
        )  # fmt: skip
        folder = JobFolder(self._log.path)
        self._recorder = Recorder(
            folder, self._log, self._record, task.launch, self._present_outcome, self._requests
        )
        self._server = RequestServer(
            Endpoint(folder.path, self._record.address), self._requests, {"describe": self._describe}
        )
        self._recorder.publish()

    def run(self) -> None:
        """Run the job until it ends. Errors are written to the folder, not raised."""
        try:
            signal.signal(
                signal.SIGTERM, lambda number, frame: self._requests.terminate(_TERMINATION_GRACE_S)
            )
            process_control.unblock_signals()
            spec = self._load()
            plan = plan_launch(spec)
            self._runner = self._make_runner(spec, plan)
            del spec, plan
            self._runner.run()
        except BaseException as error:
            if self._present_outcome() is None:
                self._end_unstarted(error)
        finally:
            self._server.close()

    def _make_runner(self, spec: LaunchSpec, plan: LaunchPlan) -> JobRunner:
        listeners = [self._recorder]
        if spec.is_on_nodes:
            from nblaunch.engines.runner import EngineRunner

            return EngineRunner(spec, plan, listeners, log=self._log, requests=self._requests)
        return JobRunner(spec, plan, listeners, log=self._log, requests=self._requests)

    def _load(self) -> LaunchSpec:
        """Return the launch with its call, after preparing this process so that the user's modules see the kernel's
        state.
        """
        launch, saved = self._task.launch, self._task.call
        saved.restore_surroundings()
        backends.find(self._task.backend, launch.registered_backend)
        (function, args), _ = saved.load()
        saved.close()
        return replace(launch.spec, function=function, args=args, num_processes=launch.plan["num_processes"])

    def _end_unstarted(self, error: BaseException) -> None:
        """Record that the job ended before it ran."""
        self._outcome = JobOutcome.of_error(error)
        self._recorder.on_event(self._outcome.end_event())

    def _present_outcome(self) -> JobOutcome | None:
        return self._runner.outcome if self._runner is not None else self._outcome

    def _describe(self) -> str:
        """Return the facts about this job and why it is waiting; restore any files removed from its folder."""
        problem = self._recorder.restore()
        self._server.restore()
        served = Served(str(self._log.path), problem, self._recorder.waits_for, self._record)
        return schema.dump(served).decode()

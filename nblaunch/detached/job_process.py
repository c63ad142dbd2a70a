"""What the process of a detached job does: :func:`main`, called with the number of a descriptor.

It is a clean process, as a forkserver is: it loads the call, forks the workers as a notebook's kernel would, and
watches them to their end. Nothing connects it with the process that launched it, once the job's folder is there.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from nblaunch import backends
from nblaunch.detached.folder import JobFolder, Record
from nblaunch.detached.recorder import Recorder
from nblaunch.detached.requests import RequestServer
from nblaunch.detached.start import JobTask
from nblaunch.events import JobEnded
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.requests import JobRequests
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.wire import payload
from nblaunch.wire.assignment import FunctionCall, restore_random_states, restore_sources
from nblaunch.worker import output, process_control

_TERMINATION_GRACE_S = 20.0
"""For a checkpoint, when this process gets SIGTERM."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the job of a launch.

    Args:
        arguments: the number of the memory file of the :class:`JobTask`.
    """
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
        restore_sources(task.call.sources)
        sys.argv[:] = task.call.argv
        self._record = Record(
            spec=task.spec,
            backend=task.backend,
            registered_backend=task.registered_backend,
            plan=task.plan,
            sources=task.call.sources,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=time.time(),
        )
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
            with suppress(OSError):  # the disk is full: that of the launching process stays
                self._folder.write(replace(self._record, plan=plan.settings))
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
        task = self._task
        if task.call.has_shell:
            output.ensure_shell()
        backends.find(task.backend, task.registered_backend)
        call: FunctionCall = payload.load_mapped(task.call.fd)
        os.close(task.call.fd)
        restore_random_states(pickle.loads(task.call.random_states))
        function, args = call
        return replace(task.spec, function=function, args=args, num_processes=task.num_processes)

    def _end_unstarted(self, error: BaseException) -> None:
        """Record that the job ended before it ran."""
        self._outcome = JobOutcome.of_error(error)
        ended = JobEnded(-1, time.time(), outcome=self._outcome.status, message=self._outcome.message)
        self._recorder.on_event(ended)

    def _present_outcome(self) -> JobOutcome | None:
        return self._runner.outcome if self._runner is not None else self._outcome

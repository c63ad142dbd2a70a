"""The start of a detached job, in the process that launches it."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nblaunch.detached.folder import JobFolder, Record, root
from nblaunch.detached.follower import JobFollower
from nblaunch.errors import LaunchError
from nblaunch.launcher.debug_client import release_kept_failures
from nblaunch.launcher.job import Listener
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.launcher.requests import interrupts_as_requests
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.interpreter import registered_backend, start_program
from nblaunch.start_methods.saved_call import SavedCall, save_call

_MAX_NAME = 24  # characters of the function's name in the job's id
_REMEDY = "without detach=True, where workers are forked from the notebook, nothing needs to be pickled"


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
            "nblaunch.detached.job_process",
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

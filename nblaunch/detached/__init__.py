"""Jobs that outlive the process that launched them. Each runs in its own process, the job process.

    kernel ── start ── call, by cloudpickle ──> job process (POSIX session of its own) ── fork ──> workers
                                                    │ appends, replaces          ^
                                                    v                            │ stop, stacks, ...
                                              folder of the job              Unix sockets
                                                    │ read, followed             │
                        any kernel, script, shell ──┴── JobFollower ──────────┘

job_process.py          starts the process that runs a job, with the ordinary ``JobRunner``
recorder.py             writes the folder of the job, and waits if the disk has no space for the result
folder.py               location of the jobs' folders; the user's key; contents of a job's folder, private to the user;
                        checks which pickles this version can read
record.py               facts about a job as JSON, without pickles
listing.py              lists jobs, from folders and from processes whose folders were removed
requests.py             requests to a running job, on its Unix sockets
reader.py               reads a folder from the beginning
follower.py             follows a job, as a ``Job`` with dashboards in this process

Everything about a job is in files. Only requests need the job process. If that process is killed, its workers end
with it, and the job is listed as lost.
"""

from __future__ import annotations

from typing import Any

from nblaunch import dashboard as dashboards
from nblaunch.detached.follower import follow
from nblaunch.detached.listing import JobSummary, find, jobs
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames
from nblaunch.host import signal_handlers
from nblaunch.launcher.job import Job
from nblaunch.spec import DashboardKind

__all__ = ["JobSummary", "attach", "jobs"]


def attach(job_id: str | None = None, *, dashboard: DashboardKind = "auto") -> Job[Any]:
    """Return the :class:`Job` for a job launched with ``detach=True``, and show it in this cell.

    Several processes can attach to a job; when one of them ends, the others are not affected. Within a process, all
    calls for a job return the same :class:`Job` until the job has ended or :meth:`Job.detach` has been called.

    Example::

        job = nblaunch.attach("train-3f9a2c")
        job.result()
        job.load_weights(model)

    Args:
        job_id: name from :func:`jobs`, or a prefix of it; None = the newest job.
        dashboard: as in :func:`notebook_launcher`.

    Raises:
        LookupError: the job does not exist, is damaged, runs on another machine, or was launched by another version
            of nblaunch.
        PermissionError: other users can access the job's folder.
    """
    __tracebackhide__ = True
    with HiddenLauncherFrames(), signal_handlers.held_back():
        folder = find(job_id)
        listeners = dashboards.choose(dashboard, background=True)
        try:
            follower = follow(folder, listeners)
        except BaseException as error:
            problem = LookupError(str(error)) if isinstance(error, LookupError) else error
            dashboards.close_rejected(listeners, problem)
            raise problem from None
        dashboards.connect(listeners, follower)
        return follower

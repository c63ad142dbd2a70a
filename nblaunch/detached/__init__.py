"""Jobs that outlive the process that launched them, each run by a process of its own, the job process.

    kernel ── start ── call, by cloudpickle ──> job process (POSIX session of its own) ── fork ──> workers
                                                    │ appends, replaces          ^
                                                    v                            │ stop, stacks, ...
                                              folder of the job              Unix sockets
                                                    │ read, followed             │
                        any kernel, script, shell ──┴── JobFollower ──────────┘

job_process.py          starts the process of a job, which runs it with the ordinary ``JobRunner``
recorder.py             writes the folder of the job, and waits where there is no room for what it returned
home.py                 where the folders of jobs are; the key of their user
folder.py               what is in the folder of a job; private to the user
record.py               what is known of a job without a pickle
listing.py              all jobs: of folders, and of processes whose folders are gone
requests.py             requests to a running job, on its Unix sockets
reader.py               reads the folder from the beginning on
follower.py             follows it, as a ``Job`` whose dashboards are those of a job of this process

All that is needed to look at a job is in files: the job process has to run for requests alone. If it is killed, its
workers end with it, and the job is listed as lost.
"""

from __future__ import annotations

from typing import Any

from nblaunch import dashboard as dashboards
from nblaunch.detached.follower import follow
from nblaunch.detached.listing import JobSummary, find, jobs
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames
from nblaunch.launcher.job import Job
from nblaunch.spec import DashboardKind

__all__ = ["JobSummary", "attach", "jobs"]


def attach(job_id: str | None = None, *, dashboard: DashboardKind = "auto") -> Job[Any]:
    """Return a :class:`Job` for one that was launched with ``detach=True``, and show it in this cell.

    Several processes may be attached to a job; that one of them ends changes nothing. In one process, all calls for a
    job return the same :class:`Job`, until it has ended or its :meth:`Job.detach` was called.

    Example::

        job = nblaunch.attach("train-3f9a2c")
        job.result()
        job.load_weights(model)

    Args:
        job_id: as listed by :func:`jobs`, or the beginning of it; None = the newest job.
        dashboard: as for :func:`notebook_launcher`.

    Raises:
        LookupError: there is no such job; it is damaged, runs on another machine, or was launched by another version of
            nblaunch.
        PermissionError: the folder of the job can be changed by other users.
    """
    __tracebackhide__ = True
    with HiddenLauncherFrames():
        folder = find(job_id)
        listeners = dashboards.choose(dashboard, background=True)
        try:
            follower = follow(folder, listeners)
        except (LookupError, OSError) as error:
            refusal = LookupError(str(error)) if isinstance(error, LookupError) else error
            dashboards.close_refused(listeners, refusal)
            raise refusal from None
    dashboards.connect(listeners, follower)
    return follower

"""A launch from its spec to its result: plan, job, dashboards. What notebooks and scripts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nblaunch import dashboard as dashboards
from nblaunch.launcher.job import Job, Listener
from nblaunch.launcher.preflight import LaunchPlan, plan_launch
from nblaunch.spec import LaunchSpec, check_flag
from nblaunch.wire import descriptors


def make_job(spec: LaunchSpec, plan: LaunchPlan, listeners: Sequence[Listener]) -> Job:
    """Return a job that has not started; what several machines need is imported only for them."""
    if not spec.is_elastic:
        return Job(spec, plan, listeners)
    from nblaunch.nodes.runner import run_attempts

    return Job(spec, plan, listeners, run_attempts)


def run(spec: LaunchSpec, *, background: bool = False, dashboard: str = "auto") -> Any:
    """Launch ``spec`` and return its result, or with ``background`` the :class:`Job` as soon as its workers run.

    An interrupt before that ends the job, and only then is raised.

    Raises:
        BaseException: as :func:`nblaunch.notebook_launcher` describes.
    """
    __tracebackhide__ = True
    check_flag("background", background)
    descriptors.occupy_standard_ones()
    plan = plan_launch(spec, background=background)
    listeners = dashboards.choose(dashboard, background=background)
    job = make_job(spec, plan, listeners)
    del spec, plan  # or a traceback, which IPython keeps, would keep the arguments by this frame
    job.show_with(dashboards.attach(listeners, job if background else None))
    if background:
        job.run_in_background()
        job.raise_if_not_started()
        return job
    job.run()
    if job.was_interrupted_at_the_end:
        raise KeyboardInterrupt  # or the next line of the cell would run; the result is in last_job()
    return job.result()

"""Attempts of a job on several machines: this node's agent decides on restarts, together with those of the others."""

from __future__ import annotations

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import Note
from nblaunch.launcher.course import Course
from nblaunch.nodes.link import NodeLink
from nblaunch.nodes.messages import WorldFormed
from nblaunch.wire.outbox import Outcome


def run_attempts(course: Course) -> tuple[AttemptReport, dict[int, Outcome]]:
    """Run attempts until the agent wants no more; return the report and the outcomes of the last one.

    Raises:
        KeyboardInterrupt: the job was interrupted while it waited for other nodes.
        JobCancelled: the job was cancelled while it waited for other nodes.
        LaunchError: the nodes did not find each other, or workers could not be started.
    """
    log_path = str(course.log.new_file("agent.log"))
    with NodeLink(
        course.spec, course.plan.num_processes, log_path, course.requests, course.emit, course.show
    ) as link:
        course.set_free()
        report, outcomes = _run_attempt(course, link, link.first_world())
        while not course.was_stopped(report) and (world := link.next_world()) is not None:
            course.attempt += 1
            course.pids = {}
            report, outcomes = _run_attempt(course, link, world)
        if link.last_error and not report.is_success:
            course.past_failures.append(link.last_error)
    return report, outcomes


def _run_attempt(
    course: Course, link: NodeLink, world: WorldFormed
) -> tuple[AttemptReport, dict[int, Outcome]]:
    report, outcomes = course.run_in_world(world.topology, link, world.restart_count)
    link.conclude(report)
    is_change = report.remote.wants_restart and not report.remote.has_cause
    failed = not (report.is_success or course.was_stopped(report) or is_change)
    if failed and course.spec.max_restarts:
        course.keep_failure(report)
        course.emit(Note.of_job(course.past_failures[-1], "warning"))
    return report, outcomes

"""Attempts of a job on several machines: this node's agent decides on restarts, together with those of the others."""

from __future__ import annotations

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import Note
from nblaunch.launcher.runner import JobRunner
from nblaunch.nodes.link import NodeLink
from nblaunch.nodes.messages import WorldFormed
from nblaunch.wire.outbox import RankResult


def run_attempts(runner: JobRunner) -> tuple[AttemptReport, dict[int, RankResult]]:
    """Run attempts until the agent wants no more; return the report and the results of its ranks.

    Raises:
        KeyboardInterrupt: the job was interrupted while it waited for other nodes.
        JobCancelled: the job was cancelled while it waited for other nodes.
        LaunchError: the nodes did not find each other, or workers could not be started.
    """
    log_path = str(runner.log.new_file("agent.log"))
    num_workers = runner.plan.num_processes
    with NodeLink(runner.spec, num_workers, log_path, runner.requests, runner.emit, runner.update) as link:
        runner.notify_waiting()
        report, rank_results = _run_attempt(runner, link, link.first_world())
        while not runner.was_stopped(report) and (world := link.next_world()) is not None:
            runner.next_attempt()
            report, rank_results = _run_attempt(runner, link, world)
        if link.last_error and not report.is_success:
            runner.past_failures.append(link.last_error)
    return report, rank_results


def _run_attempt(
    runner: JobRunner, link: NodeLink, world: WorldFormed
) -> tuple[AttemptReport, dict[int, RankResult]]:
    report, rank_results = runner.run_in_world(world.topology, link, world.restart_count)
    link.conclude(report)
    is_change = report.remote.wants_restart and not report.remote.has_cause
    failed = not (report.is_success or runner.was_stopped(report) or is_change)
    if failed and runner.spec.max_restarts:
        runner.emit(Note.of_job(runner.keep_failure(report), "warning"))
    return report, rank_results

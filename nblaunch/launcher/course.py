"""The course of a job: attempts, one after the other, until one counts; and what is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from nblaunch import engines
from nblaunch.diagnosis.failure import failure_of, memory_evidence
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import RootCause, early_leavers, how_ended
from nblaunch.engines.inline import run_inline
from nblaunch.engines.saved_call import SavedCall, save_call
from nblaunch.errors import JobCancelled, ResultError
from nblaunch.events import Event, JobStarted, Note, Started
from nblaunch.launcher import left_weights, weights
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.preflight import LaunchPlan, judge_again
from nblaunch.launcher.rendezvous import RendezvousHost
from nblaunch.launcher.requests import StopRequests
from nblaunch.launcher.supervisor import Peers
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.board import Sample
from nblaunch.wire.modules import Place
from nblaunch.wire.outbox import Outcome

_REMEDY = (
    "workers that start when the launching call has returned (background=True with max_restarts or with several "
    "machines) load the call as it was at the launch. Without max_restarts, or without background=True, nothing needs "
    "to be pickled"
)


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Args:
        status: ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``.
        error: what the job's result raises; None if there is one.
        failed_rank: the rank with the root cause of a failure.
        headline: one line about the failure; empty = the error's own text.
        is_early: it was done before its time, because that was requested.
        values: rank -> what its function returned, of a job that is done.
        weights: place in the arguments -> trained state dict of a module that did not fit the kernel's any more.
    """

    status: str
    error: BaseException | None = None
    failed_rank: int | None = None
    headline: str = ""
    is_early: bool = False
    values: Mapping[int, Any] = field(default_factory=dict)
    weights: Mapping[Place, dict[str, Any]] = field(default_factory=dict)


AttemptsRunner: TypeAlias = "Callable[[Course], tuple[AttemptReport, dict[int, Outcome]]]"
"""Runs attempts through :meth:`Course.run_in_world`; returns the report and the outcomes of the last one."""


class Course:
    """Runs a job's attempts to its end.

    Args:
        spec: what to run.
        plan: how.
        log: where its logs go.
        requests: requests to the job.
        emit: takes every event.
        show: takes the board's samples.
        set_free: called when other machines are waited for, which a cell need not do.
        run_attempts: runs the attempts of a launch on several machines.

    ``place`` is that of this machine's ranks in the world of ``num_processes``; ``attempt`` the number of the present
    one, from 0; ``pids`` its processes, by rank.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        plan: LaunchPlan,
        *,
        log: JobLog,
        requests: StopRequests,
        emit: Callable[[Event], None],
        show: Callable[[Sequence[Sample]], None],
        set_free: Callable[[], None],
        run_attempts: AttemptsRunner | None = None,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.num_processes = plan.num_processes
        self.place = Topology(
            world_size=plan.num_processes, local_world_size=plan.num_processes, master_addr=spec.master_addr
        )
        self.attempt = 0
        self.pids: dict[int, int] = {}
        self.log = log
        self.requests = requests
        self._emit_job = emit
        self.show = show
        self.set_free = set_free
        self._run_attempts = run_attempts
        self.past_failures: list[str] = []
        self._saved: SavedCall | None = None
        self._first_attempt: Attempt | None = None

    @property
    def ranks(self) -> range:
        """Those that run on this machine."""
        return range(self.place.rank, self.place.rank + self.place.local_world_size)

    @property
    def is_inline(self) -> bool:
        """Whether the function runs in this very process."""
        return self.plan.start_method == "inline"

    def start(self) -> None:
        """Announce the job, prepare later starts, start the first workers: here, while the kernel runs no other code.

        With several machines, workers start when all have met; a function that runs in this process is yet to run.

        Raises:
            LaunchError: the workers could not be started.
        """
        if not self.spec.is_elastic:
            self._announce()
        for warning in self.plan.warnings:
            self.emit(Note.of_job(warning, "warning"))
        if self.plan.starts_later:
            self._saved = save_call((self.spec.function, self.spec.args), _REMEDY)
        if not (self.is_inline or self.spec.is_elastic):
            self._first_attempt = self._attempt()
            self._first_attempt.start()

    def run(self) -> Ending:
        """From the start to the end, in any thread. A failure of workers is part of the ending.

        Raises:
            LaunchError: the workers could not be started.
            BaseException: what the function raises, where it runs in this process.
        """
        if self.is_inline:
            return self._run_inline()
        if self._first_attempt is None:
            assert self._run_attempts is not None, "several machines need nodes.runner.run_attempts"
            return self._ending(*self._run_attempts(self))
        report, outcomes = self._first_attempt.watch()
        self._first_attempt = None
        while self._wants_restart(report):
            self._restart(report)
            report, outcomes = self._run_attempt(self._attempt())
        return self._ending(report, outcomes)

    def close(self) -> None:
        """Release the call and what was prepared for further starts, and end workers that are not watched yet."""
        if self._first_attempt is not None:
            self._first_attempt.close()
            self._first_attempt = None
        if self._saved is not None:
            self._saved.close()
            self._saved = None
        self.spec, self.plan = self.spec.without_call(), replace(self.plan, modules={})

    # --- attempts ------------------------------------------------------------------------------------------------

    def run_in_world(
        self, topology: Topology, peers: Peers, restart_count: int
    ) -> tuple[AttemptReport, dict[int, Outcome]]:
        """Run one attempt as a part of a world of several nodes.

        Args:
            topology: of the first rank of this node.
            peers: the other nodes.
            restart_count: how often workers were started before, the same number on all nodes.
        """
        self.place = topology
        self.num_processes = topology.world_size
        self.plan = judge_again(self.plan, self.spec)
        self._announce()
        return self._run_attempt(self._attempt(peers, restart_count))

    def was_stopped(self, report: AttemptReport) -> bool:
        """Return whether the job was to end, so that no attempt may follow."""
        return report.interrupted or report.cancelled or self.requests.terminations > 0

    def _wants_restart(self, report: AttemptReport) -> bool:
        is_over = report.is_success or self.was_stopped(report)
        return not is_over and self.attempt < self.spec.max_restarts

    def _restart(self, report: AttemptReport) -> None:
        """Keep what went wrong in words, and number the next attempt."""
        self.keep_failure(report)
        self.attempt += 1
        self.plan = judge_again(self.plan, self.spec)
        text = (
            f"{self.past_failures[-1]}; starting all ranks again "
            f"(restart {self.attempt} of at most {self.spec.max_restarts}) "
            f"by {self.plan.start_method}: {self.plan.reason}"
        )
        self.emit(Note.of_job(text, "warning"))
        self.pids = {}
        self._announce()

    def keep_failure(self, report: AttemptReport) -> None:
        """Keep the failure of this attempt in words, for the errors of later ones."""
        failure = failure_of(report, self.pids, self.log, self.attempt)
        self.past_failures.append(f"attempt {self.attempt}: {failure.sentence}")

    def _run_attempt(self, attempt: Attempt) -> tuple[AttemptReport, dict[int, Outcome]]:
        attempt.start()
        return attempt.watch()

    def _attempt(self, peers: Peers | None = None, restart_count: int = 0) -> Attempt:
        return Attempt(
            spec=self.spec,
            number=self.attempt,
            place=self.place,
            backend=self.plan.backend,
            engine=engines.local(self.plan.start_method),
            num_threads=self.plan.num_threads,
            weights_of=tuple(self.plan.modules),
            log=self.log,
            requests=self.requests,
            emit=self.emit,
            show=self.show,
            saved=self._saved,
            peers=peers,
            restart_count=restart_count,
        )

    def _run_inline(self) -> Ending:
        rendezvous = RendezvousHost(self.spec.master_addr, self.spec.master_port)
        try:
            rendezvous.host()
            topology = Topology(master_addr=self.spec.master_addr, master_port=rendezvous.port)
            call = (self.spec.function, self.spec.args)
            spec, backend = self.spec, self.plan.backend
            value = run_inline(
                call, topology, backend, spec.defaults, self.emit, spec.environment, spec.spans_devices
            )
        finally:
            rendezvous.close()
        return Ending("done", values={0: value})

    def _announce(self) -> None:
        self.emit(
            JobStarted(
                rank=-1,
                time_s=time.time(),
                function_name=self.spec.function_name,
                num_processes=self.num_processes,
                backend=self.plan.backend.name,
                start_method=self.plan.start_method,
                reason=self.plan.reason,
                detour=self.plan.detour,
                log_dir=str(self.log.attempt_path(self.attempt)),
                attempt=self.attempt,
                label_template=self.spec.log_line_prefix_template,
                spans_devices=self.spec.spans_devices,
                mixed_precision=self.spec.mixed_precision,
                first_rank=self.place.rank,
            )
        )

    # --- what is left --------------------------------------------------------------------------------------------

    def _ending(self, report: AttemptReport, outcomes: dict[int, Outcome]) -> Ending:
        left_behind = list(report.unkillable.values())
        if report.cancelled:
            text = f"{self.spec.function_name} was cancelled; logs: {self.log.path}"
            return Ending("cancelled", JobCancelled("\n".join([text, *left_behind])))
        if report.interrupted:
            error = KeyboardInterrupt(*["\n".join(left_behind)] if left_behind else [])
            return Ending("interrupted", error)
        if not report.is_success:
            failure = failure_of(report, self.pids, self.log, self.attempt, self.past_failures)
            return Ending("failed", failure.error, failure.rank, failure.headline)
        kept = self._take_weights(report, outcomes)
        self._tell_of_left_weights(report)
        if left := early_leavers(report):
            self.emit(Note.of_job(left, "warning"))
        lost = _result_error(report, outcomes)
        values = {rank: outcome.value for rank, outcome in outcomes.items()}
        return Ending("done", lost, is_early=report.stopped_early, values=values, weights=kept)

    def _take_weights(
        self, report: AttemptReport, outcomes: dict[int, Outcome]
    ) -> dict[Place, dict[str, Any]]:
        """Load what workers trained into the kernel's modules; returns what did not fit them."""
        if self.ranks[0] not in outcomes:
            return {}
        errors = outcomes[self.ranks[0]].weights_errors
        unsent = _unsent(report)
        back = weights.join([outcomes[rank].weights for rank in self.ranks if rank in outcomes])
        back = {place: state for place, state in back.items() if place not in unsent}  # all parts, or none
        loaded = weights.load_back(self.plan.modules, back, errors)
        for line in loaded.lines:
            self.emit(Note.of_job(line))
        for line in (*loaded.warnings, *weights.unsent_lines(self.plan.modules, unsent)):
            self.emit(Note.of_job(line, "warning"))
        # What is in the kernel's module need not be in memory once more, for as long as this job is the last one.
        return {
            place: weights.assembled(state, self.plan.modules[place])
            for place, state in back.items()
            if place not in loaded.places
        }

    def _tell_of_left_weights(self, report: AttemptReport) -> None:
        """A job that trained, and was given no module: its weights may be wanted all the same."""
        has_trained = any(sample.loss is not None for sample in report.last_samples)
        if has_trained and self.spec.sync_weights and not self.plan.modules:
            text = left_weights.sentence(self.spec.function, self.spec.function_name)
            if text:
                self.emit(Note.of_job(text))

    def emit(self, event: Event) -> None:
        """Send an event to the listeners."""
        if isinstance(event, Started):
            self.pids[event.rank] = event.pid
        self._emit_job(event)


def _unsent(report: AttemptReport) -> dict[Place, str]:
    """Why ranks whose function returned did not send weights that they had announced, by place."""
    reasons: dict[Place, str] = {}
    for rank, finished in sorted(report.finished.items()):
        sent = report.weights.get(rank, {})
        missing = [place for place in finished.sends if place not in sent]
        reasons |= dict.fromkeys(missing, _death_while_sending(report, rank)) if missing else {}
        for place, event in sent.items():
            if event.error:
                reasons[place] = f"rank {rank} could not send them ({event.error})"
    return reasons


def _death_while_sending(report: AttemptReport, rank: int) -> str:
    status, time_s = report.exits[rank]
    evidence = memory_evidence(report, RootCause(rank, status=status, time_s=time_s))
    what = f"rank {rank} {how_ended(status)} while it sent them"
    return ". ".join([what, *(line.rstrip(".") for line in evidence[:1])])


def _result_error(report: AttemptReport, outcomes: dict[int, Outcome]) -> ResultError | None:
    """What to raise when a return value could not travel whole; the parts that could are kept in the error."""
    for rank, outcome in sorted(outcomes.items()):
        unpicklable = report.finished[rank].contents.unpicklable
        if unpicklable:
            why = f"can't be pickled: {'; '.join(unpicklable)}. Everything else of it is in this error's .partial"
        elif outcome.value_error:
            why = f"can't be rebuilt in this process: {outcome.value_error}"
        else:
            continue
        return ResultError(
            f"the function finished on every rank, but rank {rank}'s return value {why}; the trained weights were "
            "kept. Return tensors, numbers and plain containers.",
            partial=outcome.value,
        )
    return None

"""Job: a launch as a future. ``notebook_launcher`` waits for one; with ``background=True`` it hands one out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from nblaunch import engines
from nblaunch.engines.inline import run_inline
from nblaunch.errors import JobCancelled, ResultError
from nblaunch.events import Event, JobFinished, JobStarted, Metric, Note, Started
from nblaunch.launch import left_behind, weights
from nblaunch.launch.attempt import Attempt
from nblaunch.launch.diagnosis.failure import failure_of
from nblaunch.launch.diagnosis.rendering import hide_launcher
from nblaunch.launch.diagnosis.report import AttemptReport
from nblaunch.launch.joblog import JobLog
from nblaunch.launch.logtail import read_log
from nblaunch.launch.metrics import frame_of, row_of
from nblaunch.launch.nodes import NodeLink
from nblaunch.launch.preflight import LaunchPlan
from nblaunch.launch.rendezvous import RendezvousHost
from nblaunch.launch.requests import StopRequests, interrupts_as_requests
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.board import Sample
from nblaunch.wire.nodes import Formed
from nblaunch.wire.outbox import Outcome
from nblaunch.worker.failure import without_own_frames

if TYPE_CHECKING:
    import pandas


class Listener(Protocol):
    """Whoever wants to know what happens: dashboards, tests. Must not raise, nor block for long."""

    def on_event(self, event: Event) -> None: ...

    def on_samples(self, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class Job:
    """One launch, running or ended.

    A job is made by ``notebook_launcher(..., background=True)``; :func:`last_job` gives the last one that this
    process started, however it ended.
    """

    def __init__(self, spec: LaunchSpec, plan: LaunchPlan, listeners: Sequence[Listener]) -> None:
        self.spec = spec
        self.plan = plan
        self.num_processes = plan.num_processes
        self._place = Topology(
            world_size=plan.num_processes, local_world_size=plan.num_processes, master_addr=spec.master_addr
        )
        self.pids: dict[int, int] = {}
        self.metrics: list[dict[str, Any]] = []
        self.attempt = 0
        self._log = JobLog(spec.log_dir)
        self._listeners = list(listeners)
        self._requests = StopRequests()
        self._has_started = threading.Event()
        self._has_ended = threading.Event()
        self._status = "starting"
        self._values: dict[int, Any] = {}
        self._weights: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._past_failures: list[str] = []
        self._end_lock = threading.Lock()
        self._at_end: list[Callable[[], None]] = []
        self._show_again: Callable[[], bool] | None = None

    # --- for the person ------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and return rank 0's value (every rank's, in a list, if launched with ``return_all``).

        Args:
            timeout: seconds to wait; None = as long as it takes.

        Raises:
            TimeoutError: the job still runs after ``timeout`` seconds. It goes on.
            BaseException: what failed in a worker, with its original type; see :mod:`nblaunch.errors` for the others.
        """
        __tracebackhide__ = True
        self.wait(timeout)
        self._raise_error()
        return self.results() if self.spec.return_all else self._values.get(self.ranks[0])

    def results(self, timeout: float | None = None) -> list[Any]:
        """Like :meth:`result`, for all ranks. Without ``return_all`` only rank 0's value was kept; others are None."""
        __tracebackhide__ = True
        self.wait(timeout)
        self._raise_error()
        return [self._values.get(rank) for rank in self.ranks]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what :meth:`result` would raise; None if the job succeeded."""
        self.wait(timeout)
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            TimeoutError: the job still runs after ``timeout`` seconds. It goes on.
        """
        if not self._has_ended.wait(timeout):
            raise TimeoutError(f"{self!r} still runs after {timeout} s")

    def __await__(self) -> Generator[Any, None, Any]:
        """``await job`` in a cell: :meth:`result`, with the kernel's event loop free while the job runs."""
        return self._ended().__await__()

    @property
    def status(self) -> str:
        """``"starting"``, ``"running"``, ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``."""
        return self._status

    @property
    def is_running(self) -> bool:
        return not self._has_ended.is_set()

    @property
    def log_dir(self) -> Path:
        """The folder with every rank's log, by attempt."""
        return self._log.path

    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """Everything that a rank has printed by now, in the last attempt or in the one asked for.

        Raises:
            ValueError: there is no such rank.
        """
        if rank not in self.ranks:
            where = "" if len(self.ranks) == self.num_processes else " on this machine"
            raise ValueError(
                f"rank={rank} is not one of this job's ranks{where} ({self.ranks[0]} to {self.ranks[-1]})"
            )
        return read_log(self._log.log_path(rank, self.attempt if attempt is None else attempt))

    @property
    def ranks(self) -> range:
        """The ranks that run on this machine: all of the job, unless it has several machines."""
        return range(self._place.rank, self._place.rank + self._place.local_world_size)

    def metrics_frame(self) -> pandas.DataFrame:
        """What ``accelerator.log`` has logged by now, as a table: one row per step, one column per value.

        ``job.metrics`` is the same as a list, one dict per call, with ``step``, ``time_s`` (wall clock), ``rank`` and
        ``attempt``. Both can be looked at while the job runs: ``job.metrics_frame()["loss"].plot()``.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of(list(self.metrics))

    def weights(self) -> dict[int, dict[str, Any]]:
        """Position in ``args`` -> trained state dict of a module that did not fit the kernel's any more.

        Those that did are in the kernel's own modules.
        """
        return dict(self._weights)

    def stop(self) -> None:
        """Let training end early and well: ``accelerator.should_stop`` turns true at the same step on every rank.

        A loop that looks at it leaves, the function returns as usual, and :meth:`result` has its value. A function
        that never looks is not affected.
        """
        self._requests.stop()

    def stacks(self) -> str:
        """Where every rank is right now, as lines of the user's code; equal ones together. Takes up to a second."""
        return self.ask_stacks().result()

    def ask_stacks(self) -> Future[str]:
        """The same as a future, without waiting for it."""
        return self._requests.ask_stacks()

    def interrupt(self) -> None:
        """Ask every worker to stop, as the notebook's interrupt button does; the second time kill them."""
        self._requests.interrupt()

    def terminate(self, grace_s: float = 20.0) -> None:
        """End the job as a batch system's SIGTERM should: like :meth:`stop`; when time is up, like :meth:`interrupt`.

        Where no rank looks at ``accelerator.should_stop`` or handles SIGTERM itself, ranks are interrupted soon.

        Args:
            grace_s: seconds in which ranks may write a checkpoint and return.
        """
        self._requests.terminate(grace_s)

    def cancel(self) -> None:
        """Kill every worker at once. :meth:`result` then raises :class:`nblaunch.errors.JobCancelled`."""
        self._requests.cancel()

    def __repr__(self) -> str:
        where = f"{self.num_processes} {self.plan.backend.name} workers"
        return f"<Job {self.spec.function_name} on {where}, {self.status}>"

    def _ipython_display_(self) -> None:
        """As the last line of a cell, a job shows how it is doing or how it ended; outside of notebooks, its repr.

        IPython takes the error for "as usual".
        """
        if self._show_again is None or not self._show_again():
            raise NotImplementedError("there is nothing to show but the repr")

    @property
    def was_interrupted_at_the_end(self) -> bool:
        """Whether an interrupt came when the workers had done all and only their results were taken in."""
        return self._status == "done" and self._requests.interrupts > 0

    # --- for the launcher ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end in this thread. What goes wrong is kept for :meth:`result`, not raised."""
        try:
            self._run_attempts()
        except KeyboardInterrupt as error:
            self._conclude("interrupted", error)
        except BaseException as error:
            self._conclude("failed", error)
        finally:
            self._requests.close()
            self._log.end()
            with self._end_lock:
                self._has_ended.set()
            self._has_started.set()  # last: whoever waits for a start looks next at whether the job has ended
            for call in self._at_end:
                call()

    def show_with(self, show_again: Callable[[], bool]) -> None:
        """Let ``show_again()`` show this job in the running cell; it returns False where it can't."""
        self._show_again = show_again

    async def _ended(self) -> Any:
        __tracebackhide__ = True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        with self._end_lock:
            if self.is_running:
                self._at_end.append(wake)
            else:
                ended.set()
        await ended.wait()
        return self.result()

    def run_in_background(self) -> None:
        """Run in a thread; returns when the workers run, or when they could not be started."""
        thread = threading.Thread(target=self.run, name=f"nblaunch-{self.log_dir.name}", daemon=True)
        thread.start()
        self._has_started.wait()

    def raise_if_not_started(self) -> None:
        """Raise what kept the workers from starting, if anything did."""
        __tracebackhide__ = True
        if self.is_running or self.pids:
            return
        self._raise_error()

    def _run_attempts(self) -> None:
        if not self.spec.is_elastic:
            self._announce()
        for warning in self.plan.warnings:
            self._tell(Note.of_job(warning, "warning"))
        if self.plan.start_method == "inline":
            self._run_inline()
            return
        with interrupts_as_requests(self._requests):
            if self.spec.is_elastic:
                self._run_among_nodes()
                return
            report, outcomes = self._attempt().run()
            while self._wants_restart(report):
                self._restart(report)
                report, outcomes = self._attempt().run()
            self._conclude_attempt(report, outcomes)

    def _run_among_nodes(self) -> None:
        """Attempts as the agent of this machine wants them: it decides on restarts, with those of the others."""
        log_path = str(self._log.path / "agent.log")
        with NodeLink(
            self.spec, self.plan.num_processes, log_path, self._requests, self._tell, self._show
        ) as nodes:
            self._has_started.set()  # a cell need not wait for other machines
            report, outcomes = self._run_in(nodes.first_world(), nodes)
            while not self._was_stopped(report) and (formed := nodes.next_world()) is not None:
                self.attempt += 1
                self.pids = {}
                report, outcomes = self._run_in(formed, nodes)
            if nodes.last_error and not report.is_success:
                self._past_failures.append(nodes.last_error)
        self._conclude_attempt(report, outcomes)

    def _run_in(self, formed: Formed, nodes: NodeLink) -> tuple[AttemptReport, dict[int, Outcome]]:
        self._place = formed.place
        self.num_processes = formed.place.world_size
        self._announce()
        report, outcomes = self._attempt(nodes, formed.restart_count).run()
        nodes.conclude(report)
        is_change = report.elsewhere.wants_restart and not report.elsewhere.has_cause
        failed = not (report.is_success or self._was_stopped(report) or is_change)
        if failed and self.spec.max_restarts:
            self._keep_failure(report)
            self._tell(Note.of_job(self._past_failures[-1], "warning"))
        return report, outcomes

    def _was_stopped(self, report: AttemptReport) -> bool:
        return report.interrupted or report.cancelled or self._requests.terminations > 0

    def _wants_restart(self, report: AttemptReport) -> bool:
        is_over = report.is_success or self._was_stopped(report)
        return not is_over and self.attempt < self.spec.max_restarts

    def _restart(self, report: AttemptReport) -> None:
        """Keep what went wrong in words, and number the next attempt."""
        self._keep_failure(report)
        self.attempt += 1
        text = (
            f"{self._past_failures[-1]}; starting all ranks again "
            f"(restart {self.attempt} of at most {self.spec.max_restarts})"
        )
        self._tell(Note.of_job(text, "warning"))
        self.pids = {}
        self._announce()

    def _keep_failure(self, report: AttemptReport) -> None:
        failure = failure_of(report, self.pids, self._log, self.attempt)
        self._past_failures.append(f"attempt {self.attempt}: {failure.sentence}")

    def _attempt(self, nodes: NodeLink | None = None, restart_count: int = 0) -> Attempt:
        return Attempt(
            spec=self.spec,
            number=self.attempt,
            place=self._place,
            backend=self.plan.backend,
            engine=engines.local(self.plan.start_method),
            num_threads=self.plan.num_threads,
            weights_of=self.plan.weights_of,
            log=self._log,
            requests=self._requests,
            tell=self._tell,
            show=self._show,
            nodes=nodes,
            restart_count=restart_count,
        )

    def _run_inline(self) -> None:
        self._status = "running"
        rendezvous = RendezvousHost(self.spec.master_addr, self.spec.master_port)
        try:
            rendezvous.host()
            topology = Topology(master_addr=self.spec.master_addr, master_port=rendezvous.port)
            call = (self.spec.function, self.spec.args)
            self._values[0] = run_inline(call, topology, self.plan.backend, self.spec.defaults, self._tell)
        finally:
            rendezvous.close()
        self._conclude("done")

    def _announce(self) -> None:
        self._tell(
            JobStarted(
                rank=-1,
                time_s=time.time(),
                function_name=self.spec.function_name,
                num_processes=self.num_processes,
                backend=self.plan.backend.name,
                start_method=self.plan.start_method,
                reason=self.plan.reason,
                detour=self.plan.detour,
                log_dir=str(self._log.attempt_path(self.attempt)),
                attempt=self.attempt,
                label_template=self.spec.log_line_prefix_template,
                strategy=self.spec.strategy,
                mixed_precision=self.spec.mixed_precision,
            )
        )

    def _conclude_attempt(self, report: AttemptReport, outcomes: dict[int, Outcome]) -> None:
        self._values = {rank: outcome.value for rank, outcome in outcomes.items()}
        if report.cancelled:
            self._conclude(
                "cancelled", JobCancelled(f"{self.spec.function_name} was cancelled; logs: {self.log_dir}")
            )
        elif report.interrupted:
            self._conclude("interrupted", KeyboardInterrupt())
        elif not report.is_success:
            failure = failure_of(report, self.pids, self._log, self.attempt, self._past_failures)
            self._conclude("failed", failure.error, failure.rank, failure.headline)
        else:
            self._take_weights(outcomes)
            self._tell_of_left_weights(report)
            self._conclude("done", self._result_error(report, outcomes), is_early=report.stopped_early)

    def _take_weights(self, outcomes: dict[int, Outcome]) -> None:
        if self.ranks[0] not in outcomes:
            return
        errors = outcomes[self.ranks[0]].weights_errors
        back = weights.join([outcomes[rank].weights for rank in self.ranks if rank in outcomes])
        lines, loaded = weights.load_back(self.spec.args, back, errors)
        # What is in the kernel's module need not be in memory once more, for as long as this job is the last one.
        self._weights = {
            position: weights.assembled(state) for position, state in back.items() if position not in loaded
        }
        for position, line in zip(sorted({*back, *errors}), lines, strict=False):
            kind = "note" if position in loaded and position not in errors else "warning"
            self._tell(Note.of_job(line, kind))

    def _tell_of_left_weights(self, report: AttemptReport) -> None:
        """A job that trained, and was given no module: its weights may be wanted all the same."""
        has_trained = any(sample.loss is not None for sample in report.last_samples)
        if has_trained and self.spec.sync_weights and not self.plan.weights_of:
            text = left_behind.sentence(self.spec.function, self.spec.function_name)
            if text:
                self._tell(Note.of_job(text))

    def _result_error(self, report: AttemptReport, outcomes: dict[int, Outcome]) -> ResultError | None:
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

    def _conclude(
        self,
        status: str,
        error: BaseException | None = None,
        failed_rank: int | None = None,
        headline: str = "",
        *,
        is_early: bool = False,
    ) -> None:
        self._status = status
        self._error = error
        # An error of another process has no traceback; one of the function run inline begins at the function.
        self._traceback = without_own_frames(error.__traceback__) if error is not None else None
        message = headline or (f"{type(error).__name__}: {error}" if error is not None else "")
        self._tell(
            JobFinished(
                rank=-1,
                time_s=time.time(),
                outcome=status,
                failed_rank=failed_rank,
                message=message,
                is_early=is_early,
            )
        )
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def _tell(self, event: Event) -> None:
        if isinstance(event, Started):
            self.pids[event.rank] = event.pid
            self._status = "running"
            self._has_started.set()
        elif isinstance(event, Metric):
            self.metrics.append(row_of(event, self.attempt))
        for listener in self._listeners:
            listener.on_event(event)

    def _show(self, samples: Sequence[Sample]) -> None:
        for listener in self._listeners:
            listener.on_samples(samples)

    def _raise_error(self) -> None:
        __tracebackhide__ = True
        if self._error is None:
            return
        error = self._error.with_traceback(self._traceback)
        hide_launcher(error)
        try:
            raise error
        finally:
            del error  # or the traceback, which refers to this frame, would keep itself alive


_last_job: Job | None = None


def last_job() -> Job | None:
    """The last job that this process started, whatever became of it; None before the first."""
    return _last_job


def remember(job: Job) -> None:
    """Make ``job`` the one that :func:`last_job` returns."""
    global _last_job
    _last_job = job

"""JobRunner: runs a job, attempt after attempt, until one succeeds or no restart is left.

    start    in the main thread, while the kernel runs no other code: announce the job, start the first workers
    finish   in that thread or another: supervise the workers, restart them after failures, load their results

A launch from another thread starts its workers in the thread that runs ``finish``, because the system kills workers
when the thread that started them ends (``PR_SET_PDEATHSIG``).

The caller sees the runner as a :class:`nblaunch.launcher.job.Job`. On several machines (``NodeRunner`` in
``nodes/link.py``), ``start`` only prepares the job, and ``finish`` starts each attempt once the rendezvous is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from nblaunch import formatting
from nblaunch.diagnosis.exceptions import clear_launcher
from nblaunch.diagnosis.failure import failure_of
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import find_root_cause
from nblaunch.errors import LaunchError
from nblaunch.events import Note
from nblaunch.host import signal_handlers
from nblaunch.launcher.attempt import Attempt, RunningAttempt, start_attempt
from nblaunch.launcher.debug_client import DebugClient, KeptFailure
from nblaunch.launcher.job import Job, Listener
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import EndedAttempt, JobOutcome
from nblaunch.launcher.plan import LaunchPlan, replan_start_method
from nblaunch.launcher.requests import JobRequests, interrupts_as_requests
from nblaunch.launcher.store import StoreHost
from nblaunch.launcher.supervisor import Supervisor
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.inline import run_inline
from nblaunch.start_methods.saved_call import SavedCall, save_call
from nblaunch.topology import Topology
from nblaunch.wire.board import Slot
from nblaunch.wire.outbox import RankResult
from nblaunch.worker.inheritance import random_states
from nblaunch.worker.inheritance.random_states import RandomStates

_ADVICE = (
    "with background=True and max_restarts or several machines, workers can start after the call has "
    "returned, so they load a pickled copy of it. Without max_restarts, or without background=True, nothing "
    "needs to be pickled"
)

_KEPT = (
    "{} stay where they were. In the next cell, nblaunch.debug() opens pdb at the failure, and "
    "last_job().inspect('name') and last_job().compare() show variables of every rank. The workers end with "
    "the next launch, with last_job().release(), or after 30 minutes"
)

_KEPT_S = 1800.0
"""How long workers are kept for the debugger."""

_LOOK_S = 0.05
"""Seconds between checks for delayed signal handlers."""


class JobRunner(Job):
    """Runs one job, once. On several machines, ``NodeRunner`` (``nodes/link.py``) runs attempts with other nodes.

    Args:
        spec: what to run.
        plan: how to run it.
        listeners: receive its events.
        on_prompts: called with the runner while ranks are waiting for input to pdb.
        log: the job's log folder; None = a new folder.
        requests: the job's requests, if they may arrive before it starts.

    Attributes:
        spec: what to run; a job that has ended drops the function and its arguments.
        plan: how its workers start; a job that has ended drops the modules in the arguments.
        past_failures: one line for each attempt that failed.
        slots: rank -> its slot of the board, in the current attempt.

    Raises:
        LaunchError: a pipe or the log folder could not be created.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        plan: LaunchPlan,
        listeners: Sequence[Listener] = (),
        on_prompts: Callable[[JobRunner], None] | None = None,
        log: JobLog | None = None,
        requests: JobRequests | None = None,
    ) -> None:
        self.log: JobLog
        self.requests: JobRequests
        super().__init__(spec, plan, log or JobLog(spec.log_dir), requests or JobRequests(), listeners)
        self.past_failures: list[str] = []
        self.slots: Mapping[int, Slot] = {}
        self._has_begun = False
        self._on_prompts = on_prompts
        self._saved: SavedCall | None = None
        self._random_states: RandomStates | None = None
        self._must_advance = False
        self._supervisor: Supervisor | None = None

    # --- from the start to the end -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the job in this thread until it ends.

        :attr:`outcome` keeps failures and interrupts, which ``Job.result`` raises.

        Raises:
            KeyboardInterrupt: the job was interrupted but is done, because the function handled the interrupt or had
                already returned on every rank. The rest of the cell must not run.
        """
        with ExitStack() as stack:
            if not self._is_inline:  # an inline function's own handlers apply
                stack.enter_context(signal_handlers.held_back())
                stack.enter_context(interrupts_as_requests(self.requests.interrupt))
            self._start()
            try:
                self._finish()
            finally:
                self._advance_generators()
        if self.outcome is not None and self.outcome.status == "done" and self.requests.interrupts:
            raise self.outcome.late_interrupt("last_job().result()")

    def run_in_background(self) -> None:
        """Start the workers and continue in a thread; return once they are running or have failed to start.

        An interrupt during the start ends the job; this method then returns once the job has ended.

        Raises:
            BaseException: an exception that a signal handler raised; the job has ended.
        """
        with signal_handlers.held_back():
            with interrupts_as_requests(self.requests.interrupt):
                self._begin_in_background()
            if self.requests.interrupts:
                self._ended.wait()

    def _begin_in_background(self) -> None:
        """Start the workers and the thread that watches them; return when they are running, or can't be started."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            self._start()
            self._advance_generators()
        begun = threading.Event()
        thread = threading.Thread(
            target=self._run_in_thread,
            args=(not is_main, begun),
            name=f"nblaunch-{self.log.path.name}",
            daemon=True,
        )
        try:
            thread.start()
            begun.wait()
        except RuntimeError as error:
            text = (
                f"the thread that watches the workers could not be started: {error}. Use fewer processes, or close "
                "other programs."
            )
            self._end(JobOutcome.of_error(LaunchError(text)))
        self._wait_for_launch()

    def _wait_for_launch(self) -> None:
        """Wait until the workers are running, or can't be started."""
        try:
            while not self._launch_settled.wait(_LOOK_S):
                signal_handlers.run_arrived()
            signal_handlers.run_arrived()
        except BaseException:  # raised by a handler, so the caller never gets this job
            self.requests.cancel()
            self._ended.wait()
            raise

    def end_unwatched(self, error: BaseException) -> None:
        """End the job after ``error`` interrupted its caller; do nothing if it has ended."""
        with signal_handlers.held_back():
            if not self.is_running:
                return
            if self._has_begun:
                self.requests.cancel()
                self._ended.wait()
            else:
                self._end(JobOutcome.of_error(error))

    def _start(self) -> None:
        self._has_begun = True
        try:
            self._start_job()
        except BaseException as error:
            self._end(JobOutcome.of_error(error))

    def _start_job(self) -> None:
        """Announce the job, prepare for later starts, and start the first workers.

        If the function runs in this process, nothing starts here; :meth:`_finish` calls the function.
        """
        self._announce_attempt()
        self._prepare_starts()
        if self._is_inline:
            self.status = "running"
        else:
            self._start_attempt()

    def _prepare_starts(self) -> None:
        """Emit warnings, and save the call and the random states for later starts."""
        for warning in self.plan.warnings:
            self.emit(Note.of_job(warning, "warning"))
        if self.spec.max_restarts > 0:
            self._random_states = RandomStates.of_this_process()
        if self.plan.starts_later:
            self._saved = save_call((self.spec.function, self.spec.args), _ADVICE)

    def _finish(self) -> None:
        """Run the job that :meth:`_start` has started until it ends; do nothing if it has already ended."""
        if self.is_running:
            self._end(self._run_to_the_end())

    def _run_to_the_end(self) -> JobOutcome:
        # Do not store the outcome in a variable, because an inline function's traceback refers to this frame.
        try:
            return self._run_inline() if self._is_inline else self._finish_workers()
        except BaseException as error:
            if isinstance(error, LaunchError) and self.past_failures:  # otherwise past failures would be lost
                text = f"the job could not be restarted: {error}"
                return JobOutcome.of_error(LaunchError("\n".join([text, *self.past_failures])))
            return JobOutcome.of_error(error)

    def _run_in_thread(self, starts_here: bool, begun: threading.Event) -> None:
        """Finish the job in its own thread.

        The thread keeps running while workers are kept, because the workers end when it does.

        Args:
            starts_here: start the workers in this thread, because the calling thread may end before them.
            begun: set when the workers have started.
        """
        try:
            if starts_here:
                self._start()
                self._advance_generators()
        finally:
            begun.set()
        self._finish()
        if self.kept is not None:
            self.kept.wait()

    def _end(self, outcome: JobOutcome) -> None:
        try:
            self._publish(outcome)
        except BaseException as error:  # raised by a listener
            self._publish(JobOutcome.of_error(error))
        finally:
            self._release()
            self._launch_settled.set()  # set after the end, which waiting threads check next

    def _publish(self, outcome: JobOutcome) -> None:
        """Set the outcome of the job, and send it to the listeners as their last event."""
        self.status = outcome.status
        self.outcome = outcome.with_traceback()
        self.emit(self.outcome.end_event())
        self._close_listeners()

    def _release(self) -> None:
        """Release the call and what was prepared for further starts; end workers not yet supervised."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        if self._saved is not None:
            self._saved.close()
            self._saved = None
        if not self._is_inline and self.outcome is not None and self.outcome.error is not None:
            clear_launcher(self.outcome.error)
        self.spec, self.plan = self.spec.without_call(), replace(self.plan, modules={}, optimizers={})
        self.requests.close()
        if self.debugger is not None and self.kept is None:
            self.debugger.close()
        self.log.end()
        self._ended.set()

    # --- attempts ------------------------------------------------------------------------------------------------

    def _must_not_restart(self, report: AttemptReport) -> bool:
        """Return whether an interrupt, a cancellation or SIGTERM has arrived, even after the attempt failed."""
        requests = self.requests
        return report.cancelled or requests.interrupts > 0 or requests.terminations > 0

    def _next_attempt(self) -> None:
        """Move on to the next attempt, and decide again how its workers start."""
        self.attempt += 1
        self.pids = {}
        self.plan = replan_start_method(self.plan, self.spec)

    def _record_failure(self, report: AttemptReport) -> str:
        """Record this attempt's failure as a line for the errors of later attempts; return the line."""
        failure = failure_of(report, self.pids, self.log, self.attempt)
        self.past_failures.append(f"attempt {self.attempt}: {failure.sentence}")
        return self.past_failures[-1]

    def _finish_workers(self) -> JobOutcome:
        """Run all attempts, conclude the job and load its weights."""
        report, rank_results = self._finish_attempts()
        outcome, notes = EndedAttempt(self._make_attempt(), report, rank_results).conclude(
            self.pids, self.past_failures
        )
        for note in notes:
            self.emit(note)
        if outcome.status == "failed" and self.requests.interrupts and self.attempt < self.spec.max_restarts:
            self.emit(Note.of_job("ranks are not started again, because the job was interrupted"))
        return outcome

    def _finish_attempts(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Supervise the workers and restart them after failures; return the last report, and the results by rank."""
        report, rank_results = self._supervise()
        while self._wants_restart(report):
            self._restart(report)
            report, rank_results = self._supervise()
        return report, rank_results

    def _keep_workers(self, supervisor: Supervisor, report: AttemptReport) -> None:
        """Keep the running workers until :attr:`kept` is released."""
        assert self.debugger is not None, "workers are kept for the debugger"
        root = find_root_cause(report)
        failed_rank = root.rank if root is not None else report.kept[0]
        self.kept = _KeptWorkers(supervisor, self.debugger, failed_rank)
        self.emit(Note.of_job(_KEPT.format(formatting.ranks(report.kept))))

    def _wants_restart(self, report: AttemptReport) -> bool:
        is_over = report.is_success or self._must_not_restart(report)
        return not is_over and self.attempt < self.spec.max_restarts

    def _restart(self, report: AttemptReport) -> None:
        failure = self._record_failure(report)
        before = self.plan.start_method
        self._next_attempt()
        text = f"{failure}; starting all ranks again (restart {self.attempt} of at most {self.spec.max_restarts})"
        if self.plan.start_method != before:
            text += f" by {self.plan.start_method}: {self.plan.reason}"
        self.emit(Note.of_job(text, "warning"))
        self._announce_attempt()
        self._start_attempt()

    def _make_attempt(self) -> Attempt:
        """Return the current attempt without the port of its store, which only a running attempt has."""
        number = self.attempt
        return Attempt(self.spec, self.plan, number, number, self.topology, self.log, self._saved)

    def _announce_attempt(self) -> None:
        self.emit(self._make_attempt().start_event())

    def _start_attempt(self) -> None:
        running = self._start_from_launch_states()
        self.slots = {rank: running.board.slot(rank) for rank in running.attempt.ranks}
        commands = running.commands
        self.debugger = DebugClient(commands) if commands else None
        on_prompts = None if self._on_prompts is None else partial(self._on_prompts, self)
        self._supervisor = Supervisor(
            running, self.requests, self.emit, self.emit_readings, self.debugger, on_prompts
        )

    def _start_from_launch_states(self) -> RunningAttempt:
        """Start the workers with the launch's random states.

        A restart repeats the random numbers of the first attempt, like a script that is run again with its seed.
        """
        attempt = self._make_attempt()
        if self.attempt == 0:
            running = start_attempt(attempt)
            self._must_advance = True
            return running
        if self._saved is not None or self._random_states is None:
            return start_attempt(attempt)
        with self._random_states.in_place():
            return start_attempt(attempt)

    def _advance_generators(self) -> None:
        """Advance this process's generators once, after workers have been started with their states.

        A launch that blocks the cell calls this at its end, because workers that are starting need the processors.
        """
        if self._must_advance:
            self._must_advance = False
            random_states.move_on()

    def keep_weights(self, wanted: bool) -> None:
        """Set whether interrupted ranks send their trained states. Signal handlers may call this."""
        with suppress(ValueError):  # the attempt has ended
            for slot in self.slots.values():
                slot.keeps_weights = int(wanted)

    def _supervise(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Supervise the started workers until they end; return the report, and the results by rank."""
        assert self._supervisor is not None, "no attempt was started"
        supervisor, self._supervisor = self._supervisor, None
        report, rank_results = supervisor.run()
        if report.kept:
            self._keep_workers(supervisor, report)
        return report, rank_results

    # --- the function in this process ----------------------------------------------------------------------------

    @property
    def _is_inline(self) -> bool:
        return self.plan.start_method == "inline"

    def _run_inline(self) -> JobOutcome:
        spec = self.spec
        store = StoreHost(spec.master_addr, spec.master_port)
        try:
            store.start()
            value = run_inline(
                (spec.function, spec.args),
                Topology(master_addr=spec.master_addr, master_port=store.port),
                self.plan.backend,
                spec.accelerator_defaults,
                self.emit,
                spec.environment,
                spec.is_spmd,
            )
        except LaunchError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                return JobOutcome("done", values={0: None})  # as in a worker
            return replace(JobOutcome.of_error(error), failed_rank=0)
        finally:
            store.close()
        return JobOutcome("done", values={0: value})


class _KeptWorkers(KeptFailure):
    """The workers of a failed job.

    Args:
        supervisor: supervisor of these workers.
        debugger: client of the debugger in each worker.
        failed_rank: rank whose failure is the root cause.
    """

    def __init__(self, supervisor: Supervisor, debugger: DebugClient, failed_rank: int) -> None:
        super().__init__(debugger, failed_rank)
        self._supervisor: Supervisor | None = supervisor
        self._timer = threading.Timer(_KEPT_S, self.release)
        self._timer.daemon = True
        self._timer.start()

    def _release(self) -> None:
        """End the workers as after a failure: let failed ones run their exit handlers, and stop the others."""
        self._timer.cancel()
        # The supervisor holds the function and its arguments, so drop the reference.
        supervisor, self._supervisor = self._supervisor, None
        try:
            if supervisor is not None:
                supervisor.end_kept()
        finally:
            self._debugger.close()

"""Job: a launch as a future. ``notebook_launcher`` waits for one; with ``background=True`` it hands one out."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from nblaunch.diagnosis.rendering import ShownAtCall, hide_launcher
from nblaunch.errors import LaunchError, ResultError
from nblaunch.events import Event, JobFinished, Metric, Started
from nblaunch.launcher.course import AttemptsRunner, Course, Ending
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.metrics import frame_of, row_of
from nblaunch.launcher.preflight import LaunchPlan
from nblaunch.launcher.requests import StopRequests, interrupts_as_requests
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import Sample
from nblaunch.wire.modules import Place
from nblaunch.worker.failure import without_own_frames

if TYPE_CHECKING:
    import pandas


class Listener(Protocol):
    """What receives the events of a job: dashboards, tests. Must not raise, nor block for long."""

    def on_event(self, event: Event) -> None:
        """Something happened, in the order in which it did on each rank."""

    def on_samples(self, samples: Sequence[Sample]) -> None:
        """What every rank does, several times a second."""

    def close(self) -> None:
        """The job is over: nothing follows."""


class Job:
    """One launch, running or ended.

    A job is made by ``notebook_launcher(..., background=True)``; :func:`last_job` gives the last one that this
    process started, however it ended.

    When it has ended, it keeps neither the function nor its arguments. It keeps what :meth:`result`, :meth:`weights`
    and the other methods give: for as long as it is the last job or referred to, or until :meth:`release`.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        plan: LaunchPlan,
        listeners: Sequence[Listener],
        run_attempts: AttemptsRunner | None = None,
    ) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._log = JobLog(spec.log_dir)
        self._listeners = list(listeners)
        self._requests = StopRequests()
        self._has_started = threading.Event()
        self._has_ended = threading.Event()
        self._status = "starting"
        self._ending = Ending(status="")  # none yet
        self._traceback: TracebackType | None = None
        self._course = Course(
            spec,
            plan,
            log=self._log,
            requests=self._requests,
            emit=self._emit,
            show=self._show,
            set_free=self._has_started.set,
            run_attempts=run_attempts,
        )
        self._end_lock = threading.Lock()
        self._at_end: list[Callable[[], None]] = []
        self._show_again: Callable[[], bool] | None = None
        self._is_released = False

    @property
    def spec(self) -> LaunchSpec:
        """What was to be run; of a job that has ended, without the function and its arguments."""
        return self._course.spec

    @property
    def plan(self) -> LaunchPlan:
        """How it was to be run; of a job that has ended, without the modules in its arguments."""
        return self._course.plan

    # --- for users ------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and return rank 0's value (every rank's, in a list, if launched with ``return_all``).

        Args:
            timeout: seconds to wait; None = as long as it takes.

        Raises:
            TimeoutError: the job still runs after ``timeout`` seconds. It goes on.
            RuntimeError: the result was released.
            BaseException: what failed in a worker, with its original type; see :mod:`nblaunch.errors` for the others.
        """
        __tracebackhide__ = True
        with ShownAtCall():
            self.wait(timeout)
            self._raise_error()
            self._check_kept()
        return self.results() if self.spec.return_all else self._ending.values.get(self.ranks[0])

    def results(self, timeout: float | None = None) -> list[Any]:
        """Like :meth:`result`, for all ranks. Without ``return_all`` only rank 0's value was kept; others are None."""
        __tracebackhide__ = True
        with ShownAtCall():
            self.wait(timeout)
            self._raise_error()
            self._check_kept()
        return [self._ending.values.get(rank) for rank in self.ranks]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what :meth:`result` would raise; None if the job succeeded."""
        self.wait(timeout)
        return self._ending.error

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
        """Whether the job has not ended, whichever way."""
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
        return self._log.read(rank, self.attempt if attempt is None else attempt)

    @property
    def ranks(self) -> range:
        """The ranks that run on this machine: all of the job, unless it has several machines."""
        return self._course.ranks

    @property
    def num_processes(self) -> int:
        """How many ranks the job has, on all machines."""
        return self._course.num_processes

    @property
    def attempt(self) -> int:
        """How often it was started again."""
        return self._course.attempt

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process, of the ranks of this machine that have started."""
        return dict(self._course.pids)  # it changes in the thread of the job

    def metrics_frame(self) -> pandas.DataFrame:
        """What ``accelerator.log`` has logged by now, as a table: one row per step, one column per value.

        ``job.metrics`` is the same as a list, one dict per call, with ``step``, ``time_s`` (wall clock), ``rank`` and
        ``attempt``. Both can be looked at while the job runs: ``job.metrics_frame()["loss"].plot()``.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of(list(self.metrics))

    def weights(self) -> dict[Place, dict[str, Any]]:
        """Position in ``args`` -> trained state dict of a module that did not fit the kernel's any more.

        One inside an argument has a path for a position: ``"args[0]['generator']"``. Those that fit are in the kernel's
        own modules.

        Raises:
            RuntimeError: they were released.
        """
        self._check_kept()
        return dict(self._ending.weights)

    def release(self) -> None:
        """Give up the memory of an ended job: its result, and weights that did not fit the kernel's modules.

        Logs, metrics, status and error stay. A job that is done and released has no :meth:`result` any more; one that
        failed still raises its error, without the variables that the traceback of a function run inline holds.

        Raises:
            RuntimeError: the job still runs.
        """
        if self.is_running:
            raise RuntimeError(f"{self!r} can't be released: wait for its end, or cancel() it")
        self._is_released = True
        self._ending = replace(self._ending, values={}, weights={})
        self._traceback = None
        if self._ending.error is not None:
            self._ending.error.__traceback__ = None
        if isinstance(self._ending.error, ResultError):
            self._ending.error.partial = None

    def _check_kept(self) -> None:
        if self._is_released:
            raise RuntimeError(f"{self!r} has given up its result and weights: release() was called")

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
        with nullcontext() if self._course.is_inline else interrupts_as_requests(self._requests):
            remember(self)
            self._start()
            self._finish()

    def _start(self) -> None:
        try:
            self._course.start()
            if self._course.is_inline:
                self._status = "running"
        except BaseException as error:
            self._end(_ending_by(error))

    def _finish(self) -> None:
        """Go on to the end from what :meth:`_start` has started."""
        if not self.is_running:
            return
        try:
            ending = self._course.run()
        except BaseException as error:
            ending = _ending_by(error)
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        try:
            self._conclude(ending)
        except BaseException as error:
            self._conclude(_ending_by(error))
        finally:
            self._course.close()
            if self._ending.error is not None and not self._course.is_inline:
                _clear_variables(self._ending.error)
            self._requests.close()
            self._log.end()
            with self._end_lock:
                self._has_ended.set()
            self._has_started.set()  # last: what waits for a start looks next at whether the job has ended
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
        """Start the workers and go on in a thread; returns when they run, or when they could not be started.

        An interrupt meanwhile ends the job, and this returns when it has ended.
        """
        with interrupts_as_requests(self._requests):
            remember(self)
            self._start()
            thread = threading.Thread(target=self._finish, name=f"nblaunch-{self.log_dir.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._end(_ending_by(LaunchError(_NO_THREAD.format(error))))
            self._has_started.wait()
            if self._requests.interrupts:
                self._has_ended.wait()

    def raise_if_not_started(self) -> None:
        """Raise what kept the workers from starting, if anything did.

        Raises:
            KeyboardInterrupt: the job was interrupted, and has ended.
            BaseException: why they did not start.
        """
        __tracebackhide__ = True
        if self.is_running or (self.pids and not self._requests.interrupts):
            return
        self._raise_error()
        if self._requests.interrupts:
            raise KeyboardInterrupt  # it was done before the interrupt had any effect

    def _conclude(self, ending: Ending) -> None:
        error = ending.error
        self._status = ending.status
        self._ending = ending
        # An error of another process has no traceback; one of the function run inline begins at the function.
        self._traceback = without_own_frames(error.__traceback__) if error is not None else None
        message = ending.headline or (f"{type(error).__name__}: {error}" if error is not None else "")
        self._emit(
            JobFinished(
                rank=-1,
                time_s=time.time(),
                outcome=ending.status,
                failed_rank=ending.failed_rank,
                message=message,
                is_early=ending.is_early,
            )
        )
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def _emit(self, event: Event) -> None:
        if isinstance(event, Started):
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
        if self._ending.error is None:
            return
        error = self._ending.error.with_traceback(self._traceback)
        hide_launcher(error)
        try:
            raise error
        finally:
            del error  # or the traceback, which refers to this frame, would keep itself alive


_NO_THREAD = (
    "the system refused the thread that watches the workers: {}. If a limit on processes is reached (ulimit -u, or the "
    "pids limit of the container), use fewer processes, or end others."
)


def _clear_variables(error: BaseException) -> None:
    """Empty the frames of the launcher in which ``error`` and its causes arose: they hold the function's arguments."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


def _ending_by(error: BaseException) -> Ending:
    return Ending("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)


_last_job: Job | None = None


def last_job() -> Job | None:
    """The last job that this process started, whatever became of it; None before the first."""
    return _last_job


def remember(job: Job) -> None:
    """Make ``job`` the one that :func:`last_job` returns."""
    global _last_job
    _last_job = job

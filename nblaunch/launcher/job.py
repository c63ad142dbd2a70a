"""Job: a launch as a future.

Every call to ``launch``, ``attach``, and ``notebook_launcher`` (without ``session=``) creates a job: a ``JobRunner``
(``runner.py``), which runs it in this process, or a ``JobFollower`` (``detached/``), which follows a job in another
process. ``notebook_launcher`` runs the job in the calling thread until it ends and returns its result; with
``background=True`` it returns the Job while the workers are running.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from nblaunch import formatting, notes
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames, clear_launcher, hides_launcher
from nblaunch.events import Controls, Event, Hint, Metric, Note, Started
from nblaunch.launcher.debug_client import Comparison, DebugClient, KeptFailure, RankValues
from nblaunch.launcher.joblog import LogFolder
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.launcher.requests import Latch
from nblaunch.launcher.timeline import Timeline, recorded, write_timeline
from nblaunch.launcher.weights import load_into
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.board import SlotReading

T = TypeVar("T")

_AWAIT_POLL_S = 0.05
"""Seconds between checks in ``await job``."""

_LOOK_S = 0.5
"""Seconds between checks in a thread that waits, without a time limit, for a job to end."""

_FOR_USERS = [
    "attempt", "cancel", "compare", "detach", "exception", "id", "inspect", "interrupt", "is_running",
    "load_weights", "log_dir", "logs", "metrics", "num_processes", "pids", "ranks", "release", "result",
    "results", "stacks", "status", "stop", "timeline", "wait", "weights",
]  # fmt: skip
"""The names that ``job.<Tab>`` offers. The launcher, dashboards and the debugger use the other public names."""


class Listener(Protocol):
    """Receives a job's events, as a dashboard does. Must not raise, and must not block for long."""

    def on_event(self, event: Event) -> None:
        """Handle an event. Events of a rank arrive in order."""

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Handle the state of every rank, several times a second."""

    def close(self) -> None:
        """Handle the end of the job, after ``JobEnded``. Dashboards draw the final table."""


class Requests(Controls, Protocol):
    """Requests to a job, such as :class:`nblaunch.launcher.requests.JobRequests`."""

    @property
    def interrupts(self) -> int:
        """Number of requested interrupts."""


class Job(Generic[T]):
    """One launch, running or ended.

    ``notebook_launcher(..., background=True)`` returns a job, :func:`last_job` returns the last job that this process
    started, and :func:`nblaunch.attach` returns a job that was launched with ``detach=True``.

    A job that has ended drops the function and its arguments. It keeps its result, weights and logs until
    :meth:`release`, or until it is neither the last job nor referenced.

    Args:
        spec: what to run.
        plan: how to run it.
        log: the job's log files.
        requests: the object that passes requests to the job.
        listeners: receive the job's events.

    Attributes:
        id: short name of a job that was launched with ``detach=True``; empty for other jobs.
        spec: what to run; a job that has ended drops the function and its arguments.
        plan: how the current attempt runs. A job that has ended, or was launched with ``detach=True``, drops the
            modules in its arguments.
        status: ``"starting"``, ``"running"``, ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``;
            ``"lost"`` if the process of a detached job was killed; ``"waiting"`` while that process has no disk space
            for the result.
        attempt: number of restarts.
        pids: process id of each rank on this machine that has started.
        log: the launcher's object for the log files; see :attr:`log_dir`.
        requests: requests to the job; see :meth:`stop`, :meth:`interrupt` and :meth:`cancel`.
        topology: topology of this machine's first rank.
        outcome: how the job ended; None while it is running.
        debugger: client of the debugger in the ranks; None = no debugger.
        kept: workers of a failed job that are waiting for the debugger.
    """

    id = ""

    def __init__(
        self,
        spec: LaunchSpec,
        plan: LaunchPlan,
        log: LogFolder,
        requests: Requests,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.topology = Topology(
            world_size=plan.num_processes, local_world_size=plan.num_processes, master_addr=spec.master_addr
        )
        self.log = log
        self.requests = requests
        self.attempt = 0
        self.pids: dict[int, int] = {}
        self.debugger: DebugClient | None = None
        self.kept: KeptFailure | None = None
        self._metrics: list[dict[str, Any]] = []
        self._hints: list[str] = []
        self._warnings: set[str] = set()
        self.status = "starting"
        self.outcome: JobOutcome | None = None
        self._listeners = list(listeners)
        # Set once the job has started, is waiting for other machines, or has ended.
        self._launch_settled = Latch()
        self._ended = Latch()
        self._show_again: Callable[[], bool] | None = None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the job to end; return the value of rank 0, or with ``return_all`` a list of all values.

        With several machines, it returns the value of this machine's first rank, or the values of its ranks.

        Args:
            timeout: seconds to wait; None = no limit.

        Raises:
            TimeoutError: the job is still running after ``timeout`` seconds. It continues.
            RuntimeError: the result was released.
            BaseException: a worker's exception, with its original type, or one from :mod:`nblaunch.errors`.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self._wait_for_success(timeout)
        values = self._outcome.values
        result: Any = self.results() if self.spec.return_all else values.get(self.ranks[0])
        return cast("T", result)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return the values of this machine's ranks. Without ``return_all``, all but the first are None."""
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self._wait_for_success(timeout)
        return [self._outcome.values.get(rank) for rank in self.ranks]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what :meth:`result` would raise; None if the job succeeded."""
        self.wait(timeout)
        return self._outcome.error

    @hides_launcher
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the job to end.

        Raises:
            TimeoutError: the job is still running after ``timeout`` seconds. It continues.
        """
        if not self.ends_within(timeout):
            raise TimeoutError(f"{_named(self)} is still running after {timeout} s")

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for :meth:`result` with ``await job`` in a cell; the kernel's event loop stays free."""
        return self._awaited().__await__()

    @property
    def is_running(self) -> bool:
        """Whether the job is still running."""
        return not self._ended.is_set()

    @property
    def log_dir(self) -> Path:
        """Folder with the log of every rank, by attempt."""
        return self.log.path

    @hides_launcher
    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """Return the output of a rank so far, in the last attempt or in ``attempt``.

        If it is longer than 256 MB (``NBLAUNCH_LOG_LIMIT_MB``), only its end is kept, and the first line says how much
        was dropped.

        Raises:
            ValueError: there is no such rank.
        """
        if rank not in self.ranks:
            where = "" if len(self.ranks) == self.num_processes else " on this machine"
            raise ValueError(f"rank={rank}: {_named(self)} has {formatting.ranks(self.ranks)}{where}")
        return self.log.read(rank, self.attempt if attempt is None else attempt)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The values that ``accelerator.log`` has logged so far, in a new list.

        Each call is a dict with ``step``, ``time_s`` (wall clock), ``rank``, ``attempt`` and the values by name, so
        ``pandas.DataFrame(job.metrics)`` is a table of all calls.
        """
        return list(self._metrics)

    def hints(self) -> list[str]:
        """Return one sentence for each part of the training loop that is probably, but not certainly, a mistake.

        Certain mistakes are not listed here; nblaunch shows them as warnings.
        """
        return list(self._hints)

    @hides_launcher
    def timeline(
        self, path: str | os.PathLike[str] | None = None, profiles: str | os.PathLike[str] | None = None
    ) -> Path:
        """Write a timeline of each rank's time, for https://ui.perfetto.dev; return the path of the file.

        Each rank on this machine has a track, on a common clock, with waits for data, forward and backward passes,
        optimizer steps, collectives, saves, evaluations and longer garbage collections. The last half second of a
        running job is missing. A very long job keeps only the newest slices. Notebooks also show a picture of two steps
        of each rank: a typical one and the slowest.

        Args:
            path: path of the JSON file, which is compressed if the path ends in ``.gz``. None = ``timeline.json.gz`` in
                the logs.
            profiles: folder of this job's ``ProfileKwargs(output_trace_dir=...)``, whose traces are added.

        Raises:
            RuntimeError: no worker on this machine has trained yet.
            OSError, ValueError: the file can't be written, or a trace is missing, unreadable or from another job.
        """
        chosen = Timeline(self.log.path / "timeline.json.gz" if path is None else Path(path).expanduser())
        if not write_timeline(recorded(self.log), chosen, self.spec.function_name, profiles):
            raise RuntimeError(
                f"{_named(self)} has no timeline: no worker on this machine has read a batch, computed gradients or "
                f"saved a file{' yet' if self.is_running else ''}"
            )
        return chosen

    @property
    def ranks(self) -> range:
        """The ranks on this machine; all ranks of the job unless it has several machines."""
        return range(self.topology.rank, self.topology.rank + self.topology.local_world_size)

    @property
    def num_processes(self) -> int:
        """Number of ranks of the job, on all machines."""
        return self.topology.world_size

    @hides_launcher
    def weights(self) -> dict[ArgPath, dict[str, Any]]:
        """Return the trained weights that were not loaded into modules of this process.

        A job that was launched with ``detach=True`` has all of its weights here. Any other job holds only the weights
        that did not fit the kernel's modules; usually there are none.

        Returns:
            position in ``args`` -> state dict. The position of a module inside an argument is a path:
            ``"args[0]['generator']"``. Empty while the job is running, and if it failed.

        Raises:
            RuntimeError: the weights were released.
        """
        if self.is_running:
            return {}
        self._check_kept()
        return dict(self._outcome.unloaded_weights)

    @hides_launcher
    def load_weights(self, module: Any, position: ArgPath | None = None) -> None:
        """Load the trained weights returned by :meth:`weights` into a module.

        Args:
            module: a ``torch.nn.Module`` with the same structure.
            position: position of the module in the job's ``args``; None = the only module.

        Raises:
            RuntimeError: the job is still running, or has no such weights.
            ValueError: several modules were trained, no module has this position, or the weights do not fit the module.
        """
        if self.is_running:
            raise RuntimeError(
                f"{_named(self)} has no trained weights yet: wait for it to end, for example with result()"
            )
        weights = self.weights()
        if not weights:
            raise RuntimeError(
                f"{_named(self)} has no trained weights to load: they are in the modules that were passed in args"
            )
        if position is None and len(weights) == 1:
            (position,) = weights
        if position not in weights:
            raise ValueError(f"position={position!r} must be one of {', '.join(map(repr, weights))}")
        load_into(module, position, weights[position])

    @hides_launcher
    def inspect(self, expression: str, timeout_s: float = 10.0) -> RankValues:
        """Evaluate an expression on every rank, in the innermost frame of the user's code there.

        Works for a job launched with ``post_mortem=True``, while it is running in the background or after it has
        failed, even on ranks that are waiting in a collective.

        Args:
            expression: Python expression, such as ``"batch.shape"``.
            timeout_s: how long to wait for the replies.

        Returns:
            rank -> value; an exception if the expression raised one; a ValueError if the value can't be rebuilt in the
            kernel. Ranks without a reply are missing.

        Raises:
            RuntimeError: no worker can answer.
        """
        return self._checked_debugger()[0].inspect(expression, timeout_s)

    @hides_launcher
    def compare(self, timeout_s: float = 10.0) -> Comparison:
        """Compare the local variables of the same function across all ranks; differences come first.

        The function is the one that failed, or the innermost function of the user's code on the first rank. If other
        ranks are not in it, it is the innermost caller that is active on all ranks. Tensors and arrays are compared
        by shape, data type and device, numbers and text by value, and containers by length.

        Args:
            timeout_s: how long to wait for the replies.

        Raises:
            RuntimeError: no worker can answer.
        """
        debugger, first = self._checked_debugger()
        return debugger.compare(first, timeout_s)

    @hides_launcher
    def release(self) -> None:
        """Free the memory of an ended job: its result, and weights that did not fit the kernel's modules.

        Also ends workers that nblaunch kept because of ``post_mortem=True``.

        Logs, metrics, status and error are kept. A successful job then has no :meth:`result`; a failed job still raises
        its error, without the variables in the traceback of a function that ran inline.

        Raises:
            RuntimeError: the job is still running.
        """
        if self.is_running:
            raise RuntimeError(f"{_named(self)} can't be released: wait for it to end, or call cancel()")
        if self.kept is not None:
            self.kept.release()
        self.outcome = self._outcome.released()

    def stop(self) -> None:
        """Ask training to stop early: ``accelerator.should_stop`` becomes true at the same step on every rank.

        A loop that checks ``should_stop`` ends, the function returns as usual, and :meth:`result` returns its value. A
        function that never checks it is not affected.
        """
        self.requests.stop()

    def stacks(self) -> str:
        """Return the current line of every rank in the user's code, with equal lines merged. Takes up to a second.

        If no rank makes progress, one line names the ranks that the others are waiting for.
        """
        return self.ask_stacks().result()

    def ask_stacks(self) -> Future[str]:
        """Return a future for the result of :meth:`stacks`."""
        return self.requests.ask_stacks()

    def interrupt(self) -> None:
        """Interrupt every worker, like the notebook's interrupt button; a second call kills them."""
        self.requests.interrupt()

    def cancel(self) -> None:
        """Kill every worker at once. :meth:`result` then raises :class:`nblaunch.errors.JobCancelled`."""
        self.requests.cancel()

    @hides_launcher
    def detach(self) -> None:
        """Stop following a job that was launched with ``detach=True``: its displays end, but the job continues.

        :func:`nblaunch.attach` follows it again.

        Raises:
            RuntimeError: the job was not launched with ``detach=True``.
        """
        raise RuntimeError(
            f"{_named(self)} ends with this process; only jobs launched with detach=True can continue without it"
        )

    def __dir__(self) -> list[str]:
        return [*(name for name in super().__dir__() if name.startswith("__")), *_FOR_USERS]

    def __repr__(self) -> str:
        where = formatting.count(self.num_processes, f"{self.plan.backend.name} worker")
        return f"<Job {self.spec.function_name} on {where}, {self.status}>"

    def _ipython_display_(self) -> None:
        """Show the job's table if the job is the last line of a cell; outside notebooks, show its repr.

        IPython handles NotImplementedError by showing the repr.
        """
        if self._show_again is None or not self._show_again():
            raise NotImplementedError("only the repr can be shown")

    # --- for the launcher ----------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Update the job from an event, and send it to the listeners."""
        if isinstance(event, Started):
            # Sorted by rank. A new dict, because other threads may be reading the old one.
            self.pids = dict(sorted({**self.pids, event.rank: event.pid}.items()))
            self.status = "running"
            self._launch_settled.set()
        elif isinstance(event, Metric):
            self._metrics.append(_row_of(event, self.attempt))
        elif isinstance(event, Hint):
            self._hints.append(event.text)
        elif (
            isinstance(event, Note)
            and event.kind == "warning"
            and event.rank < 0
            and not self.spec.is_session
        ):
            if event.text in self._warnings:  # several ranks report the same mistake
                return
            self._warnings.add(event.text)
        if isinstance(event, Note) and not notes.is_shown(event):
            return
        for listener in self._listeners:
            listener.on_event(event)

    def emit_readings(self, readings: Sequence[SlotReading]) -> None:
        """Send readings of the board, one per rank, to the listeners."""
        for listener in self._listeners:
            listener.on_readings(readings)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def ends_within(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end; return whether the job has ended."""
        while timeout is None and not self._ended.wait(_LOOK_S):
            pass  # an interrupt that the system delivered to another thread is handled between two waits
        return self._ended.wait(timeout)

    def raise_if_not_started(self) -> None:
        """Raise the error that kept the workers of a background job from starting, if any.

        Raises:
            KeyboardInterrupt: the job was interrupted and has ended.
            BaseException: the error.
        """
        __tracebackhide__ = True
        is_interrupted = self.requests.interrupts > 0
        if self.is_running or (self.pids and not is_interrupted):
            return
        assert self.outcome is not None, "the job is still running"
        self.outcome.raise_error()
        if is_interrupted:
            raise KeyboardInterrupt  # even though the job has succeeded

    def show_with(self, show_again: Callable[[], bool]) -> None:
        """Set the function that shows this job in the running cell; it returns False if it can't."""
        self._show_again = show_again

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client of the debugger in the workers, and the rank to debug.

        Args:
            rank: rank to debug. None = the rank that failed, or the first rank that is waiting at a ``breakpoint()``.

        Raises:
            RuntimeError: no worker can answer.
            ValueError: there is no such rank.
        """
        kept, debugger = self.kept, self.debugger
        if kept is not None and not kept.is_released:
            return kept.find_debugger(rank)
        if debugger is None or not self.is_running or not (self.spec.post_mortem or debugger.prompts):
            raise RuntimeError(
                f"no worker of {_named(self)} is waiting for a debugger. Launch with post_mortem=True to keep the "
                "workers after a failure, or call breakpoint() in the function. nblaunch.debug(job=...) "
                "opens pdb in another job or session"
            )
        return debugger, debugger.checked_rank(rank, min(debugger.prompts, default=self.ranks[0]))

    def _checked_debugger(self) -> tuple[DebugClient, int]:
        """Return the result of :meth:`find_debugger`, if the debugger runs on every rank.

        Raises:
            RuntimeError: no worker can answer.
        """
        debugger = self.find_debugger()
        if not self.spec.post_mortem:
            raise RuntimeError(
                f"the ranks of {_named(self)} can be inspected only if the job was launched with post_mortem=True"
            )
        return debugger

    @property
    def _outcome(self) -> JobOutcome:
        assert self.outcome is not None, "the job is still running"
        return self.outcome

    def _wait_for_success(self, timeout: float | None) -> None:
        __tracebackhide__ = True
        self.wait(timeout)
        outcome = self._outcome
        # From here on, only the raised error keeps the variables of a function that ran in this process.
        self.outcome = outcome.without_variables()
        if self.outcome is not outcome and self.outcome.error is not None:
            clear_launcher(self.outcome.error)
        try:
            outcome.raise_error()
        finally:
            del outcome  # the traceback refers to this frame
        self._check_kept()

    def _check_kept(self) -> None:
        if self._outcome.is_released:
            raise RuntimeError(
                f"{_named(self)} no longer has a result or weights, because release() was called"
            )

    async def _awaited(self) -> T:
        __tracebackhide__ = True
        while not self.ends_within(0):
            await asyncio.sleep(_AWAIT_POLL_S)
        return self.result()


def _named(job: Job[Any]) -> str:
    return f"the job {job.spec.function_name}"


_last_job: Job | None = None

_jobs: weakref.WeakSet[Job] = weakref.WeakSet()
"""Jobs of this process that are still referenced."""


def last_job() -> Job[Any] | None:
    """Return the last job that this process started; None before the first."""
    return _last_job


def remember(job: Job) -> None:
    """Make ``job`` the last job, and let :func:`jobs_at_breakpoints` find it."""
    global _last_job
    _last_job = job
    _jobs.add(job)


def jobs_at_breakpoints() -> list[tuple[float, Job]]:
    """Return the jobs with a rank at a ``breakpoint()``, each with the ``monotonic()`` time of the last arrival.

    Only background jobs count: a cell that is waiting for its job prompts the user itself.
    """
    running = [(job, job.debugger) for job in list(_jobs) if job.is_running]
    return [
        (debugger.stopped_s, job) for job, debugger in running if debugger is not None and debugger.prompts
    ]


def _row_of(metric: Metric, attempt: int) -> dict[str, Any]:
    """Return a call to ``accelerator.log`` as a row: step, wall clock in seconds, rank, attempt, values by name.

    A logged value with one of these names replaces the job's value, but not a step that was passed to ``log``.
    """
    about = {"step": metric.step, "time_s": metric.time_s, "rank": metric.rank, "attempt": attempt}
    return {**about, **metric.values, **({} if metric.step is None else {"step": metric.step})}

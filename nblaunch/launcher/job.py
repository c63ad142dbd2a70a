"""Job: a launch as a future, for the caller, for listeners, and for those that run or follow it.

Every call of ``launch``, of ``attach``, and of ``notebook_launcher`` (unless ``session=`` is given) makes one: a
``JobRunner`` (``runner.py``), which runs the job in this process, or a ``JobFollower`` (``detached/``), which follows
one of another process. ``notebook_launcher`` runs the job to its end in the calling thread and returns its result; with
``background=True`` it returns the Job while the workers run.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from nblaunch.diagnosis.exceptions import HiddenLauncherFrames
from nblaunch.events import Event, Hint, Metric, Note, Started
from nblaunch.launcher.debug_client import Comparison, DebugClient, KeptFailure, RankValues
from nblaunch.launcher.joblog import LogFolder
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.launcher.weights import load_into
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.board import SlotReading

T = TypeVar("T")

_AWAIT_POLL_S = 0.05
"""Between two looks of ``await job``."""

_LOOK_S = 0.5
"""Between two looks of a thread that waits for the end of a job without a limit."""

_FOR_USERS = [
    "attempt",
    "cancel",
    "compare",
    "detach",
    "exception",
    "id",
    "inspect",
    "interrupt",
    "is_running",
    "load_weights",
    "log_dir",
    "logs",
    "metrics",
    "num_processes",
    "pids",
    "ranks",
    "release",
    "result",
    "results",
    "stacks",
    "status",
    "stop",
    "wait",
    "weights",
]
"""What ``job.<Tab>`` offers. The launcher, dashboards and the debugger use the other public names."""


class Listener(Protocol):
    """What receives the events of a job, as a dashboard. Must not raise, nor block for long."""

    def on_event(self, event: Event) -> None:
        """Handle an event; those of a rank arrive in the order in which they happened."""

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Handle the state of every rank, several times a second."""

    def close(self) -> None:
        """Handle the end of the job, after ``JobEnded``: nothing follows. Dashboards draw the final table."""


class Requests(Protocol):
    """Requests to a job, as of :class:`nblaunch.launcher.requests.JobRequests`."""

    @property
    def interrupts(self) -> int:
        """Number of interrupts that were requested."""

    def stop(self) -> None:
        """Let the loops of all ranks end at the same step boundary."""

    def interrupt(self) -> None:
        """Ask workers to end, with grace; the second time kill them."""

    def cancel(self) -> None:
        """Kill the workers at once."""

    def ask_stacks(self) -> Future[str]:
        """Ask where every rank is."""


class Job(Generic[T]):
    """One launch, running or ended.

    ``notebook_launcher(..., background=True)`` returns it; :func:`last_job` gives the last one that this process
    started, however it ended, and :func:`nblaunch.attach` one that was launched with ``detach=True``.

    When it has ended, it keeps neither the function nor its arguments. It keeps what :meth:`result`, :meth:`weights`
    and the other methods give: for as long as it is the last job or referred to, or until :meth:`release`.

    Args:
        spec: what is to be run.
        plan: how.
        log: its log files.
        requests: requests to it.
        listeners: receive its events.

    Attributes:
        id: short name of a job that was launched with ``detach=True``; empty of any other.
        spec: what was to be run; of a job that has ended, without the function and its arguments.
        plan: how it is run, as of the present attempt. Of a job that has ended, or was launched with ``detach=True``,
            without the modules in its arguments.
        status: ``"starting"``, ``"running"``, ``"done"``, ``"failed"``, ``"interrupted"`` or ``"cancelled"``;
            ``"lost"`` if the process that watched a detached job was killed; ``"waiting"`` while that process has no
            room on the disk for what the job returned.
        attempt: how often it was started again.
        pids: rank -> process, of the ranks of this machine that have started.
        log: its log files, as objects of the launcher; see :attr:`log_dir`.
        requests: requests to it; see :meth:`stop`, :meth:`interrupt` and :meth:`cancel`.
        topology: of the first rank of this machine.
        outcome: how it ended; None before that.
        debugger: client of the debugger in the ranks; None where there is none.
        kept: workers of a failed job that still run, for the debugger.
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
        self._launch_settled = threading.Event()  # started, waiting for other machines, or ended
        self._ended = threading.Event()
        self._show_again: Callable[[], bool] | None = None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end and return rank 0's value (every rank's, in a list, if launched with ``return_all``).

        With several machines, those of this machine: its first rank's, or its ranks'.

        Args:
            timeout: seconds to wait; None = as long as it takes.

        Raises:
            TimeoutError: the job still runs after ``timeout`` seconds. It goes on.
            RuntimeError: the result was released.
            BaseException: what failed in a worker, with its original type; see :mod:`nblaunch.errors` for the others.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self._wait_for_success(timeout)
        values = self._outcome.values
        result: Any = self.results() if self.spec.return_all else values.get(self.ranks[0])
        return cast("T", result)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return the values of this machine's ranks; None of others than the first without ``return_all``."""
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self._wait_for_success(timeout)
        return [self._outcome.values.get(rank) for rank in self.ranks]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what :meth:`result` would raise; None if the job succeeded."""
        self.wait(timeout)
        return self._outcome.error

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.

        Raises:
            TimeoutError: the job still runs after ``timeout`` seconds. It goes on.
        """
        if not self.ends_within(timeout):
            raise TimeoutError(f"{self!r} still runs after {timeout} s")

    def __await__(self) -> Generator[Any, None, T]:
        """Wait by ``await job`` in a cell for :meth:`result`, with the kernel's event loop free meanwhile."""
        return self._awaited().__await__()

    @property
    def is_running(self) -> bool:
        """Whether the job has not ended, whichever way."""
        return not self._ended.is_set()

    @property
    def log_dir(self) -> Path:
        """Folder with every rank's log, by attempt."""
        return self.log.path

    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """Return what a rank has printed by now, in the last attempt or in the one asked for.

        Of more than 256 MB (``NBLAUNCH_LOG_LIMIT_MB``) it is the end; a first line says how much was dropped.

        Raises:
            ValueError: there is no such rank.
        """
        if rank not in self.ranks:
            where = "" if len(self.ranks) == self.num_processes else " on this machine"
            raise ValueError(
                f"rank={rank} is not one of this job's ranks{where} ({self.ranks[0]} to {self.ranks[-1]})"
            )
        return self.log.read(rank, self.attempt if attempt is None else attempt)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What ``accelerator.log`` has logged by now: a new list, which does not grow while it is read.

        One dict per call, with ``step``, ``time_s`` (wall clock), ``rank``, ``attempt``, and the values by their names:
        ``pandas.DataFrame(job.metrics)``.
        """
        return list(self._metrics)

    def hints(self) -> list[str]:
        """Return what is often a mistake in a training loop, and may be meant here: one sentence each.

        What is certainly wrong is a warning, and shown.
        """
        return list(self._hints)

    @property
    def ranks(self) -> range:
        """The ranks that run on this machine: all of the job, unless it has several machines."""
        return range(self.topology.rank, self.topology.rank + self.topology.local_world_size)

    @property
    def num_processes(self) -> int:
        """How many ranks the job has, on all machines."""
        return self.topology.world_size

    def weights(self) -> dict[ArgPath, dict[str, Any]]:
        """Return the trained weights that are not in the modules of this process.

        Of a job that was launched with ``detach=True`` all of them; of any other those that did not fit the kernel's
        modules, usually none.

        Returns:
            position in ``args`` -> state dict. The position of a module inside an argument is a path:
            ``"args[0]['generator']"``. Empty while the job runs, and if it failed.

        Raises:
            RuntimeError: they were released.
        """
        if self.is_running:
            return {}
        self._check_kept()
        return dict(self._outcome.unloaded_weights)

    def load_weights(self, module: Any, position: ArgPath | None = None) -> None:
        """Load trained weights that :meth:`weights` returns into a module.

        Args:
            module: a ``torch.nn.Module`` of the same structure.
            position: that of the module in the job's ``args``; None = of the only one.

        Raises:
            RuntimeError: the job still runs, or has no such weights.
            ValueError: several modules were trained, none has this position, or the weights do not fit the module.
        """
        if self.is_running:
            raise RuntimeError(f"{self!r} has no trained weights yet: wait for its end, as by result()")
        found = self.weights()
        if not found:
            raise RuntimeError(f"{self!r} has no trained weights that are not in the modules of its args")
        if position is None and len(found) == 1:
            (position,) = found
        if position not in found:
            raise ValueError(f"position={position!r} must be one of {', '.join(map(repr, found))}")
        load_into(module, position, found[position])

    def inspect(self, expression: str, timeout_s: float = 10.0) -> RankValues:
        """Evaluate an expression on every rank, in the innermost frame of the user's code there.

        For a job launched with ``post_mortem=True``, while it runs in the background or after it has failed. Ranks that
        wait in a collective answer, too.

        Args:
            expression: Python, as ``"batch.shape"``.
            timeout_s: how long to wait for the answers.

        Returns:
            rank -> value; the exception, where the expression raised one; a ValueError, where the value can't be
            rebuilt in the kernel. Ranks without an answer are missing.

        Raises:
            RuntimeError: no worker can be asked.
        """
        return self._checked_debugger()[0].inspect(expression, timeout_s)

    def compare(self, timeout_s: float = 10.0) -> Comparison:
        """Compare the local variables of the same function over all ranks; those that differ come first.

        The function is that of the failure, or the innermost of the user's code on the first rank; where other ranks
        are not in it, the innermost of its callers that all are in. Of tensors and
        arrays the shape, data type and device are compared, of numbers and text the value, of containers the length.

        Args:
            timeout_s: how long to wait for the answers.

        Raises:
            RuntimeError: no worker can be asked.
        """
        debugger, first = self._checked_debugger()
        return debugger.compare(first, timeout_s)

    def release(self) -> None:
        """Give up the memory of an ended job: its result, and weights that did not fit the kernel's modules.

        Workers that ``post_mortem=True`` has kept end.

        Logs, metrics, status and error stay. A job that is done and released has no :meth:`result` any more; one that
        failed still raises its error, without the variables that the traceback of a function run inline holds.

        Raises:
            RuntimeError: the job still runs.
        """
        if self.is_running:
            raise RuntimeError(f"{self!r} can't be released: wait for its end, or cancel() it")
        if self.kept is not None:
            self.kept.release()
        self.outcome = self._outcome.released()

    def stop(self) -> None:
        """Let training end early and well: ``accelerator.should_stop`` turns true at the same step on every rank.

        A loop that looks at it leaves, the function returns as usual, and :meth:`result` has its value. A function
        that never looks is not affected.
        """
        self.requests.stop()

    def stacks(self) -> str:
        """Return where every rank is right now: lines of the user's code, equal ones together. Takes up to a second.

        Where no rank makes progress, a line says which ranks the others wait for.
        """
        return self.ask_stacks().result()

    def ask_stacks(self) -> Future[str]:
        """Return a future of what :meth:`stacks` returns, without waiting for it."""
        return self.requests.ask_stacks()

    def interrupt(self) -> None:
        """Ask every worker to stop, as the notebook's interrupt button does; the second time kill them."""
        self.requests.interrupt()

    def cancel(self) -> None:
        """Kill every worker at once. :meth:`result` then raises :class:`nblaunch.errors.JobCancelled`."""
        self.requests.cancel()

    def detach(self) -> None:
        """Follow a job no longer that was launched with ``detach=True``: its displays end, the job itself goes on.

        :func:`nblaunch.attach` follows it again.

        Raises:
            RuntimeError: the job runs in this process, and would end with it.
        """
        raise RuntimeError(
            f"{self!r} runs in this process and ends with it: only a job that was launched with detach=True goes "
            "on alone"
        )

    def __dir__(self) -> list[str]:
        return [*(name for name in super().__dir__() if name.startswith("__")), *_FOR_USERS]

    def __repr__(self) -> str:
        where = f"{self.num_processes} {self.plan.backend.name} workers"
        return f"<Job {self.spec.function_name} on {where}, {self.status}>"

    def _ipython_display_(self) -> None:
        """Show the job's table where it is the last line of a cell; outside of notebooks, its repr.

        IPython takes the error for "as usual".
        """
        if self._show_again is None or not self._show_again():
            raise NotImplementedError("there is nothing to show but the repr")

    # --- for the launcher ----------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Keep what an event says of the job, and send it to the listeners."""
        if isinstance(event, Started):
            # In the order of ranks, whichever started first; made anew, since other threads may be reading it.
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
            if event.text in self._warnings:  # several ranks have noticed the same
                return
            self._warnings.add(event.text)
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
        """Wait for the end, ``timeout`` seconds at most; return whether the job has ended."""
        while timeout is None and not self._ended.wait(_LOOK_S):
            pass  # an interrupt that the system has given to another thread is seen between two looks
        return self._ended.wait(timeout)

    def raise_if_not_started(self) -> None:
        """Raise what kept the workers of a job in the background from starting, if anything did.

        Raises:
            KeyboardInterrupt: the job was interrupted, and has ended.
            BaseException: why they did not start.
        """
        __tracebackhide__ = True
        is_interrupted = self.requests.interrupts > 0
        if self.is_running or (self.pids and not is_interrupted):
            return
        assert self.outcome is not None, "the job still runs"
        self.outcome.raise_error()
        if is_interrupted:
            raise KeyboardInterrupt  # it is done all the same

    def show_with(self, show_again: Callable[[], bool]) -> None:
        """Let ``show_again()`` show this job in the running cell; it returns False where it can't."""
        self._show_again = show_again

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client of the debugger in the workers, and the rank to be debugged.

        Args:
            rank: which; None = the one that failed, or the first that waits at a ``breakpoint()``.

        Raises:
            RuntimeError: no worker can be asked.
            ValueError: there is no such rank.
        """
        kept, debugger = self.kept, self.debugger
        if kept is not None and not kept.is_released:
            return kept.find_debugger(rank)
        if debugger is None or not self.is_running or not (self.spec.post_mortem or debugger.prompts):
            raise RuntimeError(
                f"no worker of {self!r} waits for a debugger: launch with post_mortem=True, and its workers stay when "
                "one of them raises, until the next launch, release(), or for 30 minutes; or call breakpoint() in it. "
                "nblaunch.debug(job=...) opens pdb in another job or session"
            )
        return debugger, debugger.checked_rank(rank, min(debugger.prompts, default=self.ranks[0]))

    def _checked_debugger(self) -> tuple[DebugClient, int]:
        """Return what :meth:`find_debugger` does, where the debugger runs on every rank.

        Raises:
            RuntimeError: no worker can be asked.
        """
        found = self.find_debugger()
        if not self.spec.post_mortem:
            raise RuntimeError(
                f"the ranks of {self!r} can be asked only if it is launched with post_mortem=True"
            )
        return found

    @property
    def _outcome(self) -> JobOutcome:
        assert self.outcome is not None, "the job still runs"
        return self.outcome

    def _wait_for_success(self, timeout: float | None) -> None:
        __tracebackhide__ = True
        self.wait(timeout)
        self._outcome.raise_error()
        self._check_kept()

    def _check_kept(self) -> None:
        if self._outcome.is_released:
            raise RuntimeError(f"{self!r} has given up its result and weights: release() was called")

    async def _awaited(self) -> T:
        __tracebackhide__ = True
        while not self.ends_within(0):
            await asyncio.sleep(_AWAIT_POLL_S)
        return self.result()


_last_job: Job | None = None

_jobs: weakref.WeakSet[Job] = weakref.WeakSet()
"""Those of this process, while anything refers to them."""


def last_job() -> Job[Any] | None:
    """Return the last job that this process started, whatever its outcome; None before the first."""
    return _last_job


def remember(job: Job) -> None:
    """Make ``job`` the one that :func:`last_job` returns, and let :func:`jobs_at_breakpoints` find it."""
    global _last_job
    _last_job = job
    _jobs.add(job)


def jobs_at_breakpoints() -> list[tuple[float, Job]]:
    """Return the jobs of which a rank waits at a ``breakpoint()``, each with when the last came, by ``monotonic()``.

    Those in the background: a cell that waits for its job asks by itself.
    """
    found = [(job, job.debugger) for job in list(_jobs) if job.is_running]
    return [(debugger.stopped_s, job) for job, debugger in found if debugger is not None and debugger.prompts]


def _row_of(metric: Metric, attempt: int) -> dict[str, Any]:
    """Return a call of ``accelerator.log`` as a row: step, wall clock in seconds, rank, attempt, values by name.

    A value that is called as one of these takes its place, except that a step given to ``log`` is the step.
    """
    about = {"step": metric.step, "time_s": metric.time_s, "rank": metric.rank, "attempt": attempt}
    return {**about, **metric.values, **({} if metric.step is None else {"step": metric.step})}

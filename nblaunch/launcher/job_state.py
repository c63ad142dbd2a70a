"""JobState: keeps the state of a job, and sends its events and readings of the board to listeners.

The :class:`nblaunch.launcher.job.Job` that a caller holds reads it. JobState is the base of ``JobRunner``
(``runner.py``), which runs a job in this process, and of ``JobFollower`` (``detached/``), which follows one of another
process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nblaunch.events import Event, Metric, Started
from nblaunch.launcher.debug_client import DebugClient, KeptFailure
from nblaunch.launcher.joblog import LogFolder
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.board import SlotReading

_LOOK_S = 0.5
"""Between two looks of a thread that waits for the end of a job without a limit."""


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

    def terminate(self, grace_s: float) -> None:
        """Let the loops end, and interrupt them when ``grace_s`` is over."""

    def cancel(self) -> None:
        """Kill the workers at once."""

    def ask_stacks(self) -> Future[str]:
        """Ask where every rank is."""


class JobState:
    """The state of one job, made of its events; :meth:`emit` and :meth:`emit_readings` send these to the listeners.

    Args:
        spec: what is to be run.
        plan: how.
        log: its log files.
        requests: requests to it.
        listeners: receive its events.

    Attributes:
        id: short name of a detached job; empty of any other.
        topology: of the first rank of this machine.
        attempt_number: of the present attempt, from 0.
        pids: rank -> process of the ranks of this machine that have started in it.
        debugger: client of the debugger in these ranks; None where there is none.
        kept: workers of a failed job that still run, for the debugger.
        status: ``"starting"``, ``"running"``, or that of the outcome.
        outcome: how the job ended; None before that.
        metrics: what the ranks have logged.
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
        self.attempt_number = 0
        self.pids: dict[int, int] = {}
        self.debugger: DebugClient | None = None
        self.kept: KeptFailure | None = None
        self.metrics: list[dict[str, Any]] = []
        self.status = "starting"
        self.outcome: JobOutcome | None = None
        self._listeners = list(listeners)
        self._launch_settled = threading.Event()  # started, waiting for other machines, or ended
        self._ended = threading.Event()

    @property
    def ranks(self) -> range:
        """Those that run on this machine."""
        return range(self.topology.rank, self.topology.rank + self.topology.local_world_size)

    @property
    def is_running(self) -> bool:
        """Whether the job has not ended, whichever way."""
        return not self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
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

    def emit(self, event: Event) -> None:
        """Keep what an event says of the job, and send it to the listeners."""
        if isinstance(event, Started):
            # In the order of ranks, whichever started first; made anew, since other threads may be reading it.
            self.pids = dict(sorted({**self.pids, event.rank: event.pid}.items()))
            self.status = "running"
            self._launch_settled.set()
        elif isinstance(event, Metric):
            self.metrics.append(_row_of(event, self.attempt_number))
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


def _row_of(metric: Metric, attempt: int) -> dict[str, Any]:
    """Return a call of ``accelerator.log`` as a row: step, wall clock in seconds, rank, attempt, values by name.

    A value that is called as one of these takes its place, except that a step given to ``log`` is the step.
    """
    about = {"step": metric.step, "time_s": metric.time_s, "rank": metric.rank, "attempt": attempt}
    return {**about, **metric.values, **({} if metric.step is None else {"step": metric.step})}

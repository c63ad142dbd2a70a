"""Explains slow steps from the ranks' spans and their processor time, and names a cause once it persists.

    spans ──────────────────────────┐
    /proc, every second and a half ─┴──> find_cause ── the same, several times in a row? ──> Note of kind "slow"

Checks use at most one percent of a processor. A short-lived cause, such as a compilation in another process,
is not named. A note without text clears a cause that has ended.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

from nblaunch import env
from nblaunch.diagnosis.slow_steps import (
    Cause,
    Machine,
    Neighbour,
    Processors,
    StepTimes,
    find_cause,
    step_times,
)
from nblaunch.events import DeviceUse, Event, Note
from nblaunch.host import proc
from nblaunch.host.proc import Process, ThreadTimes
from nblaunch.launcher.attempt import RunningAttempt
from nblaunch.wire.spans import Span, unpack

CHECK = "slow_steps"
"""Name of this check in ``NBLAUNCH_CHECKS``."""

_LOOK_S = 1.5
_MAX_SHARE = 0.01  # fraction of a processor for the checks
_WINDOW_S = 10.0
_MIN_SPANS, _MAX_SPANS = 2_000, 5_000  # limits on how many of a rank's newest spans are analysed
_ALL_SPANS = 20_000  # spans of all ranks together
_NUM_LOOKS = 3  # checks in a row after which a cause is named
_NUM_LOOKS_UNLESS_FIXED = 6
_MAX_NOTES = 2  # per cause, which may come and go
_BUSY_SHARE = 0.25  # fraction of the busiest thread's time; less busy threads are not counted
_MIN_USE = 0.05  # fraction of a processor; a neighbour that uses less does not count
_SUSPICIOUS_WAIT = 0.2
"""If a rank waits for a processor for more than this fraction of its time, its neighbours are looked up."""


class SlowWatch:
    """Watches an attempt's ranks on this machine.

    Args:
        running: the attempt.
        emit: receives notes.
    """

    def __init__(self, running: RunningAttempt, emit: Callable[[Event], None]) -> None:
        self._group = running.group
        self._emit = emit
        self._is_on = not env.is_check_off(CHECK)
        ranks = running.attempt.ranks
        num_spans = min(max(_ALL_SPANS // len(ranks), _MIN_SPANS), _MAX_SPANS)
        self._spans: dict[int, deque[Span]] = {rank: deque(maxlen=num_spans) for rank in ranks}
        self._has_device = running.attempt.plan.backend.name != "cpu"
        self._device_uses: dict[int, float] = {}
        self._readings = _Readings()
        self._next_s = 0.0
        self._candidate: Cause | None = None
        self._num_seen = 0
        self._current: Cause | None = None
        self._num_gone = 0
        self._num_notes: Counter[object] = Counter()

    def receive(self, event: Event) -> None:
        """Store the utilisation of a rank's device; ignore other events."""
        if isinstance(event, DeviceUse):
            self._device_uses[event.rank] = event.share

    def take(self, spans: Mapping[int, bytes]) -> None:
        """Add new spans from the ranks, and evaluate all spans if a check is due."""
        if not self._is_on:
            return
        for rank, data in spans.items():
            self._spans[rank].extend(unpack(data))
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        began_s = time.thread_time()  # not elapsed time, which is longer on a busy machine
        self._judge(now_s)
        self._next_s = max(now_s + _LOOK_S, time.monotonic() + (time.thread_time() - began_s) / _MAX_SHARE)

    def _judge(self, now_s: float) -> None:
        times = self._step_times(now_s)
        if not times:  # nothing is known while ranks are not training
            self._candidate, self._num_seen = None, 0
            return
        pids = {rank: pid for rank, pid in self._group.pids().items() if rank in times}
        uses, machine = self._readings.read(pids, now_s)
        if self._has_device:
            uses = {rank: Processors(device_use=self._device_uses.get(rank, 1.0)) for rank in uses}
        self._note(find_cause(times, uses, machine))

    def _step_times(self, now_s: float) -> dict[int, StepTimes]:
        """Return the step times of all ranks; empty unless all ranks are taking steps."""
        times = {}
        for rank, spans in self._spans.items():
            first = next((i for i, span in enumerate(spans) if span.ended_s >= now_s - _WINDOW_S), None)
            steps = None if first is None else step_times(list(islice(spans, first, None)))
            if steps is None and spans and now_s - spans[-1].ended_s < _WINDOW_S:
                steps = step_times(list(spans))  # steps longer than the window
            if steps is None:
                return {}
            times[rank] = steps
        return times

    def _note(self, cause: Cause | None) -> None:
        """Name a cause after finding it several times in a row; clear it after as many checks without it."""
        if cause is None or self._candidate is None or cause.key != self._candidate.key:
            self._num_seen = 0
        self._candidate = cause
        self._num_seen += cause is not None
        if self._current is not None:
            is_gone = cause is None or cause.key != self._current.key
            self._num_gone = self._num_gone + 1 if is_gone else 0
            if self._num_gone >= _NUM_LOOKS:
                self._current = None
                self._emit(Note.of_job("", "slow"))
        if cause is None or (self._current is not None and cause.key == self._current.key):
            return
        needed = _NUM_LOOKS if cause.is_fixed else _NUM_LOOKS_UNLESS_FIXED
        if self._num_seen >= needed and self._num_notes[cause.key] < _MAX_NOTES:
            self._num_notes[cause.key] += 1
            self._current, self._num_gone = cause, 0
            self._emit(Note.of_job(cause.text, "slow"))


class _Readings:
    """The last reading of the system, for comparison with the next one."""

    def __init__(self) -> None:
        self._read_s = 0.0
        self._threads: dict[int, dict[int, ThreadTimes]] = {}
        self._processes: dict[int, Process] = {}
        self._stolen_s = self._throttled_s = 0.0

    def read(self, pids: Mapping[int, int], now_s: float) -> tuple[dict[int, Processors], Machine]:
        """Return how much processor time each process in ``pids`` (rank -> process) has used since the last call, and
        the machine's state.
        """
        elapsed_s = max(now_s - self._read_s, 1e-3)
        before, self._threads = (
            self._threads,
            {rank: proc.thread_times(pid) for rank, pid in pids.items()},
        )
        uses = {
            rank: _use_of(pids[rank], before[rank], threads, elapsed_s)
            for rank, threads in self._threads.items()
            if rank in before
        }
        waiting = {rank: pids[rank] for rank, use in uses.items() if use.wait_share >= _SUSPICIOUS_WAIT}
        neighbours = self._neighbours(waiting, set(pids.values()), elapsed_s)
        allowed = set().union(*(proc.allowed_processors(pid) for pid in pids.values()))
        stolen_s, throttled_s = proc.stolen_seconds(), proc.throttled_seconds()
        is_first = not self._read_s
        machine = Machine(
            max(len(allowed), 1),
            0.0 if is_first else (stolen_s - self._stolen_s) / elapsed_s / max(len(allowed), 1),
            0.0 if is_first else min((throttled_s - self._throttled_s) / elapsed_s, 1.0),
        )
        self._read_s, self._stolen_s, self._throttled_s = now_s, stolen_s, throttled_s
        return {rank: replace(use, neighbour=neighbours.get(rank)) for rank, use in uses.items()}, machine

    def _neighbours(
        self, waiting: Mapping[int, int], pids_of_job: set[int], elapsed_s: float
    ) -> dict[int, Neighbour]:
        """Return, for each waiting rank, the processes with which it shares its processor."""
        before, self._processes = self._processes, proc.processes() if waiting else {}
        neighbours: dict[int, Neighbour] = {}
        for rank, pid in waiting.items():
            rank_use = self._processes.get(pid)
            for other in self._processes.values():
                last = before.get(other.pid)
                is_foreign = other.pid not in pids_of_job and other.posix_session not in pids_of_job
                if (
                    rank_use is None
                    or last is None
                    or not is_foreign
                    or other.processor != rank_use.processor
                ):
                    continue
                use = (other.cpu_s - last.cpu_s) / elapsed_s
                if use >= _MIN_USE:
                    limits = proc.allowed_processors(pid), proc.allowed_processors(other.pid)
                    is_pinned = any(len(limit) == 1 for limit in limits)
                    neighbour = Neighbour(other.pid, other.name, use, is_pinned)
                    neighbours[rank] = neighbour.joined_by(neighbours.get(rank))
        return neighbours


def _use_of(
    pid: int, before: Mapping[int, ThreadTimes], now: Mapping[int, ThreadTimes], elapsed_s: float
) -> Processors:
    """Return the processor time of a process between two readings of its threads."""
    nothing = ThreadTimes()
    run_s = {thread: times.run_s - before.get(thread, nothing).run_s for thread, times in now.items()}
    wait_s = {thread: times.wait_s - before.get(thread, nothing).wait_s for thread, times in now.items()}
    busiest_s = max(run_s.values(), default=0.0)
    busy = [thread for thread in now if run_s[thread] >= _BUSY_SHARE * busiest_s > 0.0]
    return Processors(
        wait_share=wait_s.get(pid, 0.0) / elapsed_s,
        num_threads=len(busy),
        run_s=sum(run_s[thread] for thread in busy),
        wait_s=sum(wait_s[thread] for thread in busy),
    )

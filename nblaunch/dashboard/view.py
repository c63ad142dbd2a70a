"""The state of a job as a dashboard sees it: a pure fold over events and board samples.

    view = JobView()
    view = fold(view, event)                      # for every event, see view_events.py
    view = fold_samples(view, samples, now_s)     # for every look at the board, see view_samples.py

Owns what is known and derived: states, rates, time left, histories. Never formats, never looks at a clock, never
changes a view in place. Renderers (text, HTML, widgets) read the same view, so that they can't disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nblaunch.dashboard.bars import Bar
from nblaunch.dashboard.curves import Curve
from nblaunch.events import ExitStatus, WorkerState
from nblaunch.wire.board import Sample

HISTORY_LENGTH = 64
"""Points of a loss history at most; longer ones are thinned, so that they always cover the whole job."""

CHART_LENGTH = 200
"""Points of a logged metric at most, likewise."""

TAIL_LENGTH = 20
"""Last lines of output kept in the view, all ranks together."""

WINDOW_S = 10.0
"""Seconds over which step rates are smoothed."""

LINE_STAYS_S = 2.0
"""Seconds for which a line that a worker redraws is shown after it printed another: mostly it comes back at once."""


@dataclass(frozen=True)
class Mark:
    """A point of the window over which rates are measured; ``time_s`` is the worker's monotonic clock."""

    time_s: float
    steps: int
    samples: int
    own_time_s: float = 0.0
    own_steps: int = 0


@dataclass(frozen=True)
class TrainingPass:
    """How far a rank came with its last pass over training data; terms as in :class:`RankView`."""

    step: int
    total: int
    epoch: int
    steps_per_s: float | None
    samples_per_s: float | None
    own_step_s: float | None


@dataclass(frozen=True)
class RankView:
    """One worker.

    Args:
        rank: which.
        state: what it does.
        pid: its process id; 0 before it started.
        step: batches of the current pass that were taken.
        total: batches of the current pass; -1 where unknown.
        epoch: passes over the training loader that were completed.
        steps_per_s: step rate, smoothed over about :data:`WINDOW_S`; None before it is known.
        samples_per_s: sample rate, likewise.
        own_step_s: seconds of a step in which it does not wait for others, likewise; None where that is not known.
        loss: the last loss, perhaps not finite; None before the first.
        losses: finite losses over the steps of the whole job, at most :data:`HISTORY_LENGTH`, evenly thinned.
        metrics: the last value of everything logged by ``accelerator.log``.
        metrics_step: the step they were logged at.
        status_line: progress bar or unfinished line on the rank's terminal, without escape sequences.
        bar: the same, if it is a progress bar of tqdm.
        is_redrawn: that line was seen to change in place.
        line_gone_s: when it ended, because another was printed; 0.0 while it stands.
        last_line: last whole line that it printed, without escape sequences.
        num_lines: lines that it printed.
        exit_status: how its process ended; None while it lives.
        failure: one line on what went wrong; empty if nothing did.
        is_consequence: the failure was most likely caused by another rank's.
        has_returned: the user's function returned.
        stepped_s: ``now_s`` of the first look that found the current step; 0.0 before the first step.
        moved_s: the last time that it was seen to do anything: steps, states, output; 0.0 before.
        state_s: ``now_s`` of the first look that found its slot in the state that it is in.
        waited_s: seconds that it spent waiting for others, not counting the wait that it is in.
        num_waits: how often it was found to wait.
        host_bytes: host memory of its process; None before it is known.
        host_peak_bytes: the most that was seen.
        device_bytes: memory of its device that it has taken; None where nothing is known.
        device_peak_bytes: the most so far.
        device_limit_bytes: all there is.
        device_use: share of the last moments in which its device computed, 0 to 1; None where nothing is known.
        trained: the last pass over training data, which is what the end of a job is told by; None before the first.
        sample: what its slot of the board held at the last look.
        marks: where it was over the last :data:`WINDOW_S`, from which rates are taken.
        steps_done: steps over all passes.
    """

    rank: int
    state: WorkerState = WorkerState.STARTING
    pid: int = 0
    step: int = 0
    total: int = -1
    epoch: int = 0
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    own_step_s: float | None = None
    loss: float | None = None
    losses: Curve = field(default_factory=Curve)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_step: int | None = None
    status_line: str = ""
    bar: Bar | None = None
    is_redrawn: bool = False
    line_gone_s: float = 0.0
    last_line: str = ""
    num_lines: int = 0
    exit_status: ExitStatus | None = None
    failure: str = ""
    is_consequence: bool = False
    has_returned: bool = False
    stepped_s: float = 0.0
    moved_s: float = 0.0
    state_s: float = 0.0
    waited_s: float = 0.0
    num_waits: int = 0
    host_bytes: int | None = None
    host_peak_bytes: int | None = None
    device_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_limit_bytes: int | None = None
    device_use: float | None = None
    trained: TrainingPass | None = None
    sample: Sample | None = None
    marks: tuple[Mark, ...] = ()
    steps_done: int = 0

    def without_line(self) -> RankView:
        """With nothing that it was drawing."""
        return replace(self, status_line="", bar=None, is_redrawn=False, line_gone_s=0.0)

    @property
    def loss_history(self) -> tuple[float, ...]:
        """Finite losses over the whole job, evenly thinned."""
        return self.losses.ys

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it that the launcher did not send."""
        is_by_signal = self.exit_status is not None and self.exit_status.code < 0
        return is_by_signal and self.state is WorkerState.FAILED

    @property
    def has_progress(self) -> bool:
        """Whether it has told of any step."""
        return self.total >= 0 or self.step > 0 or self.epoch > 0

    @property
    def fraction(self) -> float | None:
        """Done part of the current pass, 0 to 1; None where the total is unknown."""
        return min(self.step / self.total, 1.0) if self.total > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the current pass ends at the present rate; None where that is unknown."""
        if self.state.is_final or self.total <= 0 or not self.steps_per_s:
            return None
        return max(self.total - self.step, 0) / self.steps_per_s


@dataclass(frozen=True)
class JobView:
    """A job. Times are wall-clock seconds (``time.time()``).

    Args:
        function_name: what runs.
        num_processes: how many workers.
        backend: device family.
        start_method: how they were started.
        reason: why so.
        detour: a sentence about it where the usual way was not possible; empty otherwise.
        spans_devices: one worker drives all devices, rather than one each.
        mixed_precision: ``"fp16"`` or ``"bf16"`` if that was told; empty otherwise.
        facts: what workers told of the whole job, by name: ``"precision"``, ``"compilations"``.
        log_dir: where complete logs are.
        attempt: restarts so far.
        started_s: when the job started; 0.0 before.
        now_s: the last moment that was looked at.
        outcome: as in :class:`nblaunch.events.JobFinished`; empty while the job runs.
        is_early: it was done before its time, because somebody asked for that.
        failed_rank: the rank with the root cause of a failure.
        message: one line about the failure.
        notes: ``(rank, text)`` of the last notes; rank -1 is the launcher.
        warnings: those of them that warn, likewise.
        hang: what was last found about ranks that make no progress, and where they are; empty otherwise.
        curves: numbers logged by ``accelerator.log``, by name.
        host_bytes: host memory of all workers together; None before it is known.
        host_peak_bytes: the most that was seen.
        is_host_proportional: whether that counts shared pages once.
        tail: ``(rank, line)`` of the last lines of output.
        ranks: one view per worker, by rank.
    """

    function_name: str = ""
    num_processes: int = 0
    backend: str = ""
    start_method: str = ""
    reason: str = ""
    detour: str = ""
    spans_devices: bool = False
    mixed_precision: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    log_dir: str = ""
    attempt: int = 0
    started_s: float = 0.0
    now_s: float = 0.0
    outcome: str = ""
    is_early: bool = False
    failed_rank: int | None = None
    message: str = ""
    notes: tuple[tuple[int, str], ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    hang: tuple[str, ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    host_bytes: int | None = None
    host_peak_bytes: int | None = None
    is_host_proportional: bool = True
    tail: tuple[tuple[int, str], ...] = ()
    ranks: tuple[RankView, ...] = ()

    @property
    def is_started(self) -> bool:
        """Whether the job has said what it is."""
        return self.num_processes > 0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.outcome != ""

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the last look, or to the end."""
        return max(self.now_s - self.started_s, 0.0)

    @property
    def left_s(self) -> float | None:
        """Seconds until the slowest rank has ended its present pass; None where that is unknown."""
        known = [left_s for rank in self.ranks if (left_s := rank.left_s) is not None]
        return max(known, default=None)

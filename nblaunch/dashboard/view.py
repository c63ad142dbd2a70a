"""The state of a job as a dashboard sees it.

    view = JobView()
    view = fold(view, event)                      # for every event, see fold.py
    view = fold_samples(view, samples, now_s)     # for every look at the board

Owns what is known and derived: states, rates, time left, histories, and the progress bars that workers draw themselves
(tqdm's default format; source: ``tqdm.std.tqdm.format_meter``). Never formats, never looks at a clock, never changes a
view in place. Renderers (text, HTML, widgets) read the same view, so that they can't disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nblaunch.events import ExitStatus, WorkerState
from nblaunch.wire.board import Sample

# With a total, in full or abbreviated numbers (1.20k/4.00k); and without one: "25it [00:03, 8.1it/s]".
_COUNT = r"\d+(?:\.\d+)?[kMGTPEZY]?"
_UNIT = r"(?P<unit> ?[^\s\d\[:/%|]*)"
_METER = r"\[(?P<meter>\d+:\d[^\]]*)\]?"
_BAR = re.compile(
    rf"^(?:(?P<description>.*?):\s+)?\s*(?P<percent>\d+)%\|.*?\|\s*(?P<count>{_COUNT})/(?P<total>{_COUNT})"
    rf"{_UNIT}\s*{_METER}"
)
_COUNTER = re.compile(rf"^(?:(?P<description>.*?):\s+)?(?P<count>{_COUNT}){_UNIT}\s{_METER}")


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        description: what its owner called it; may be empty.
        count: what is done, as it was written: ``"450"``, ``"1.20k"``.
        total: of how much; empty where it did not say.
        fraction: done part, 0 to 1; None without a total.
        meter: time, rate and whatever else stands in its brackets.
    """

    description: str
    count: str
    total: str
    fraction: float | None
    meter: str = ""

    @property
    def text(self) -> str:
        """In words, without the drawn part: ``"train epoch 2 450/1000 [00:45<00:55, 10.0it/s]"``."""
        counted = f"{self.count}/{self.total}" if self.total else self.count
        meter = f"[{self.meter}]" if self.meter else ""
        return " ".join(part for part in (self.description, counted, meter) if part)


def read_bar(line: str) -> Bar | None:
    """The bar that ``line`` shows; None where it is something else."""
    if "[" not in line:
        return None
    if found := _BAR.match(line):
        return Bar(
            description=_name(found["description"]),
            count=found["count"],
            total=found["total"],
            fraction=min(int(found["percent"]) / 100, 1.0),
            meter=found["meter"].strip(),
        )
    if found := _COUNTER.match(line):
        return Bar(_name(found["description"]), found["count"], "", None, found["meter"].strip())
    return None


def _name(description: str | None) -> str:
    return (description or "").strip()


@dataclass(frozen=True)
class Curve:
    """Points of a quantity, evenly thinned so that they always cover the whole job.

    Args:
        xs: steps, rising.
        ys: values, all finite.
        stride: one of so many points was kept.
        num_seen: points that were added.
        latest: the last point that was added, kept or not; None before the first.
    """

    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()
    stride: int = 1
    num_seen: int = 0
    latest: tuple[float, float] | None = None

    def extended(self, x: float, y: float, max_points: int) -> Curve:
        """The curve with one more point. An ``x`` that does not rise (steps that begin anew) counts on by one."""
        if self.latest is not None and x <= self.latest[0]:
            x = self.latest[0] + 1
        xs, ys, stride = self.xs, self.ys, self.stride
        if self.num_seen % stride == 0:
            if len(xs) >= max_points:
                xs, ys, stride = xs[::2], ys[::2], stride * 2
            xs, ys = (*xs, x), (*ys, y)
        return Curve(xs, ys, stride, self.num_seen + 1, (x, y))

    def points(self) -> list[tuple[float, float]]:
        """What was kept, and the latest point."""
        kept = list(zip(self.xs, self.ys, strict=True))
        return kept if self.latest is None or kept[-1] == self.latest else [*kept, self.latest]


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
    busy_time_s: float = 0.0
    busy_steps: int = 0


@dataclass(frozen=True)
class TrainingPass:
    """How far a rank came with its last pass over training data; terms as in :class:`RankView`."""

    step: int
    total: int
    epoch: int
    steps_per_s: float | None
    samples_per_s: float | None
    busy_step_s: float | None


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
        busy_step_s: seconds of a step in which it does not wait for others, likewise; None where that is not known.
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
        trained: the last pass over training data, which is what the end of a job shows; None before the first.
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
    busy_step_s: float | None = None
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
        """Whether it has reported any step."""
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
        mixed_precision: ``"fp16"`` or ``"bf16"`` if that is known; empty otherwise.
        facts: what workers reported of the whole job, by name: ``"precision"``, ``"compilations"``.
        log_dir: where complete logs are.
        attempt: restarts so far.
        started_s: when the job started; 0.0 before.
        now_s: the last moment that was looked at.
        outcome: as in :class:`nblaunch.events.JobFinished`; empty while the job runs.
        is_early: it was done before its time, because that was requested.
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
        """Whether the job has started."""
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

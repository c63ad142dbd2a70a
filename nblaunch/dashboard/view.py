"""The state of a job as dashboards show it: immutable data from which ``fold.py`` makes the next state.

    view = JobView()
    view = fold(view, *events)                      # in order of arrival
    view = fold_readings(view, readings, now_s)     # for every reading of the board

The view holds states, rates, remaining times, histories, and the progress bars that workers draw (in tqdm's default
format; source: ``tqdm.std.tqdm.format_meter``). All renderers (text, HTML, widgets) read the same view, so they show
the same numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard.rates import RatePoint, is_warming_up, pause_s
from nblaunch.events import AttemptStarted, ExitStatus, JobEnded, Stalled, WorkerState
from nblaunch.wire.board import SlotReading

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(state, /, **changes):
        """Return a copy of a frozen dataclass with some fields changed, like :func:`dataclasses.replace`.

        ``dataclasses.replace`` calls the constructor, which sets the 30 fields of a rank one by one and takes ten
        times as long.
        """
        changed = object.__new__(type(state))
        object.__setattr__(changed, "__dict__", vars(state) | changes)
        return changed


# Bars with a total, in full or abbreviated numbers (1.20k/4.00k), and bars without a total: "25it [00:03, 8.1it/s]".
_COUNT = r"\d+(?:\.\d+)?[kMGTPEZY]?"
_UNIT = r" ?[^\s\d\[:/%|]*"
_METER = r"\[(?P<meter>\d+:\d[^\]]*)\]?"
_BAR = re.compile(
    rf"^(?:(?P<description>.*?):\s+)?\s*(?P<percent>\d+)%\|.*?\|\s*(?P<count>{_COUNT})/(?P<total>{_COUNT})"
    rf"{_UNIT}\s*{_METER}"
)
_COUNTER = re.compile(rf"^(?:(?P<description>.*?):\s+)?(?P<count>{_COUNT}){_UNIT}\s{_METER}")


@dataclass(frozen=True)
class Bar:
    """A progress bar that a worker draws.

    Args:
        text: the bar without its drawn part: ``"train epoch 2 450/1000 [00:45<00:55, 10.0it/s]"``.
        fraction: progress, 0 to 1; None if there is no total.
    """

    text: str
    fraction: float | None


def read_bar(line: str) -> Bar | None:
    """Parse the progress bar in ``line``; return None if ``line`` is something else."""
    if "[" not in line:
        return None
    if match := _BAR.match(line):
        counted, fraction = f"{match['count']}/{match['total']}", min(int(match["percent"]) / 100, 1.0)
    elif match := _COUNTER.match(line):
        counted, fraction = match["count"], None
    else:
        return None
    description = (match["description"] or "").strip()
    return Bar(f"{description} {counted} [{match['meter'].strip()}]".lstrip(), fraction)


@dataclass(frozen=True)
class Curve:
    """Data points of a quantity during an attempt. Every second point is dropped when there are too many.

    Args:
        xs: steps, in increasing order.
        ys: values, all finite.
        stride: one in ``stride`` points is kept.
        num_seen: number of points added.
        latest: the last point added, kept or not; None before the first.
        lowest: the point with the smallest value, kept or not.
        highest: the point with the largest value, kept or not.
    """

    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()
    stride: int = 1
    num_seen: int = 0
    latest: tuple[float, float] | None = None
    lowest: tuple[float, float] | None = None
    highest: tuple[float, float] | None = None

    def extended(self, x: float, y: float, max_points: int) -> Curve:
        """Return the curve with one more point. If ``x`` does not increase, it becomes the last x plus 1."""
        if self.latest is not None and x <= self.latest[0]:
            x = self.latest[0] + 1
        xs, ys, stride = self.xs, self.ys, self.stride
        if self.num_seen % stride == 0:
            if len(xs) >= max_points:
                xs, ys, stride = xs[::2], ys[::2], stride * 2
            xs, ys = (*xs, x), (*ys, y)
        lowest = (x, y) if self.lowest is None or y < self.lowest[1] else self.lowest
        highest = (x, y) if self.highest is None or y > self.highest[1] else self.highest
        return Curve(xs, ys, stride, self.num_seen + 1, (x, y), lowest, highest)

    @property
    def is_flat(self) -> bool:
        """Whether all values are equal."""
        return self.lowest is None or self.highest is None or self.lowest[1] == self.highest[1]

    def points(self) -> list[tuple[float, float]]:
        """Return the kept points and the latest one."""
        kept = list(zip(self.xs, self.ys, strict=True))
        return kept if self.latest is None or kept[-1] == self.latest else [*kept, self.latest]


CHART_LENGTH = 200
"""Maximum number of points of a logged metric."""

LINE_STAYS_S = 2.0
"""Seconds for which a progress bar stays visible after another line replaces it, because bars usually come back."""


NUM_EPOCHS = 100
"""Number of recent epochs in the view."""


@dataclass(frozen=True)
class EpochView:
    """One epoch, as reported by all ranks together.

    Args:
        losses: sum of the ranks' mean losses.
        num_losses: number of ranks in the sum.
        duration_s: duration on the slowest rank; 0.0 while the epoch is still running.
        metrics: the last value of each metric logged in or after this epoch.
    """

    losses: float = 0.0
    num_losses: int = 0
    duration_s: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The mean loss of all ranks; None if it is unknown."""
        return self.losses / self.num_losses if self.num_losses else None


@dataclass(frozen=True)
class RankView:
    """The state of one worker.

    Args:
        rank: rank of the worker.
        reading: the last reading of the board; once the rank has finished, it contains the numbers from its training.
        state: state of the worker.
        steps_per_s: averaged over about 10 s; None if unknown.
        samples_per_s: averaged over about 10 s; None if unknown.
        busy_step_s: seconds per step without waiting for other ranks, averaged over about 10 s; None if unknown.
        metrics: the last value of each metric logged by ``accelerator.log``.
        metrics_step: the step of these values.
        training: number of the training run, counted from 0: a function may train several times, for example once per
            fold.
        ended_epoch: the last epoch of this training that has ended; 0 before the first.
        status_line: progress bar or unfinished line of the output, without escape sequences.
        line_gone_s: when another line replaced the status line; 0.0 while it is visible.
        last_line: last complete line of output, without escape sequences.
        num_lines: number of lines of output.
        exit_status: status of the process; None while it runs.
        exited_s: when it ended; infinite while it runs.
        failure: the failure in one line: type and message; empty if there is none.
        failed_at: the line of the user's code that failed, ``line 9: loss = model(batch)``; empty if unknown.
        is_consequence: the failure was most likely caused by another rank.
        has_returned: the user's function has returned.
        stepped_s: ``now_s`` of the first reading with the current step; 0.0 before the first step.
        changed_s: time of the last change to any part of the reading, or of the last output; 0.0 before the first.
        stall: the launcher's report that the rank is making no progress; None while it makes progress.
        state_s: ``now_s`` of the first reading with the current state.
        phase: the last state other than waiting.
        first_epoch: the first epoch that a reading showed in this training run; 0 before the first reading.
        first_epoch_s: ``now_s`` of the first reading with that epoch.
        warm_up: duration of the first steps of a training run, in seconds, and their number; None until they are over.
        warm_job_steps: time at which the warm-up ended, and the optimizer steps that a framework had counted by then.
        epoch_length_s: mean seconds per epoch, including its evaluation; None until the training of the first epoch has
            ended.
        host_bytes: host memory of the process; None if unknown.
        host_peak_bytes: largest value so far.
        device_peak_bytes: largest device memory in use so far; None if unknown.
        device_limit_bytes: memory of the device.
        device_use: recent utilisation of the device, 0 to 1; None if unknown.
        is_evaluating: the last loop over a loader was an evaluation.
        trained_rates: steps per second, samples per second and ``busy_step_s`` when the rank last trained.
        trained_fraction: progress of the epoch's training, 0 to 1, while the rank is evaluating.
        rate_points: points from the last few seconds, for computing rates.
        trained_span: seconds, steps and samples of the training run so far, excluding evaluations.
    """

    rank: int
    reading: SlotReading
    state: WorkerState = WorkerState.STARTING
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    busy_step_s: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_step: int | float | str | None = None
    training: int = 0
    ended_epoch: int = 0
    status_line: str = ""
    line_gone_s: float = 0.0
    last_line: str = ""
    num_lines: int = 0
    exit_status: ExitStatus | None = None
    exited_s: float = math.inf
    failure: str = ""
    failed_at: str = ""
    is_consequence: bool = False
    has_returned: bool = False
    stepped_s: float = 0.0
    changed_s: float = 0.0
    stall: Stalled | None = None
    state_s: float = 0.0
    phase: WorkerState = WorkerState.STARTING
    first_epoch: int = 0
    first_epoch_s: float = 0.0
    warm_up: tuple[float, int] | None = None
    warm_job_steps: tuple[float, int] = (0.0, 0)
    epoch_length_s: float | None = None
    host_bytes: int | None = None
    host_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_limit_bytes: int | None = None
    device_use: float | None = None
    is_evaluating: bool = False
    trained_rates: tuple[float | None, float | None, float | None] = (None, None, None)
    trained_fraction: float = 0.0
    rate_points: tuple[RatePoint, ...] = ()
    trained_span: tuple[float, int, int] = (0.0, 0, 0)

    @property
    def mean_rates(self) -> tuple[float | None, float | None]:
        """Steps and samples per second over all of training, excluding evaluations; None if unknown."""
        span_s, num_steps, num_samples = self.trained_span
        if span_s <= 0 or num_steps <= 0:
            return None, None
        return num_steps / span_s, num_samples / span_s if num_samples > 0 else None

    def without_line(self) -> RankView:
        """Return a copy of this rank's view without its status line."""
        return replace(self, status_line="", line_gone_s=0.0)

    @property
    def bar(self) -> Bar | None:
        """The status line, parsed, if it is a tqdm progress bar."""
        return read_bar(self.status_line)

    @property
    def step(self) -> int:
        """The number of batches that the current loop has completed."""
        return self.reading.step

    @property
    def total(self) -> int:
        """The number of batches in the current loop; -1 if unknown."""
        return self.reading.total

    @property
    def epoch(self) -> int:
        """The number of the current or last epoch, counted from 1; 0 before the first."""
        return self.reading.epoch

    @property
    def num_epochs(self) -> int:
        """The total number of epochs; 0 if unknown."""
        return self.reading.num_epochs

    @property
    def loss(self) -> float | None:
        """The last loss, which may be non-finite; None before the first."""
        return self.reading.loss

    @property
    def losses(self) -> tuple[tuple[float, float], ...]:
        """``(optimizer steps, mean loss)`` of the attempt, finite values only."""
        return self.reading.losses.points()

    @property
    def is_killed(self) -> bool:
        """Whether the worker was killed by a signal that the launcher did not send."""
        is_by_signal = self.exit_status is not None and self.exit_status.code < 0
        return is_by_signal and self.state is WorkerState.FAILED

    @property
    def has_progress(self) -> bool:
        """Whether the worker has reported a step."""
        return self.total >= 0 or self.step > 0 or self.epoch > 0

    @property
    def expected_total(self) -> int:
        """The number of batches expected in this loop; for a stream, as many as in the last epoch. -1 if unknown."""
        step, _, epoch = self.reading.trained
        is_stream = self.total < 0 and not self.is_evaluating and step > 0 and self.epoch > 0
        # After the last batch of an epoch, `trained` describes this epoch instead of the previous one.
        is_like_last = epoch == self.epoch - 1 or (epoch == self.epoch and step == self.step)
        return step if is_stream and is_like_last else self.total

    @property
    def fraction(self) -> float | None:
        """The progress of the current loop, 0 to 1; None if the total is unknown."""
        total = self.expected_total
        return min(self.step / total, 1.0) if total > 0 else None

    @property
    def job_fraction(self) -> float | None:
        """The progress of all epochs, 0 to 1; the progress of the current loop if the number of epochs is unknown."""
        done, total = self.reading.job_steps
        if total > 0:
            return min(done / total, 1.0)
        if not 0 < self.epoch <= self.num_epochs:
            return self.fraction
        of_epoch = self.trained_fraction if self.is_evaluating else self.fraction or 0.0
        return (self.epoch - 1 + of_epoch) / self.num_epochs

    @property
    def usual_step_s(self) -> float | None:
        """The expected seconds per step from now on, ignoring a single long step; None if unknown."""
        if not self.steps_per_s:
            return None
        points = self.rate_points
        num_steps = points[-1].steps - points[0].steps if points else 0
        usual_s = (points[-1].time_s - points[0].time_s - pause_s(points)) / num_steps if num_steps else 0.0
        return usual_s if usual_s > 0 and not is_warming_up(points) else 1 / self.steps_per_s

    @property
    def warm_up_s(self) -> float:
        """The extra seconds that the first steps of the training run took, compared with later ones."""
        if self.warm_up is None:
            return 0.0
        span_s, num_steps = self.warm_up
        steps_per_s = self.trained_rates[0]
        step_s = self.usual_step_s if not self.is_evaluating else 1 / steps_per_s if steps_per_s else None
        return max(span_s - num_steps * (step_s or 0.0), 0.0)

    @property
    def left_s(self) -> float | None:
        """The estimated seconds until all epochs end; None if unknown, for example if the number of epochs is unknown.

        For a loop that does not train, these are the seconds until the end of the loop.
        """
        step_s = self.usual_step_s
        if self.state.is_final or self.state is WorkerState.FINISHING or not step_s:
            return None
        done, total = self.reading.job_steps
        if total > 0:
            return self._job_steps_left_s(total - done)
        expected = self.expected_total
        if expected <= 0 or (is_warming_up(self.rate_points) and self.epoch_length_s is None):
            return None
        left_s = max(expected - self.step, 0) * step_s
        if not self.epoch:
            return left_s
        if self.epoch > self.num_epochs:
            return None
        num_further = self.num_epochs - self.epoch
        if not self.is_evaluating:
            return left_s + num_further * (self.epoch_length_s or expected * step_s)
        if self.epoch_length_s is None:
            return None  # the rate of an evaluation says nothing about an epoch
        return left_s + (num_further + 1.0 - self.trained_fraction) * self.epoch_length_s

    def _job_steps_left_s(self, num_left: int) -> float | None:
        """Return the seconds that the remaining optimizer steps take, including evaluations if there were any."""
        since_s, num_before = self.warm_job_steps
        num_done = self.reading.job_steps[0] - num_before
        if self.warm_up is None or num_done <= 0:
            return None
        one_pause_s = 0.0 if self.is_evaluating else pause_s(self.rate_points)
        return max(self.changed_s - since_s - one_pause_s, 0.0) / num_done * num_left


NOT_STARTED = AttemptStarted(-1, 0.0)
NOT_ENDED = JobEnded(-1, 0.0, outcome="")


@dataclass(frozen=True)
class JobView:
    """The state of a job in its last attempt. Times are wall-clock seconds (``time.time()``).

    Args:
        start: how the last attempt was started.
        end: how the job ended; its outcome is empty while the job runs.
        facts: workers' reports about the whole job, by name: ``"precision"``, ``"compilations"``.
        runs: the address or command that shows each tracker's run.
        started_s: start of the first attempt; 0.0 before it starts.
        now_s: time of the last reading.
        notes: ``(rank, text)`` of the last notes that are not warnings; rank -1 is the launcher.
        warnings: ``(rank, text)`` of the last warnings, without duplicates.
        hang: the last report about ranks that were making no progress, one line per rank; empty once they have
            continued.
        slow: why steps are slow; empty if unknown.
        curves: metrics logged by ``accelerator.log``, by name.
        epochs: the last epochs, by (number of the training run, counted from 0; number of the epoch).
        host_peak_bytes: peak host memory of all workers together; None if it is unknown because each worker counts the
            shared pages.
        ranks: one view per rank; empty before the start.
    """

    start: AttemptStarted = NOT_STARTED
    end: JobEnded = NOT_ENDED
    facts: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, str] = field(default_factory=dict)
    started_s: float = 0.0
    now_s: float = 0.0
    notes: tuple[tuple[int, str], ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    hang: tuple[str, ...] = ()
    slow: str = ""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    epochs: Mapping[tuple[int, int], EpochView] = field(default_factory=dict)
    host_peak_bytes: int | None = None
    ranks: Sequence[RankView] = ()

    @property
    def is_started(self) -> bool:
        """Whether the job has started."""
        return bool(self.ranks)

    @property
    def outcome(self) -> str:
        """How the job ended; empty while it runs."""
        return self.end.outcome

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.outcome != ""

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the last reading, or to the end."""
        return max(self.now_s - self.started_s, 0.0)

    @property
    def left_s(self) -> float | None:
        """The estimated seconds until the slowest rank ends; see :attr:`RankView.left_s`."""
        seconds = [left_s for rank in self.ranks if (left_s := rank.left_s) is not None]
        return max(seconds, default=None)

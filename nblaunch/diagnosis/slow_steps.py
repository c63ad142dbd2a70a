"""Determines why steps are slow, given how the ranks spent their time. Nothing here reads a clock, a file or a process.

    spans of a rank ──> step_times ──> StepTimes ┐
    threads, processors, other processes ────────┴──> find_cause ──> Cause, or None

A cause is something that a user can change and that takes a large part of each step. A machine that is equally busy for
all ranks is not a cause. If ranks differ for reasons that are not covered here, the dashboards still compare their
rates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from nblaunch import formatting
from nblaunch.wire.collective_calls import COLLECTIVES
from nblaunch.wire.spans import Span, SpanKind

MIN_STEPS = 5
"""Minimum number of steps needed to judge a rank."""

MIN_PERIOD_S = 2.0
"""Minimum total duration of these steps, in seconds."""

_MIN_STEP_S = 2e-3  # overhead dominates shorter steps, as in toy examples
_MIN_LOST_S = 5e-3  # of a step


@dataclass(frozen=True)
class StepTimes:
    """The time that a rank spent on some steps, by activity.

    Args:
        num_steps: number of steps.
        period_s: total duration of the steps, in seconds.
        seconds: seconds by kind, without nested spans of other kinds.
        counts: number of spans by kind; for garbage collections, the number of steps that contain one.
        evaluated_s: seconds spent in evaluations, including nested spans.
        num_workers: number of the last loader's worker processes.
        elements: mean size of a batch; 0 if it was not measured.
        saved_bytes: total bytes saved.
        batches: number of evaluation batches.
        collective: the most frequent collective.
    """

    num_steps: int
    period_s: float
    seconds: Mapping[SpanKind, float] = field(default_factory=dict)
    counts: Mapping[SpanKind, int] = field(default_factory=dict)
    evaluated_s: float = 0.0
    num_workers: int = 0
    elements: float = 0.0
    saved_bytes: float = 0.0
    batches: float = 0.0
    collective: str = "collective"

    def share(self, kind: SpanKind) -> float:
        """Return the fraction of the time spent on one kind of activity, 0 to 1."""
        return self.seconds.get(kind, 0.0) / self.period_s

    def per_step_s(self, kind: SpanKind) -> float:
        """Return the mean seconds per step."""
        return self.seconds.get(kind, 0.0) / self.num_steps

    @property
    def own_s(self) -> float:
        """Mean seconds per step in the user's code and the forward pass, excluding waits for other ranks."""
        return (self.period_s - sum(self.seconds.values())) / self.num_steps


@dataclass(frozen=True)
class Neighbour:
    """A process that runs on a rank's processor but does not belong to the job.

    Args:
        pid: process id.
        name: name of its program.
        use: fraction of the processor, 0 to 1, that this process and ``num_more`` others use together.
        is_pinned: whether it or the rank may run only on this processor.
        num_more: number of other pinned processes on this processor.
    """

    pid: int
    name: str
    use: float
    is_pinned: bool = False
    num_more: int = 0

    def joined_by(self, other: Neighbour | None) -> Neighbour:
        """Combine two pinned neighbours; otherwise return the pinned one, or the one that uses the processor more."""
        if other is None or self.is_pinned != other.is_pinned:
            return self if other is None or self.is_pinned else other
        larger = max(self, other, key=lambda neighbour: neighbour.use)
        if not self.is_pinned:
            return larger
        return replace(larger, use=self.use + other.use, num_more=self.num_more + other.num_more + 1)


@dataclass(frozen=True)
class Processors:
    """The processor time of a rank's process.

    Args:
        wait_share: fraction of the time that its main thread waited for a processor.
        num_threads: number of threads that ran about as long as the busiest thread.
        run_s: CPU seconds of all threads together.
        wait_s: seconds that all threads waited for a processor.
        neighbour: the process outside the job that uses the rank's processor the most; None if there is none.
        device_use: utilisation of its device, 0 to 1; None if the rank computes on the CPU.
    """

    wait_share: float = 0.0
    num_threads: int = 1
    run_s: float = 0.0
    wait_s: float = 0.0
    neighbour: Neighbour | None = None
    device_use: float | None = None


@dataclass(frozen=True)
class Machine:
    """Facts that are the same for all ranks on a machine.

    Args:
        num_processors: processors that the ranks may use.
        stolen_share: fraction of a virtual machine's processor time that its host withholds.
        throttled_share: fraction of the time during which a limit stops the ranks.
    """

    num_processors: int = 1
    stolen_share: float = 0.0
    throttled_share: float = 0.0


@dataclass(frozen=True)
class Cause:
    """A cause of slow steps.

    Args:
        kind: name of the cause.
        ranks: the affected ranks; empty means all ranks.
        text: a sentence without its full stop: what happens, and what to do.
        is_fixed: whether the cause is permanent, so that fewer observations are enough to be certain.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    is_fixed: bool = True

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """A key that does not depend on the numbers in the text."""
        return self.kind, self.ranks


def step_times(spans: Sequence[Span]) -> StepTimes | None:
    """Return how a rank spent its time during its steps; None if there are too few steps.

    Args:
        spans: spans of the rank.
    """
    counted = (
        SpanKind.OPTIMIZER if any(span.kind == SpanKind.OPTIMIZER for span in spans) else SpanKind.BACKWARD
    )
    ends = sorted(span.ended_s for span in spans if span.kind == counted)
    if len(ends) <= MIN_STEPS or ends[-1] - ends[0] < MIN_PERIOD_S:
        return None
    inside = [span for span in spans if span.began_s >= ends[0] and span.ended_s <= ends[-1]]
    inside = _without_closures(inside)
    seconds: Counter[SpanKind] = Counter()
    counts: Counter[SpanKind] = Counter()
    evaluated_s = 0.0
    around: list[Span] = []
    for span in sorted(inside, key=lambda span: (span.began_s, -span.ended_s)):
        kind, duration_s = SpanKind(span.kind), span.ended_s - span.began_s
        while around and around[-1].ended_s <= span.began_s:
            around.pop()
        seconds[kind] += duration_s  # type: ignore[assignment]
        if around:
            seconds[SpanKind(around[-1].kind)] -= duration_s  # type: ignore[assignment]
        if not around or around[-1].kind != kind:
            counts[kind] += 1
            evaluated_s += duration_s if kind is SpanKind.EVALUATION else 0.0
        around.append(span)
    by_kind = {kind: [span for span in inside if span.kind == kind] for kind in SpanKind}
    # Many collections in a row, such as those after profiling ends, say nothing about the steps.
    counts[SpanKind.GARBAGE] = len({bisect_right(ends, span.began_s) for span in by_kind[SpanKind.GARBAGE]})
    data, collectives = by_kind[SpanKind.DATA], by_kind[SpanKind.COLLECTIVE]
    names = Counter(span.detail for span in collectives if 0 <= span.detail < len(COLLECTIVES))
    return StepTimes(
        len(ends) - 1, ends[-1] - ends[0], seconds, counts, evaluated_s,
        num_workers=data[-1].detail if data else 0,
        elements=mean(sizes) if (sizes := [span.value for span in data if span.value]) else 0.0,
        saved_bytes=sum(span.value for span in by_kind[SpanKind.SAVE]),
        batches=sum(span.value for span in by_kind[SpanKind.EVALUATION]),
        collective=COLLECTIVES[names.most_common(1)[0][0]] if names else "collective",
    )  # fmt: skip


def _without_closures(spans: Sequence[Span]) -> list[Span]:
    """Return the spans; move the start of each optimizer's span to the end of the last backward pass in its closure.

    Lightning and LBFGS run the forward and backward passes in a closure that the optimizer calls.
    """
    backward_ends = sorted(span.ended_s for span in spans if span.kind == SpanKind.BACKWARD)

    def without_closure(span: Span) -> Span:
        number = bisect_right(backward_ends, span.ended_s) if span.kind == SpanKind.OPTIMIZER else 0
        last_s = backward_ends[number - 1] if number else 0.0
        return span._replace(began_s=last_s) if last_s > span.began_s else span

    return [without_closure(span) for span in spans]


Times = Mapping[int, StepTimes]
Uses = Mapping[int, Processors]


def find_cause(times: Times, uses: Uses, machine: Machine) -> Cause | None:
    """Return the most important cause; None if no cause of slow steps is known.

    Args:
        times: rank -> how it spent its time, over about the same period for all ranks.
        uses: rank -> its processor time in that period.
        machine: the machine on which these ranks run.
    """
    if not times or any(spent.period_s / spent.num_steps < _MIN_STEP_S for spent in times.values()):
        return None
    # Causes that slow everything down come first, because they also make data and batches look slow.
    for judge in (_threads, _shared_processor, _limits):
        if (cause := judge(uses, machine)) is not None:
            return cause
    for look in _LOOKS:
        if (cause := look(times, uses)) is not None:
            return cause
    return None


# --- processors ------------------------------------------------------------------------------------------------------

_MANY_THREADS = 4  # gloo and autograd have their own threads, which may be as busy
_MIN_WAIT = 0.25  # fraction of the time
_MIN_USE = 0.25  # of a processor
_MIN_LIMITED = 0.2


def _threads(uses: Uses, machine: Machine) -> Cause | None:
    """Find processes that have more threads than the machine has processors, so that threads wait for a processor."""
    if not uses:
        return None
    number = round(median(use.num_threads for use in uses.values()))
    total = sum(use.num_threads for use in uses.values())
    run_s, wait_s = sum(use.run_s for use in uses.values()), sum(use.wait_s for use in uses.values())
    if number < _MANY_THREADS or total < 2 * machine.num_processors or wait_s < run_s:
        return None
    fitting = max(machine.num_processors // len(uses), 1)
    return Cause(
        "threads", (),
        f"{number} threads per process on {formatting.count(machine.num_processors, 'core')} wait for each other: "
        f"call torch.set_num_threads({fitting})",
    )  # fmt: skip


def _shared_processor(uses: Uses, machine: Machine) -> Cause | None:
    """Find a rank that shares its processor with another process while other ranks do not."""
    slow = {
        rank: use for rank, use in uses.items()
        if use.wait_share >= _MIN_WAIT and use.neighbour is not None and use.neighbour.use >= _MIN_USE
    }  # fmt: skip
    others = [use.wait_share for rank, use in uses.items() if rank not in slow]
    neighbours = [use.neighbour for use in slow.values() if use.neighbour is not None]
    is_fixed = all(process.is_pinned for process in neighbours)
    # On a busy machine, other ranks also wait. A pinned neighbour is still the cause.
    share_of_others = 0.75 if is_fixed else 0.5
    if not slow or not others:
        return None
    if max(others) > share_of_others * min(use.wait_share for use in slow.values()):
        return None
    names = ", ".join(dict.fromkeys(map(_process_name, neighbours)))
    sharers = (
        "another process" if sum(1 + process.num_more for process in neighbours) == 1 else "other processes"
    )
    share, wait = (
        ("shares its core", "waits for the core")
        if len(slow) == 1
        else ("share their cores", "wait for the cores")
    )
    waiting = _percent(median(use.wait_share for use in slow.values()))
    return Cause(
        "shared core", tuple(slow),
        f"{formatting.ranks(slow)} {share} with {sharers} ({names}) and {wait} {waiting} of the time",
        is_fixed=is_fixed,
    )  # fmt: skip


def _process_name(process: Neighbour) -> str:
    more = f" and {process.num_more} more" if process.num_more else ""
    return f"{process.name}, pid {process.pid}{more}"


def _limits(uses: Uses, machine: Machine) -> Cause | None:
    """Find external limits on processor time."""
    if machine.throttled_share >= _MIN_LIMITED:
        return Cause(
            "throttled", (),
            f"the control group's limit pauses the ranks {_percent(machine.throttled_share)} of the time: give the "
            "container more processors, or launch fewer processes",
        )  # fmt: skip
    if machine.stolen_share >= _MIN_LIMITED:
        return Cause(
            "stolen", (),
            f"the host withholds {_percent(machine.stolen_share)} of this virtual machine's processor time, for "
            "example to run other virtual machines",
        )  # fmt: skip
    return None


# --- phases of a step ------------------------------------------------------------------------------------------------


def _saves(times: Times, uses: Uses) -> Cause | None:
    slow = _ranks_with(times, SpanKind.SAVE, share=0.2, count=3)
    if not slow:
        return None
    spent = max((times[rank] for rank in slow), key=lambda spent: spent.share(SpanKind.SAVE))
    number = spent.counts[SpanKind.SAVE]
    steps = max(round(spent.num_steps / number), 1)
    saved = spent.saved_bytes / spent.num_steps * steps
    what = f"saves {formatting.size(saved)}" if saved else "saves"
    who = f"each step {what}" if steps == 1 else f"a rank {what} every {steps} steps"
    share = _percent(spent.share(SpanKind.SAVE))
    return Cause(
        "saves",
        _named(slow, times),
        f"{who}, which takes {share} of the time {_on(slow, times)}: save less often",
    )


def _evaluations(times: Times, uses: Uses) -> Cause | None:
    shares = [spent.evaluated_s / spent.period_s for spent in times.values()]
    numbers = [spent.counts.get(SpanKind.EVALUATION, 0) for spent in times.values()]
    if min(shares) < 0.5 or min(numbers) < 3:
        return None
    spent = next(iter(times.values()))
    number = spent.counts[SpanKind.EVALUATION]
    return Cause(
        "evaluations", (),
        f"evaluation takes {_percent(median(shares))} of the time: {spent.batches / number:.0f} batches after every "
        f"{max(spent.num_steps / number, 1):.0f} steps",
    )  # fmt: skip


def _garbage(times: Times, uses: Uses) -> Cause | None:
    slow = _ranks_with(times, SpanKind.GARBAGE, share=0.15, count=3)
    if not slow:
        return None
    share = _percent(median(times[rank].share(SpanKind.GARBAGE) for rank in slow))
    return Cause(
        "garbage", _named(slow, times),
        f"garbage collection takes {share} of each step {_on(slow, times)}: call gc.collect() less often, and "
        "gc.freeze() after setup",
    )  # fmt: skip


def _data_of_some(times: Times, uses: Uses) -> Cause | None:
    slow = [rank for rank in _ranks_with(times, SpanKind.DATA, share=0.3) if _may_wait(uses.get(rank))]
    others = [spent.share(SpanKind.DATA) for rank, spent in times.items() if rank not in slow]
    if not slow or not others or len(slow) > len(times) // 2:
        return None
    share, usual = median(times[rank].share(SpanKind.DATA) for rank in slow), median(others)
    if share < 2.5 * usual:
        return None
    return Cause(
        "data", tuple(slow),
        f"{formatting.ranks(slow)} {'spends' if len(slow) == 1 else 'spend'} {_percent(share)} of each step waiting "
        f"for data, the others {_percent(usual)} ({_workers(times[slow[0]])})",
    )  # fmt: skip


def _long_batches(times: Times, uses: Uses) -> Cause | None:
    sizes = {rank: spent.elements for rank, spent in times.items()}
    if len(sizes) < 2 or not all(sizes.values()):
        return None
    slow = [
        rank for rank, size in sizes.items()
        if size >= 1.5 * median(other for key, other in sizes.items() if key != rank)
    ]  # fmt: skip
    others = [rank for rank in times if rank not in slow]
    if not slow or not others or len(slow) > len(times) // 2:
        return None
    usual_s = median(times[rank].own_s for rank in others)
    own_s = min(times[rank].own_s for rank in slow)
    if own_s < 1.2 * usual_s or own_s - usual_s < _MIN_STEP_S:
        return None
    size, usual = median(sizes[rank] for rank in slow), median(sizes[rank] for rank in others)
    return Cause(
        "batches", tuple(slow),
        f"batches on {formatting.ranks(slow)} are {size / usual:.1f} times longer ({size:,.0f} vs. {usual:,.0f} "
        "elements), so the others wait: distribute samples by length",
    )  # fmt: skip


def _data_of_all(times: Times, uses: Uses) -> Cause | None:
    slow = [rank for rank in _ranks_with(times, SpanKind.DATA, share=0.35) if _may_wait(uses.get(rank))]
    if len(slow) < len(times):
        return None
    share = _percent(median(spent.share(SpanKind.DATA) for spent in times.values()))
    spent = next(iter(times.values()))
    return Cause(
        "data", (), f"{share} of each step is spent waiting for data {_on(slow, times)} ({_workers(spent)})"
    )


def _collectives(times: Times, uses: Uses) -> Cause | None:
    slow = _ranks_with(times, SpanKind.COLLECTIVE, share=0.3)
    spent = next(iter(times.values()))
    number = spent.counts.get(SpanKind.COLLECTIVE, 0) / spent.num_steps
    if len(slow) < len(times) or number < 8:
        return None
    share = _percent(median(spent.share(SpanKind.COLLECTIVE) for spent in times.values()))
    return Cause(
        "collectives", (),
        f"{share} of each step is spent in {number:.0f} collectives, most of them {spent.collective}: exchange several "
        "values at once, or less often",
    )  # fmt: skip


def _optimizers(times: Times, uses: Uses) -> Cause | None:
    slow = _ranks_with(times, SpanKind.OPTIMIZER, share=0.5)
    if len(slow) < len(times):
        return None
    share = _percent(median(spent.share(SpanKind.OPTIMIZER) for spent in times.values()))
    return Cause(
        "optimizer", (),
        f"the optimizer takes {share} of each step {_on(slow, times)}: use fused=True, larger batches or gradient "
        "accumulation",
    )  # fmt: skip


_LOOKS: tuple[Callable[[Times, Uses], Cause | None], ...] = (
    _saves, _evaluations, _garbage, _data_of_some, _long_batches, _data_of_all, _collectives, _optimizers,
)  # fmt: skip


def _ranks_with(times: Times, kind: SpanKind, *, share: float, count: int = 1) -> list[int]:
    """Return the ranks on which spans of a kind take enough time to matter, and at least a given share of the time."""
    return [
        rank
        for rank, spent in times.items()
        if spent.share(kind) >= share
        and spent.per_step_s(kind) >= _MIN_LOST_S
        and spent.counts[kind] >= count
    ]


def _may_wait(use: Processors | None) -> bool:
    """Return whether a waiting rank keeps its device idle; a rank that runs ahead of a busy device does not."""
    return use is None or use.device_use is None or use.device_use < 0.5


def _workers(spent: StepTimes) -> str:
    if spent.num_workers:
        return f"num_workers={spent.num_workers} is too low"
    return "num_workers=0: pass num_workers=2 or more to the DataLoader"


def _named(slow: Sequence[int], times: Times) -> tuple[int, ...]:
    return () if len(slow) == len(times) else tuple(slow)


def _on(slow: Sequence[int], times: Times) -> str:
    return "on all ranks" if len(slow) == len(times) > 1 else f"on {formatting.ranks(slow)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

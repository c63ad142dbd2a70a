"""The result of a job: figures such as rate, losses and memory, a comparison of its ranks, and its failures.

Rates are averages over the whole training, excluding evaluations. The best value of a metric is shown if the metric's
name says which direction is better: ``loss`` falls, ``accuracy`` rises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isfinite
from statistics import median
from typing import NamedTuple

from nblaunch import formatting
from nblaunch.dashboard.view import Curve, EpochView, JobView, RankView
from nblaunch.events import WorkerState
from nblaunch.formatting import first_line, loss, rate, single_line

_MAX_METRICS = 4
_MAX_CAUSES = 4
_FALLS = re.compile(
    r"loss|err(or)?s?\b|perplexity|\bppl\b|mse|mae|rmse|[wc]er\b|nll|\bfid\b|\bbpb\b", re.IGNORECASE
)
_RISES = re.compile(
    r"acc|f1|auc|precision|recall|score|bleu|rouge|\biou\b|\bmap\b|\bndcg|\breward|psnr|ssim", re.IGNORECASE
)


class Figure(NamedTuple):
    """A number in the result.

    Args:
        name: name of the number.
        value: value with its unit.
        note: text in smaller letters, such as the best value.
    """

    name: str
    value: str
    note: str = ""


def figures(view: JobView) -> tuple[Figure, ...]:
    """Return the figures of a job that has ended. A job that did not train has fewer."""
    parts = [_progress(view), _rate(view), _loss(view), *_metrics(view), *_memory(view)]
    return tuple(part for part in parts if part is not None)


def shown_metrics(view: JobView) -> tuple[str, ...]:
    """Return the names of the metrics to show as figures: the first few numbers that have changed."""
    return tuple(name for name, curve in view.curves.items() if not curve.is_flat)[:_MAX_METRICS]


def _progress(view: JobView) -> Figure | None:
    last = min(view.ranks, key=lambda rank: (rank.epoch, rank.step), default=None)
    if last is None or not last.has_progress:
        return None
    # Without losses, only the steps of the last epoch are known for certain.
    num_steps = last.reading.losses.num_steps or (last.total if last.epoch == 1 else 0)
    is_empty = last.total == 0 and last.reading.steps_done == 0
    steps = formatting.count(num_steps, "step") if num_steps else "no steps: the loader is empty" * is_empty
    if not last.epoch:
        return Figure("steps", f"{last.step:,}" + (f" of {last.total:,}" if last.step < last.total else ""))
    if view.outcome == "done" and last.step == last.total and last.epoch >= last.num_epochs:
        return Figure("epochs", f"{last.epoch:,}", steps)
    of_all = f" of {last.num_epochs:,}" if last.num_epochs > last.epoch else ""
    position = f"step {last.step:,}" + (f" of {last.total:,}" if last.total > 0 else "")
    return Figure("epoch", f"{last.epoch:,}{of_all}", position)


def _rate(view: JobView) -> Figure | None:
    steps = [rank_rate for rank in view.ranks if (rank_rate := rank.mean_rates[0]) is not None]
    samples = [rank_rate for rank in view.ranks if (rank_rate := rank.mean_rates[1]) is not None]
    if not steps:
        return None
    per_step = f"{rate(median(steps))} steps/s"
    if samples and len(samples) == len(steps):
        return Figure("mean rate", f"{rate(sum(samples))} samples/s", per_step)
    return Figure("mean rate", per_step)


def _loss(view: JobView) -> Figure | None:
    epochs = [(number, epoch) for (_, number), epoch in sorted(view.epochs.items()) if epoch.loss is not None]
    if epochs:
        return _loss_of_epochs(epochs)
    losses = [rank.loss for rank in view.ranks if rank.loss is not None]
    return Figure("last loss", loss(sum(losses) / len(losses))) if losses else None


def _loss_of_epochs(epochs: Sequence[tuple[int, EpochView]]) -> Figure:
    values = [(epoch.loss, number) for number, epoch in epochs if epoch.loss is not None]
    last, number = values[-1]
    finite = [pair for pair in values if isfinite(pair[0])]
    best, best_number = min(finite, default=(last, number))
    note = f"best {loss(best)} in epoch {best_number}" if best < last else f"mean of epoch {number}"
    return Figure("training loss", loss(last), note)


def _metrics(view: JobView) -> list[Figure]:
    return [_metric(name, view.curves[name]) for name in shown_metrics(view)]


def _metric(name: str, curve: Curve) -> Figure:
    _, value = curve.latest or (0.0, 0.0)
    best = curve.lowest if _FALLS.search(name) else curve.highest if _RISES.search(name) else None
    note = "" if best is None or best[1] == value else f"best {loss(best[1])} at step {best[0]:,g}"
    return Figure(formatting.short_name(name), loss(value), note)


def _memory(view: JobView) -> list[Figure]:
    host = [rank.host_peak_bytes for rank in view.ranks if rank.host_peak_bytes]
    device = [rank.device_peak_bytes for rank in view.ranks if rank.device_peak_bytes]
    limits = [rank.device_limit_bytes for rank in view.ranks if rank.device_limit_bytes]
    parts = []
    if view.host_peak_bytes or host:
        whole = view.host_peak_bytes or max(host)
        each = f"{formatting.size_range(host)} a rank" if len(host) > 1 else ""
        parts.append(Figure("peak memory", formatting.size(whole), each))
    if device:
        limit = f"of {formatting.size(max(limits))}" if limits else ""
        name = "peak device memory" + (" of a rank" if len(device) > 1 else "")
        parts.append(Figure(name, formatting.size(max(device)), limit))
    return parts


# --- ranks that did the same -----------------------------------------------------------------------------------------


def alike(view: JobView) -> str:
    """Describe what all ranks of a successful job did; return "" if they differ or if there is only one rank."""
    ranks = view.ranks
    if len(ranks) < 2 or not view.is_over or any(not _ended_well(rank) for rank in ranks):
        return ""
    if len({(rank.epoch, rank.step, rank.total) for rank in ranks}) > 1:
        return ""
    parts = [f"{formatting.ranks(range(len(ranks)))} alike"]
    steps = [rank_rate for rank in ranks if (rank_rate := rank.mean_rates[0]) is not None]
    parts += [_range("{} steps/s", steps, rate)] if steps else []
    losses = [rank.loss for rank in ranks if rank.loss is not None]
    parts += [_range("last loss {}", losses, loss)] if losses else []
    return ": ".join([parts[0], ", ".join(parts[1:])]) if parts[1:] else f"{parts[0]}: done"


def _ended_well(rank: RankView) -> bool:
    is_clean = rank.exit_status is None or rank.exit_status.code == 0 or not rank.exit_status.is_known
    return rank.state is WorkerState.DONE and is_clean and not rank.failure


def _range(text: str, values: Sequence[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return text.format(high if low == high else f"{low} to {high}")


# --- failures: first the cause, with its line and what to do; then its consequences -----------------------------------


class Failure(NamedTuple):
    """One failure of one or more ranks.

    Args:
        who: the ranks, or ``"job"``.
        text: type and message, or what happened to ranks that failed because of another rank.
        where: the line of the user's code; may be empty.
        advice: lines that explain the failure and say what to do.
        is_secondary: another failure in the list caused it.
    """

    who: str
    text: str
    where: str = ""
    advice: tuple[str, ...] = ()
    is_secondary: bool = False


def failures(view: JobView) -> tuple[Failure, ...]:
    """Return the failures: the root cause first, identical failures of several ranks once, consequences in one line."""
    failed = [rank for rank in view.ranks if rank.failure]
    causes = [rank for rank in failed if not rank.is_consequence]
    others = [rank for rank in failed if rank.is_consequence]
    if not causes:  # the cause is not known yet, or is not a failure
        causes, others = others[:1], others[1:]
    shown = _causes(view, causes)
    if others:
        who = formatting.ranks(rank.rank for rank in others)
        shown.append(Failure(who, "lost the connection", is_secondary=True))
    is_of_none = not shown or (view.end.has_hung and view.end.failed_rank is None)
    if is_of_none and view.outcome == "failed" and view.end.message:
        shown = [
            Failure("job", first_line(view.end.message), advice=_advice(view)),
            *(failure._replace(advice=()) for failure in shown),
        ]
    return tuple(shown)


def _causes(view: JobView, failed_ranks: list[RankView]) -> list[Failure]:
    merged: dict[tuple[str, str], list[RankView]] = {}
    for rank in sorted(failed_ranks, key=lambda rank: rank.rank != view.end.failed_rank):
        merged.setdefault((rank.failure, rank.failed_at), []).append(rank)
    causes = []
    for number, ((failure, where), ranks) in enumerate(merged.items()):
        who = formatting.ranks(sorted(rank.rank for rank in ranks))
        causes.append(Failure(who, failure, where, () if number else _advice(view)))
    if len(causes) > _MAX_CAUSES:
        num_hidden = sum(map(len, list(merged.values())[_MAX_CAUSES:]))
        causes = [*causes[:_MAX_CAUSES], Failure(formatting.count(num_hidden, "more rank"), "see the logs")]
    return causes


def _advice(view: JobView) -> tuple[str, ...]:
    return tuple(single_line(text) for text in view.end.advice)

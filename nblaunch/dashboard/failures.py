"""Failures of a job in a few lines: first the cause, with its line and what to do; then its consequences."""

from __future__ import annotations

from typing import NamedTuple

from nblaunch import formatting
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.formatting import single_line

_NUM_CAUSES = 4


class Failure(NamedTuple):
    """One failure of one or more ranks.

    Args:
        who: the ranks, or ``"job"``.
        text: type and message, or what happened to ranks that failed because of another one.
        where: the line of the user's code; may be empty.
        advice: lines that explain it and say what to do.
        is_secondary: another failure in the list caused it.
    """

    who: str
    text: str
    where: str = ""
    advice: tuple[str, ...] = ()
    is_secondary: bool = False


def failures(view: JobView) -> tuple[Failure, ...]:
    """Return the failures: the root cause first, equal failures of several ranks once, consequences in one line."""
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
            Failure("job", _first_line(view.end.message), advice=_advice(view)),
            *(failure._replace(advice=()) for failure in shown),
        ]
    return tuple(shown)


def _causes(view: JobView, failed_ranks: list[RankView]) -> list[Failure]:
    grouped: dict[tuple[bool, str, str], list[RankView]] = {}
    for rank in failed_ranks:
        is_other = rank.rank != view.end.failed_rank
        grouped.setdefault((is_other, rank.failure, rank.failed_at), []).append(rank)
    merged: dict[tuple[str, str], list[RankView]] = {}
    for (_, failure, where), ranks in sorted(grouped.items(), key=lambda item: item[0][0]):
        merged.setdefault((failure, where), []).extend(ranks)
    causes = []
    for number, ((failure, where), ranks) in enumerate(merged.items()):
        who = formatting.ranks(sorted(rank.rank for rank in ranks))
        causes.append(Failure(who, failure, where, () if number else _advice(view)))
    if len(causes) > _NUM_CAUSES:
        num_hidden = sum(map(len, list(merged.values())[_NUM_CAUSES:]))
        causes = [*causes[:_NUM_CAUSES], Failure(formatting.count(num_hidden, "more rank"), "see the logs")]
    return causes


def _advice(view: JobView) -> tuple[str, ...]:
    return tuple(single_line(text) for text in view.end.advice)


def _first_line(text: str) -> str:
    return single_line(text.strip().partition("\n")[0])

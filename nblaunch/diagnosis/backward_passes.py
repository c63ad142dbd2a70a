"""Explains why ranks are waiting in a backward pass: other ranks did something else in the same step.

``DistributedDataParallel`` exchanges gradients in C++, where nblaunch records nothing. The recorded forward
and backward passes, and the collectives between them, show how one rank's step differs from the others'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from nblaunch import formatting
from nblaunch.diagnosis.disagreements import (
    Explanation,
    condition_of,
    described,
    outside_majority,
    places,
    sides_in_words,
)
from nblaunch.wire.collective_calls import BACKWARD, FORWARD, Call, RankCalls

_Calls = Mapping[int, RankCalls]


def explain_backward(calls: _Calls, waiting: Collection[int]) -> Explanation | None:
    """Explain how ranks' steps differ if some are waiting in a backward pass; return None if this is unknown.

    Args:
        calls: rank -> its last calls.
        waiting: ranks that are waiting in a backward pass (at least one).
    """
    forwards = {rank: _by_number(rank_calls, FORWARD) for rank, rank_calls in calls.items()}
    is_same_step = len({max(numbers, default=0) for numbers in forwards.values()}) == 1
    explanation = _other_forwards(forwards) if is_same_step else _fewer_forwards(calls, forwards)
    if explanation is None and calls.keys() <= set(waiting):
        return _more_collectives(calls)
    if explanation is None and is_same_step:
        return _finished_alone(calls, waiting)
    return explanation


def _by_number(calls: RankCalls, kind: str) -> dict[int, Call]:
    return {call.number: call for call in calls.calls if call.site.kind == kind}


def _other_forwards(forwards: Mapping[int, Mapping[int, Call]]) -> Explanation | None:
    """Explain the first forward pass that uses different models, or after which only some ranks exchange gradients."""
    for number in sorted(set.intersection(*map(set, forwards.values()))):
        in_step = {rank: numbers[number] for rank, numbers in forwards.items()}
        models = {rank: f"called {call.site.detail}" for rank, call in in_step.items() if call.site.detail}
        if len(models) == len(in_step) and len(set(models.values())) > 1:
            return _explain_forward(number, in_step, models, _MODELS)
        syncs = {rank: _EXCHANGED if call.value else _NOT_EXCHANGED for rank, call in in_step.items()}
        if len(set(syncs.values())) > 1:
            return _explain_forward(number, in_step, syncs, _NO_SYNC)
    return None


def _fewer_forwards(calls: _Calls, forwards: Mapping[int, Mapping[int, Call]]) -> Explanation | None:
    """Explain that some ranks exchange no gradients, because they called the module inside the wrapper."""
    passes = {max(_by_number(rank_calls, BACKWARD), default=0) for rank_calls in calls.values()}
    counts = {rank: max(numbers, default=0) for rank, numbers in forwards.items()}
    if len(passes) != 1 or len(set(counts.values())) != 2:
        return None
    faulty = tuple(rank for rank, number in counts.items() if number < max(counts.values()))
    others = [rank for rank in counts if rank not in faulty]
    has = "has" if len(faulty) == 1 else "have"
    times = formatting.count(counts[faulty[0]], "time")
    text = (
        f"{formatting.ranks(faulty)} {has} called DistributedDataParallel {times} before backward {max(passes)} "
        f"({_where(faulty, calls, max(passes))}), {formatting.ranks(others)} {counts[others[0]]} times"
    )
    return Explanation(text, faulty, (), _WRAPPED)


def _explain_forward(
    number: int, in_step: Mapping[int, Call], texts: Mapping[int, str], advice: str
) -> Explanation:
    shown, faulty = sides_in_words(texts, in_step)
    return Explanation(f"forward {number} of DistributedDataParallel: {shown}", faulty, (), advice)


def _more_collectives(calls: _Calls) -> Explanation | None:
    """Explain a collective that only some ranks called, although all ranks are now waiting in the backward pass.

    The backend has mistaken the extra collective for the exchange of gradients.
    """
    last: dict[int, dict[int, Call]] = {}
    for rank, rank_calls in calls.items():
        last[rank] = {
            call.number: call
            for call in rank_calls.calls
            if call.is_collective and call.site.group is not None and call.site.group.is_default
        }
    counts = {rank: max(numbers, default=0) for rank, numbers in last.items()}
    fewest = min(counts.values())
    callers = {rank: last[rank].get(fewest + 1) for rank, count in counts.items() if count > fewest}
    extra = [call for call in callers.values() if call is not None]
    if not callers or len(extra) < len(callers):
        return None
    others = [rank for rank in counts if rank not in callers]
    faulty = _minority(list(callers), others) or (tuple(callers) if all(map(condition_of, extra)) else ())
    alone = "alone called" if set(faulty) == callers.keys() or not faulty else "called"
    what = f"{described(extra[0])}, collective {fewest + 1} ({places(extra)})"
    text = f"{formatting.ranks(callers)} {alone} {what}"
    if faulty and set(faulty) == set(others):
        has = "has" if len(others) == 1 else "have"
        text = f"{formatting.ranks(others)} {has} not called {what}, which {formatting.ranks(callers)} called"
    now = places(rank_calls.last for rank_calls in calls.values() if rank_calls.last is not None)
    return Explanation(f"{text}; all ranks wait in backward ({now})", faulty, (), _EVERY_RANK)


def _finished_alone(calls: _Calls, waiting: Collection[int]) -> Explanation | None:
    """Explain that ranks have finished the backward pass in which others are waiting for these ranks' gradients."""
    numbers = {rank: max(_by_number(rank_calls, BACKWARD), default=0) for rank, rank_calls in calls.items()}
    finished = [rank for rank in calls if rank not in waiting]
    if len(set(numbers.values())) != 1 or not finished:
        return None
    number = next(iter(numbers.values()))
    has, wait = "has" if len(finished) == 1 else "have", "waits" if len(waiting) == 1 else "wait"
    text = (
        f"{formatting.ranks(finished)} {has} finished backward {number} ({_where(finished, calls, number)}) without "
        f"exchanging all the gradients that {formatting.ranks(waiting)} {wait} for ({_where(waiting, calls, number)})"
    )
    return Explanation(text, tuple(finished), (), _UNUSED)


def _where(ranks: Iterable[int], calls: _Calls, number: int) -> str:
    at = [_by_number(calls[rank], BACKWARD).get(number) for rank in ranks]
    return places(call for call in at if call is not None)


def _minority(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return outside_majority([some, others]) or ()


_EXCHANGED = "exchanged gradients"
_NOT_EXCHANGED = "did not exchange gradients (no_sync)"
_NO_SYNC = "Every rank must exchange gradients in the same steps."
_MODELS = (
    "Every rank must call its models in the same order. They are numbered in the order in which they were "
    "created."
)
_WRAPPED = "Every rank must call the prepared or wrapped model, not the module in it."
_EVERY_RANK = "Every rank of the group must call it: take it out of the condition."
_UNUSED = (
    "A rank exchanges gradients only when every parameter of the model has one: use the same parameters on "
    "every rank, or pass find_unused_parameters=True."
)

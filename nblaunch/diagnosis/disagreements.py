"""Ranks that call different collectives where they must call the same: found by comparing what each has recorded.

Nothing is compared but what must be equal: kind, size, type, reduction and root of the call with the same number in the
same group. The line of the call is shown and never compared: ranks may call the same collective on different lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nblaunch import formatting
from nblaunch.diagnosis.source_blocks import condition_on_rank, loop_around
from nblaunch.user_code import cell_name
from nblaunch.wire.collective_calls import BACKWARD, STEP, Call, Group, RankCalls

_CELL = re.compile(r"^Cell In\[(\d+)\]")
_MAX_PLACES = 3
_MAX_SIDES = 6

Sides = list[tuple[list[int], list[Call]]]
"""Ranks that agree, and their calls; those at fault come first."""


@dataclass(frozen=True)
class Explanation:
    """Why ranks wait for each other, or compute with wrong numbers.

    Args:
        headline: what happened, with the ranks at fault first.
        ranks: those at fault; empty if no side is more likely wrong than the other.
        lines: more about it.
        advice: what to do.
        check: name under which ``NBLAUNCH_CHECKS`` leaves it out.
    """

    headline: str
    ranks: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    advice: str = ""
    check: str = "collectives_differ"

    @property
    def text(self) -> str:
        """All of it, in lines."""
        return "\n".join([self.headline, *self.lines, *([self.advice] if self.advice else [])])


@dataclass(frozen=True)
class Disagreement:
    """The first call of a group in which ranks differ.

    Args:
        group: the group.
        number: number of the call in it.
        calls: rank -> its call with this number, of ranks that have come to it.
        of_rates: calls are steps of optimizers, with different learning rates.
    """

    group: Group
    number: int
    calls: Mapping[int, Call]
    of_rates: bool = False

    @property
    def missing(self) -> set[int]:
        """The ranks of the group that have not come to the call."""
        return set(self.group.ranks) - self.calls.keys()


def find_disagreement(calls: Mapping[int, RankCalls]) -> Disagreement | None:
    """Return the first call in which ranks differ; None if all that can be compared are equal.

    Args:
        calls: rank -> its last calls.
    """
    for group, by_rank in _by_group(calls).items():
        found = _first_difference(group, by_rank)
        if found is not None:
            return found
    return _unequal_rates(calls)


def explain_splits(calls: Mapping[int, RankCalls]) -> Explanation | None:
    """Return a rank that sends more or fewer rows in an ``all_to_all`` than another one expects; None if all fit."""
    last = {
        rank: (own.splits, call)
        for rank, own in calls.items()
        if own.splits is not None and (call := own.last) is not None
        if call.site.kind == "all_to_all" and call.number == own.splits.number
    }
    for rank, (splits, call) in sorted(last.items()):
        group = call.site.group or Group()
        for place_of_peer, peer in enumerate(group.ranks):
            theirs = last.get(peer)
            if theirs is None or theirs[1].site.group != group or theirs[1].number != call.number:
                continue
            sent, expected = splits.sent[place_of_peer], theirs[0].received[group.ranks.index(rank)]
            if sent != expected:
                name = described(call).partition(" ")[0]
                return Explanation(
                    f"collective {call.number}: {name}: rank {rank} sends {formatting.count(sent, 'row')} to rank "
                    f"{peer} ({place(call)}), which expects {expected} ({place(theirs[1])})",
                    advice=_SPLITS,
                )
    return None


def _by_group(calls: Mapping[int, RankCalls]) -> dict[Group, dict[int, dict[int, Call]]]:
    """Return group -> rank -> number -> collective."""
    groups: dict[Group, dict[int, dict[int, Call]]] = {}
    for rank, own in calls.items():
        for call in own.calls:
            if call.is_collective and call.site.group is not None:
                groups.setdefault(call.site.group, {}).setdefault(rank, {})[call.number] = call
    return groups


def _first_difference(group: Group, by_rank: Mapping[int, Mapping[int, Call]]) -> Disagreement | None:
    if len(by_rank) < 2:
        return None
    common = min(max(numbers) for numbers in by_rank.values())
    chains = {numbers[common].chain if common in numbers else None for numbers in by_rank.values()}
    agreed = common if len(chains) == 1 and None not in chains else 0
    numbers = sorted({number for own in by_rank.values() for number in own if number > agreed})
    for number in numbers:
        found = {rank: own[number] for rank, own in by_rank.items() if number in own}
        # Where chains differ and the calls do not, ranks have differed before what is kept.
        chains_at = {call.chain for call in found.values()}
        if len(chains_at) > 1 and len({call.signature for call in found.values()}) > 1:
            return Disagreement(group, number, found)
    return None


def _unequal_rates(calls: Mapping[int, RankCalls]) -> Disagreement | None:
    """Return a step in which ranks that keep the same model have different learning rates, as in the step before."""
    steps: dict[Group, dict[int, dict[int, Call]]] = {}
    for rank, own in calls.items():
        for call in own.calls:
            if call.site.kind == STEP and call.site.group is not None and call.value >= 0:
                steps.setdefault(call.site.group, {}).setdefault(rank, {})[call.number] = call
    for group, by_rank in steps.items():
        if len(by_rank) < 2 or any(call.site.detail for own in by_rank.values() for call in own.values()):
            continue
        common = sorted(set.intersection(*(set(own) for own in by_rank.values())))
        unequal = [number for number in common if len({own[number].value for own in by_rank.values()}) > 1]
        for number in unequal:
            if number - 1 in unequal:
                found = {rank: own[number] for rank, own in by_rank.items()}
                return Disagreement(group, number, found, of_rates=True)
    return None


# --- who is at fault -------------------------------------------------------------------------------------------------


def explain(
    found: Disagreement, calls: Mapping[int, RankCalls], steps: Mapping[int, int] | None = None
) -> Explanation:
    """Return what differs between ranks, and which of them are at fault.

    Args:
        found: what differs.
        calls: rank -> its last calls.
        steps: rank -> batches of its current loop over a prepared loader.
    """
    sides = _sides(found)
    faulty = _faulty(sides)
    if faulty:
        sides.sort(key=lambda side: not set(side[0]) <= set(faulty))
    shown = "; ".join(_side_text(ranks, calls, found, sides) for ranks, calls in sides[:_MAX_SIDES])
    if found.of_rates:
        headline = f"optimizer step {found.number}: {shown}"
        return Explanation(headline, faulty, (), _RATES, "learning_rates_differ")
    of_group = "" if found.group.is_default else f" of the group of {group_name(found.group)}"
    headline = f"collective {found.number}{of_group}: {shown}"
    return Explanation(headline, faulty, tuple(_left_loops(sides, calls, steps or {})), _advice(sides))


def _sides(found: Disagreement) -> Sides:
    by_signature: dict[object, tuple[list[int], list[Call]]] = {}
    for rank, call in sorted(found.calls.items()):
        key = call.value if found.of_rates else call.signature
        ranks, calls = by_signature.setdefault(key, ([], []))
        ranks.append(rank)
        calls.append(call)
    return sorted(by_signature.values(), key=lambda side: (len(side[0]), side[0]))


def _faulty(sides: Sides) -> tuple[int, ...]:
    """Return the ranks outside of the majority; without one, those on a line that only some ranks come to."""
    largest = max(sides, key=lambda side: len(side[0]))
    if 2 * len(largest[0]) > sum(len(ranks) for ranks, _ in sides):
        return tuple(sorted(rank for ranks, _ in sides if ranks is not largest[0] for rank in ranks))
    guarded = [ranks for ranks, calls in sides if all(condition_of(call) for call in calls)]
    if len(guarded) == 1:
        return tuple(guarded[0])
    return ()


def condition_of(call: Call) -> str:
    """Return the condition on the rank under which a call stands; empty if none is seen."""
    return condition_on_rank(call.site.filename, call.site.line)


def num_batches(ranks: Iterable[int], calls: Mapping[int, RankCalls], steps: Mapping[int, int]) -> int | None:
    """Return the number of batches that ranks have taken so far; None if it is not known, or not the same.

    Args:
        ranks: which.
        calls: rank -> its last calls, among which each ``backward`` is one of a batch.
        steps: rank -> batches of its current loop over a prepared loader.
    """
    counts = set()
    for rank in ranks:
        backwards = [call.number for call in calls[rank].calls if call.site.kind == BACKWARD]
        counts.add(max(backwards, default=0) or steps.get(rank, 0))
    return counts.pop() if len(counts) == 1 and 0 not in counts else None


def _left_loops(sides: Sides, calls_of: Mapping[int, RankCalls], steps: Mapping[int, int]) -> list[str]:
    """Return a line for each side that has left the loop in which another side still is."""
    lines = []
    for ranks, calls in sides:
        if any(condition_of(call) for call in calls):
            continue
        for others, theirs in sides:
            loops = {loop_around(call.site.filename, call.site.line) for call in theirs}
            loop = loops.pop() if len(loops) == 1 else None
            if ranks is others or loop is None or any(condition_of(call) for call in theirs):
                continue
            if not any(loop.contains(call.site.filename, call.site.line) for call in calls):
                taken = num_batches(ranks, calls_of, steps)
                after = f" after {formatting.count(taken, 'batch')}" if taken is not None else ""
                left = f"{formatting.ranks(ranks)} left the loop of line {loop.first}{after}"
                lines.append(f"{left}, in which {formatting.ranks(others)} still wait.")
    return lines


# --- text ------------------------------------------------------------------------------------------------------------


def _side_text(ranks: Sequence[int], calls: Sequence[Call], found: Disagreement, sides: Sides) -> str:
    if found.of_rates:
        what = f"learning rate {calls[0].value:g}"
    else:
        every = [call for _, own in sides for call in own]
        is_same_kind = len({call.site.kind for call in every}) == 1
        what = described(
            calls[0],
            with_reduction=is_same_kind and len({call.site.reduction for call in every}) > 1,
            with_root=is_same_kind and len({call.site.root for call in every}) > 1,
        )
    condition = "" if _faulty(sides) and ranks is not sides[0][0] else condition_of(calls[0])
    under = f" under `{condition}`" if condition else ""
    return f"{formatting.ranks(ranks)} {what}{under} ({places(calls)})"


def described(call: Call, *, with_reduction: bool = False, with_root: bool = False) -> str:
    """Return a call as text: ``all_reduce float32[4]``, ``gather (all_gather uint8[8])``."""
    site = call.site
    form = f" {_form(call)}" if site.dtype else ""
    if with_reduction and site.reduction:
        form += f" {site.reduction}"
    if with_root and site.root >= 0:
        form += f" {'peer' if site.kind in ('send', 'recv') else 'root'} {site.root}"
    if site.detail:
        form += f" ({site.detail})"
    if not site.name or site.name == site.kind or site.name.startswith(f"{site.kind}_"):
        is_object = site.name.endswith(("_object", "_object_list"))
        return f"{site.name or site.kind}{'' if is_object and not with_root else form}"
    return f"{site.name} ({site.kind}{form})"


def _form(call: Call) -> str:
    if call.site.kind == "DistributedDataParallel":
        return call.site.dtype
    more = ", ..." if call.site.num_dimensions > len(call.shape) else ""
    many = f"{call.site.num_tensors} x " if call.site.num_tensors > 1 else ""
    return f"{many}{call.site.dtype}[{', '.join(map(str, call.shape))}{more}]"


def places(calls: Iterable[Call]) -> str:
    """Return where calls stand, each place once: ``cell 5, line 9``."""
    return formatting.first(list(dict.fromkeys(place(call) for call in calls)), _MAX_PLACES, " and ")


def place(call: Call) -> str:
    """Return where a call stands: ``cell 5, line 9``, ``train.py, line 18``."""
    name = _CELL.sub(r"cell \1", cell_name(call.site.filename)).rpartition("/")[2]
    return f"{name}, line {call.site.line}" if name else "an unknown line"


def group_name(group: Group) -> str:
    """Return a group as text, as ``ranks 0, 1``."""
    name = formatting.ranks(group.ranks) if group.ranks else "many ranks"
    return f"{name} (number {group.number + 1} with these ranks)" if group.number else name


_RATES = (
    "Replicas of a model must take equal steps: give the optimizer of every rank the same learning rate, and step its "
    "scheduler as often."
)
_ORDER = "Every rank of a group must call the same collectives in the same order: look for a condition on the rank."
_SIZES = (
    "Every rank must pass tensors of the same size: pad them (pad_across_processes), or exchange objects "
    "(all_gather_object)."
)
_TYPES = "Every rank must pass tensors of the same type: convert them before."
_REDUCTIONS = "Every rank must ask for the same reduction: the result is undefined otherwise."
_ROOTS = "Every rank must name the same root (src, dst), as a rank of the job."
_SPLITS = (
    "What a rank sends to another one (input_split_sizes) must be what that one expects (output_split_sizes)."
)
_MODELS = "Every rank must build the same model."


def _advice(sides: Sides) -> str:
    """Return what to do about the first thing that differs."""
    sites = [calls[0].site for _, calls in sides]
    if len({site.kind for site in sites}) > 1:
        return _ORDER
    if sites[0].kind == "DistributedDataParallel":
        return _MODELS
    if len({site.dtype for site in sites}) > 1:
        return _TYPES
    if len({site.root for site in sites}) > 1:
        return _ROOTS
    if len({site.reduction for site in sites}) > 1:
        return _REDUCTIONS
    return _SIZES

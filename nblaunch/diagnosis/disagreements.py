"""Ranks that call different collectives where all must call the same one, detected by comparing their recorded calls.

The comparison covers only what must be equal for calls with the same number in a group: kind, size, type, reduction
and root. Messages show the line of a call, but lines are not compared: ranks may call a collective from different
lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nblaunch import formatting
from nblaunch.diagnosis.source_blocks import condition_on_rank, loop_around
from nblaunch.user_code import cell_name
from nblaunch.wire.collective_calls import BACKWARD, STEP, UNEVEN, Call, Group, RankCalls

_MAX_PLACES = 3
_MAX_SIDES = 6

Sides = list[tuple[list[int], list[Call]]]
"""Groups of ranks whose calls agree, with the call of each rank; the group at fault comes first."""


@dataclass(frozen=True)
class Explanation:
    """Why ranks are waiting for each other, or are computing wrong numbers.

    Args:
        headline: what happened, with the ranks at fault first.
        ranks: ranks at fault; empty if no side is more likely to be wrong.
        lines: details.
        advice: what to do.
        check: name by which ``NBLAUNCH_CHECKS`` switches this check off.
    """

    headline: str
    ranks: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    advice: str = ""
    check: str = "collectives_differ"

    @property
    def text(self) -> str:
        """The headline, the details and the advice, one per line."""
        return "\n".join([self.headline, *self.lines, *([self.advice] if self.advice else [])])


@dataclass(frozen=True)
class Disagreement:
    """The first of a group's calls that differs between ranks.

    Args:
        group: the group.
        number: the call's number in its group, counted from 1.
        calls: rank -> its call with this number, for ranks that have reached it.
        of_rates: whether the calls are optimizer steps with different learning rates.
    """

    group: Group
    number: int
    calls: Mapping[int, Call]
    of_rates: bool = False

    @property
    def missing(self) -> set[int]:
        """The ranks of the group that have not reached the call."""
        return set(self.group.ranks) - self.calls.keys()


def find_disagreement(calls: Mapping[int, RankCalls]) -> Disagreement | None:
    """Return the first call that differs between ranks; None if all comparable calls are equal.

    Args:
        calls: rank -> its last calls.
    """
    for group, by_rank in _by_group(calls).items():
        difference = _first_difference(group, by_rank)
        if difference is not None:
            return _completed(difference, by_rank)
    return _unequal_rates(calls)


def completed(disagreement: Disagreement, calls: Mapping[int, RankCalls]) -> Disagreement:
    """Return the disagreement, completed with the calls of all ranks whose call is known or can be inferred.

    Args:
        disagreement: the disagreement.
        calls: rank -> its calls, read together with the disagreement or later.
    """
    by_group = _steps_by_group(calls) if disagreement.of_rates else _by_group(calls)
    return _completed(disagreement, by_group.get(disagreement.group, {}))


def _completed(disagreement: Disagreement, by_rank: Mapping[int, Mapping[int, Call]]) -> Disagreement:
    """Add ranks that reached the call later, and ranks whose call is no longer recorded.

    Ranks with equal chains have made equal calls so far. A rank that shares a later chain with other ranks has
    therefore made the same call as those ranks.
    """
    number = disagreement.number
    missing = {rank: by_rank[rank] for rank in by_rank.keys() - disagreement.calls.keys()}
    if not missing:
        return disagreement
    since: dict[tuple[int, int], Call] = {}
    if not disagreement.of_rates:
        for rank, call in disagreement.calls.items():
            since |= {
                (later.number, later.chain): call
                for later in by_rank.get(rank, {}).values()
                if later.number > number
            }
    added: dict[int, Call] = {}
    for rank, calls in missing.items():
        alike = (since[key] for call in calls.values() if (key := (call.number, call.chain)) in since)
        addition = calls.get(number) or next(alike, None)
        if addition is not None:
            added[rank] = addition
    return replace(disagreement, calls=dict(sorted({**disagreement.calls, **added}.items())))


def explain_splits(calls: Mapping[int, RankCalls]) -> Explanation | None:
    """Explain which rank sends more or fewer rows in an ``all_to_all`` than its peer expects; None if all match."""
    last = {
        rank: (rank_calls.splits, call)
        for rank, rank_calls in calls.items()
        if rank_calls.splits is not None
        for call in rank_calls.calls  # the last such call counts; ranks whose parts match may have moved on
        if call.site.kind == "all_to_all" and call.number == rank_calls.splits.number
    }
    for rank, (splits, call) in sorted(last.items()):
        group = call.site.group or Group()
        for peer_index, peer in enumerate(group.ranks):
            peer_call = last.get(peer)
            if peer_call is None or peer_call[1].site.group != group or peer_call[1].number != call.number:
                continue
            sent, expected = splits.sent[peer_index], peer_call[0].received[group.ranks.index(rank)]
            if sent != expected:
                name = described(call).partition(" ")[0]
                return Explanation(
                    f"collective {call.number}: {name}: rank {rank} sends {formatting.count(sent, 'row')} to rank "
                    f"{peer} ({place(call)}), which expects {expected} ({place(peer_call[1])})",
                    advice=_SPLITS,
                )
    return None


def _by_group(calls: Mapping[int, RankCalls]) -> dict[Group, dict[int, dict[int, Call]]]:
    """Return the collectives by group, rank and number."""
    groups: dict[Group, dict[int, dict[int, Call]]] = {}
    for rank, rank_calls in calls.items():
        last: Group | None = None
        by_number: dict[int, Call] = {}
        for call in rank_calls.calls:
            if not call.is_collective or call.site.group is None:
                continue
            if (
                call.site.group is not last
            ):  # there are 255 calls per rank, and hashing a group of 512 ranks is slow
                last = call.site.group
                by_number = groups.setdefault(last, {}).setdefault(rank, {})
            by_number[call.number] = call
    return groups


def _first_difference(group: Group, by_rank: Mapping[int, Mapping[int, Call]]) -> Disagreement | None:
    if len(by_rank) < 2:
        return None
    common = min(max(numbers) for numbers in by_rank.values())
    chains = {numbers[common].chain if common in numbers else None for numbers in by_rank.values()}
    agreed = common if len(chains) == 1 and None not in chains else 0
    numbers = sorted({number for rank_calls in by_rank.values() for number in rank_calls if number > agreed})
    for number in numbers:
        calls = {rank: rank_calls[number] for rank, rank_calls in by_rank.items() if number in rank_calls}
        # If chains differ but these calls do not, the ranks differed in a call that is no longer recorded.
        chains_at = {call.chain for call in calls.values()}
        if len(chains_at) > 1 and len({call.signature for call in calls.values()}) > 1:
            return Disagreement(group, number, calls)
    return None


def _steps_by_group(calls: Mapping[int, RankCalls]) -> dict[Group, dict[int, dict[int, Call]]]:
    """Return the optimizer steps whose learning rate is known, keyed by group, rank and number."""
    steps: dict[Group, dict[int, dict[int, Call]]] = {}
    for rank, rank_calls in calls.items():
        for call in rank_calls.calls:
            if call.site.kind == STEP and call.site.group is not None and call.value >= 0:
                steps.setdefault(call.site.group, {}).setdefault(rank, {})[call.number] = call
    return steps


def _unequal_rates(calls: Mapping[int, RankCalls]) -> Disagreement | None:
    """Return an optimizer step in which replicas use different learning rates, as they did in the previous step."""
    for group, by_rank in _steps_by_group(calls).items():
        if len(by_rank) < 2 or any(
            call.site.detail == UNEVEN for rank_calls in by_rank.values() for call in rank_calls.values()
        ):
            continue
        common = sorted(set.intersection(*(set(rank_calls) for rank_calls in by_rank.values())))
        unequal = [
            number
            for number in common
            if len({rank_calls[number].value for rank_calls in by_rank.values()}) > 1
            and len({rank_calls[number].site.detail for rank_calls in by_rank.values()})
            == 1  # the same parameters
        ]
        for number in unequal:
            if number - 1 in unequal:
                calls_at = {rank: rank_calls[number] for rank, rank_calls in by_rank.items()}
                return Disagreement(group, number, calls_at, of_rates=True)
    return None


# --- who is at fault -------------------------------------------------------------------------------------------------


def explain(
    disagreement: Disagreement, calls: Mapping[int, RankCalls], steps: Mapping[int, int] | None = None
) -> Explanation:
    """Explain how the ranks differ, and which ranks are at fault.

    Args:
        disagreement: the first difference.
        calls: rank -> its last calls.
        steps: rank -> batches of its current loop over a prepared loader.
    """
    sides = _sides(disagreement)
    faulty = _faulty(sides)
    if faulty:
        sides.sort(key=lambda side: not set(side[0]) <= set(faulty))
    shown = "; ".join(_side_text(ranks, calls, disagreement, sides) for ranks, calls in sides[:_MAX_SIDES])
    if disagreement.of_rates:
        headline = f"optimizer step {disagreement.number}: {shown}"
        return Explanation(headline, faulty, (), _RATES, "learning_rates_differ")
    headline = f"{numbered(disagreement.number, disagreement.group)}: {shown}"
    lines = [*_left_loops(sides, calls, steps or {}), *_other_lines(disagreement, calls)]
    if len({described(calls_of_side[0]) for _, calls_of_side in sides}) == 1 and _advice(sides) == _MODELS:
        lines.append("Their parameters have different shapes or a different order.")
    return Explanation(headline, faulty, tuple(lines), _advice(sides))


def _other_lines(disagreement: Disagreement, calls: Mapping[int, RankCalls]) -> list[str]:
    """Return a line about an earlier call that ranks made from different source lines; an empty list if none is known.

    A backend may pair a call that only some ranks make with the others' next call, if both have the same kind
    and size. The first difference that nblaunch finds then comes too late. Ranks that often use different
    lines do so on purpose.
    """
    by_rank = {
        rank: numbers
        for rank, numbers in _by_group(calls).get(disagreement.group, {}).items()
        if rank in disagreement.calls
    }
    common = sorted(
        number for number in set.intersection(*map(set, by_rank.values())) if number < disagreement.number
    )
    is_other = [
        len({(call.site.filename, call.site.line) for call in (at[number] for at in by_rank.values())}) > 1
        for number in common
    ]
    begins = [
        number
        for number, before, now in zip(common[1:], is_other, is_other[1:], strict=False)
        if now and not before
    ]
    if len(begins) != 1 or is_other[0]:
        return []
    texts = {rank: place(at[begins[0]]) for rank, at in by_rank.items()}
    shown = "; ".join(
        f"{formatting.ranks(ranks)} {text}" for text, ranks in formatting.ranks_by_text(texts).items()
    )
    return [f"Earlier, ranks called collective {begins[0]} from different lines: {shown}."]


def _sides(disagreement: Disagreement) -> Sides:
    by_signature: dict[object, tuple[list[int], list[Call]]] = {}
    for rank, call in sorted(disagreement.calls.items()):
        key = call.value if disagreement.of_rates else call.signature
        ranks, calls = by_signature.setdefault(key, ([], []))
        ranks.append(rank)
        calls.append(call)
    return sorted(by_signature.values(), key=lambda side: (len(side[0]), side[0]))


def outside_majority(sides: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the ranks outside the majority; None if no side has more than half of the ranks."""
    largest = max(sides, key=len)
    if 2 * len(largest) <= sum(map(len, sides)):
        return None
    return tuple(sorted(rank for ranks in sides if ranks is not largest for rank in ranks))


def sides_in_words(texts: Mapping[int, str], calls: Mapping[int, Call]) -> tuple[str, tuple[int, ...]]:
    """Describe what each side does and where, starting with the ranks at fault; also return these ranks, if any.

    Args:
        texts: rank -> what it does; ranks with the same text form a side.
        calls: rank -> its call.
    """
    sides = formatting.ranks_by_text(texts)
    faulty = outside_majority(list(sides.values())) or ()
    ordered = sorted(sides.items(), key=lambda side: not set(side[1]) <= set(faulty))
    shown = (
        f"{formatting.ranks(ranks)} {text} ({places(calls[rank] for rank in ranks)})"
        for text, ranks in ordered
    )
    return "; ".join(shown), faulty


def _faulty(sides: Sides) -> tuple[int, ...]:
    """Return the ranks outside the majority; if there is none, the ranks on a line that only some ranks reach."""
    minority = outside_majority([ranks for ranks, _ in sides])
    if minority is not None:
        return minority
    guarded = [ranks for ranks, calls in sides if all(condition_of(call) for call in calls)]
    if len(guarded) == 1:
        return tuple(guarded[0])
    return ()


def condition_of(call: Call) -> str:
    """Return the condition that lets only some ranks reach a call; empty if the source shows none."""
    return condition_on_rank(call.site.filename, call.site.line)


def num_batches(ranks: Iterable[int], calls: Mapping[int, RankCalls], steps: Mapping[int, int]) -> int | None:
    """Return the number of batches that the ranks have taken; None if it is unknown or differs between them.

    Args:
        ranks: the ranks to count.
        calls: rank -> its last calls, with one ``backward`` for each batch.
        steps: rank -> batches of its current loop over a prepared loader.
    """
    counts = set()
    for rank in ranks:
        backwards = [call.number for call in calls[rank].calls if call.site.kind == BACKWARD]
        counts.add(max(backwards, default=0) or steps.get(rank, 0))
    return counts.pop() if len(counts) == 1 and 0 not in counts else None


def _left_loops(sides: Sides, calls_of: Mapping[int, RankCalls], steps: Mapping[int, int]) -> list[str]:
    """Return a line for each side that has left a loop that another side is still in."""
    lines = []
    for ranks, calls in sides:
        if any(condition_of(call) for call in calls):
            continue
        for others, other_calls in sides:
            loops = {loop_around(call.site.filename, call.site.line) for call in other_calls}
            loop = loops.pop() if len(loops) == 1 else None
            if ranks is others or loop is None or any(condition_of(call) for call in other_calls):
                continue
            if all(loop.is_left_at([(call.site.filename, call.site.line)]) for call in calls):
                num_taken = num_batches(ranks, calls_of, steps)
                after = f" after {formatting.count(num_taken, 'batch')}" if num_taken is not None else ""
                text = f"{formatting.ranks(ranks)} left the loop on line {loop.first}{after}"
                wait = "waits" if len(others) == 1 else "wait"
                lines.append(f"{text}, but {formatting.ranks(others)} still {wait} in it.")
    return lines


# --- text ------------------------------------------------------------------------------------------------------------


def _side_text(ranks: Sequence[int], calls: Sequence[Call], disagreement: Disagreement, sides: Sides) -> str:
    if disagreement.of_rates:
        call_text = f"learning rate {calls[0].value:g}"
    else:
        all_calls = [call for _, side_calls in sides for call in side_calls]
        is_same_kind = len({call.site.kind for call in all_calls}) == 1
        call_text = described(
            calls[0],
            with_reduction=is_same_kind and len({call.site.reduction for call in all_calls}) > 1,
            with_root=is_same_kind and len({call.site.root for call in all_calls}) > 1,
        )
    condition = "" if _faulty(sides) and ranks is not sides[0][0] else condition_of(calls[0])
    condition_text = f" under `{condition}`" if condition else ""
    return f"{formatting.ranks(ranks)} {call_text}{condition_text} ({places(calls)})"


def described(call: Call, *, with_reduction: bool = False, with_root: bool = False) -> str:
    """Return a call as text: ``all_reduce float32[4]``, ``gather (all_gather uint8[8])``."""
    site = call.site
    details = f" {_form(call)}" if site.dtype else ""
    if with_reduction and site.reduction:
        details += f" {site.reduction}"
    if with_root and site.root >= 0:
        details += f" {'peer' if site.kind in ('send', 'recv') else 'root'} {site.root}"
    if site.detail:
        details += f" ({site.detail})"
    if not site.name or site.name == site.kind or site.name.startswith(f"{site.kind}_"):
        is_object = site.name.endswith(("_object", "_object_list"))
        return f"{site.name or site.kind}{'' if is_object and not with_root else details}"
    return f"{site.name} ({site.kind}{details})"


def _form(call: Call) -> str:
    if call.site.kind == "DistributedDataParallel":
        return call.site.dtype
    ellipsis = ", ..." if call.site.num_dimensions > len(call.shape) else ""
    count = f"{call.site.num_tensors} x " if call.site.num_tensors > 1 else ""
    return f"{count}{call.site.dtype}[{', '.join(map(str, call.shape))}{ellipsis}]"


def places(calls: Iterable[Call]) -> str:
    """Return where calls are made, without duplicates: ``cell 5, line 9``."""
    return formatting.first(list(dict.fromkeys(place(call) for call in calls)), _MAX_PLACES, " and ")


def place(call: Call) -> str:
    """Return where a call is made: ``cell 5, line 9``, ``train.py, line 18``."""
    name = cell_name(call.site.filename).rpartition("/")[2]
    return f"{name}, line {call.site.line}" if name else "an unknown line"


def numbered(number: int, group: Group) -> str:
    """Return a collective by its number, such as ``collective 3 of the group of ranks 0 and 1``."""
    return f"collective {number}" + ("" if group.is_default else f" of the group of {group_name(group)}")


def group_name(group: Group) -> str:
    """Return a group as text, such as ``ranks 0 and 1``."""
    name = formatting.ranks(group.ranks) if group.ranks else "many ranks"
    return f"{name} (number {group.number + 1} with these ranks)" if group.number else name


_RATES = (
    "Replicas of a model must take equal steps: give the optimizers on all ranks the same learning rate, and step "
    "their schedulers the same number of times."
)
_ORDER = "Every rank of a group must call the same collectives in the same order: look for a condition on the rank."
_SIZES = (
    "Every rank must pass tensors of the same size: pad them (pad_across_processes), or exchange objects "
    "(all_gather_object)."
)
_TYPES = "Every rank must pass tensors of the same type: convert them first."
_REDUCTIONS = "Every rank must ask for the same reduction: the result is undefined otherwise."
_ROOTS = "Every rank must pass the same root (src or dst), given as a rank of the job."
_SPLITS = "What a rank sends (input_split_sizes) must match what its peer expects (output_split_sizes)."
_MODELS = "Every rank must build the same model."


def _advice(sides: Sides) -> str:
    """Return what to do about the first difference."""
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

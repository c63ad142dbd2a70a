"""Ranks that are waiting for each other although their calls agree: one is missing, arrived alone, or left a loop.

    rank 0   ... 40 41          waits in all_reduce, number 41
    rank 1   ... 40  returned   left the loop after 22 batches

Each rank is assigned an activity: the call that it is waiting in, or its position if it is not waiting for other ranks.
If most ranks have the same activity, the others are considered to be at fault. A majority is not proof, so the text
says what each side does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nblaunch import formatting
from nblaunch.diagnosis.backward_passes import explain_backward
from nblaunch.diagnosis.disagreements import (
    Explanation,
    condition_of,
    described,
    group_name,
    num_batches,
    numbered,
    outside_majority,
    places,
    sides_in_words,
)
from nblaunch.diagnosis.source_blocks import Loop, condition_on_rank, loop_around
from nblaunch.diagnosis.stacks import Position
from nblaunch.diagnosis.transfers import explain_transfers
from nblaunch.user_code import is_user_file
from nblaunch.wire.collective_calls import (
    BACKWARD,
    FORWARD,
    NEW_GROUP,
    POINT_TO_POINT,
    STEP,
    Call,
    RankCalls,
)

_MAX_SIDES = 5
_SET_UP = ("init_process_group", "new_group", "new_subgroups", "split_group", "init_device_mesh")


@dataclass(frozen=True)
class _Activity:
    """The activity of a rank.

    Args:
        kind: ``"returned"``, ``"elsewhere"``, ``"behind"``, ``"aborted"``, ``"unknown"``, or ``"waits"``.
        call: the call that it is waiting in; None if the rank has not recorded the call.
        position: where the rank is in its code, if it has not recorded its call or is not waiting.
        key: equal for ranks with the same activity.
        left: how its function ended, if it has ended.
    """

    kind: str
    key: tuple[object, ...]
    call: Call | None = None
    position: Position | None = None
    left: str = ""


@dataclass(frozen=True)
class _Side:
    """Ranks with the same activity."""

    ranks: tuple[int, ...]
    activities: tuple[_Activity, ...]

    @property
    def kind(self) -> str:
        return self.activities[0].kind

    @property
    def calls(self) -> list[Call]:
        return [activity.call for activity in self.activities if activity.call is not None]


@dataclass(frozen=True)
class Standing:
    """Facts about ranks that make no progress.

    Args:
        calls: rank -> its last calls.
        left: rank whose function has ended -> how it ended, such as ``returned from the function``.
        positions: rank -> position in its code; None if the stacks were not collected.
        steps: rank -> number of batches so far in its current loop over a prepared loader.
        aborted: ranks that torch's backend has ended because data did not match.
    """

    calls: Mapping[int, RankCalls]
    left: Mapping[int, str] = field(default_factory=dict)
    positions: Mapping[int, Position] | None = None
    steps: Mapping[int, int] | None = None
    aborted: Collection[int] = ()


def explain_stall(standing: Standing) -> Explanation | None:
    """Explain which rank is missing, and where; return None if the recorded calls do not show it."""
    activities = {rank: _activity(standing, rank) for rank in sorted(standing.calls)}
    recorded = {rank: activity for rank, activity in activities.items() if activity.kind != "unknown"}
    by_key: dict[tuple[object, ...], dict[int, _Activity]] = {}
    for rank, activity in recorded.items():
        by_key.setdefault(activity.key, {})[rank] = activity
    sides = [_Side(tuple(members), tuple(members.values())) for members in by_key.values()]
    if not any(side.kind == "waits" and side.calls for side in sides):
        return None
    if (transfers := _transfers(standing, sides)) is not None:
        return transfers
    if len(sides) < 2:
        return _backward(standing, sides)
    faulty = _faulty(sides, standing)
    sides.sort(key=lambda side: (not set(side.ranks) <= set(faulty), side.kind == "waits", side.ranks))
    return (
        _backward(standing, sides)
        or _new_groups(standing, sides)
        or _missing_members(sides, faulty)
        or _left_loop(standing, sides, faulty)
        or _alone(standing, sides, faulty)
        or _plain(standing, sides, faulty)
    )


def waits_for_finished(standing: Standing) -> bool:
    """Return whether all running ranks are waiting, one of them for a call that a finished rank will never make."""
    positions = standing.positions or {}
    finished = [standing.calls[rank] for rank in standing.left if rank in standing.calls]
    if not all(at.waits_for_ranks for at in positions.values()):
        return False
    return any(
        (at.waiting_in == "init_process_group" and not gone.has_joined)
        or _never_makes(gone, standing.calls[rank].last)
        for rank, at in positions.items()
        for gone in finished
    )


def _never_makes(gone: RankCalls, call: Call | None) -> bool:
    """Return whether a finished rank has not made ``call``, a collective of the default group."""
    if call is None or not call.is_collective or call.site.group is None or not call.site.group.is_default:
        return False
    numbers = [
        made.number for made in gone.calls if made.is_collective and made.site.group == call.site.group
    ]
    has_all = bool(numbers) or gone.num_calls == len(gone.calls)  # otherwise, some were overwritten
    return has_all and call.number > max(numbers, default=0)


def _activity(standing: Standing, rank: int) -> _Activity:
    if rank in standing.left:
        return _Activity("returned", ("returned",), left=standing.left[rank])
    call = _pending(standing.calls[rank])
    if standing.positions is not None:
        position = standing.positions.get(rank)
        if position is None:
            return _Activity("unknown", ())
        if not position.waits_for_ranks:
            return _Activity("elsewhere", ("elsewhere", position.place), None, position)
        last = standing.calls[rank].last
        if position.waiting_in in _SET_UP:
            call = last if last is not None and last.site.kind == NEW_GROUP else None
            last = None  # it is waiting in this call, or in one that is not recorded
        if call is None and last is not None and last.site.kind == FORWARD:
            call = last  # forward broadcasts buffers
        if call is None:
            return _Activity("waits", (position.waiting_in, position.place), None, position)
    if call is None:
        has_none = standing.positions is None and not standing.calls[rank].num_calls
        return _Activity("behind", ("behind",)) if has_none else _Activity("unknown", ())
    if standing.positions is None and _is_over(standing, call):
        kind = "aborted" if rank in standing.aborted else "behind"
        return _Activity(kind, (kind, call.site.group, call.number), call)
    if call.is_collective:
        return _Activity("waits", ("collective", call.site.group, call.number), call)
    if call.site.kind == NEW_GROUP:
        return _Activity("waits", (NEW_GROUP, call.site.group), call)
    return _Activity("waits", (call.site.kind,), call)


def _is_over(standing: Standing, call: Call) -> bool:
    """Return whether another rank has made a later call in the group; if so, no rank is waiting in ``call``."""
    if not call.is_collective:
        return False
    return any(
        later.site.group == call.site.group and later.number > call.number and later.is_collective
        for rank_calls in standing.calls.values()
        for later in rank_calls.calls
    )


def _pending(calls: RankCalls) -> Call | None:
    """Return the call that a rank may be waiting in; None if its last call is not one that waits."""
    last = calls.last
    if last is None or last.site.kind in (STEP, FORWARD, NEW_GROUP):
        return None
    return last


# --- who is at fault -------------------------------------------------------------------------------------------------


def _faulty(sides: Sequence[_Side], standing: Standing) -> tuple[int, ...]:
    """Return the ranks outside the majority; without one, ranks with a conditional call; failing these, busy ranks."""
    of_groups = [side for side in sides if _absent(side)]
    minority = outside_majority([side.ranks for side in sides])
    if of_groups and minority != _ranks_of([side for side in sides if side.kind == "returned"]):
        if faulty := _faulty_in_groups(sides, of_groups):
            return faulty
    elif minority is not None:
        # A backend ends the rank that receives wrong data, not the rank that sends it.
        is_of_abort = all(side.kind == "aborted" for side in sides if set(side.ranks) <= set(minority))
        return () if is_of_abort else minority
    waiting = [side for side in sides if side.kind == "waits" and side.calls]
    guarded = [side for side in waiting if all(_condition(standing, side))]
    if len(guarded) == 1:
        return guarded[0].ranks
    busy = [side for side in sides if side.kind in ("elsewhere", "behind")]
    return _ranks_of(busy) if len(busy) < len(sides) else ()


def _faulty_in_groups(sides: Sequence[_Side], of_groups: Sequence[_Side]) -> tuple[int, ...]:
    """Return the ranks at fault if some are waiting in a smaller group; ranks outside the group do not count.

    Args:
        sides: all sides.
        of_groups: sides that are waiting in a collective of a smaller group, or for a new group.
    """
    blocked = _ranks_of(of_groups)
    waiting = _ranks_of([side for side in sides if side.kind == "waits"])
    faulty: set[int] = set()
    for side in of_groups:
        absent = _absent(side)
        if not absent & set(waiting) or (len(absent) < len(side.ranks) and not absent & set(blocked)):
            faulty |= absent
        elif side.calls[0].site.kind == NEW_GROUP:
            faulty |= absent - set(blocked)
        elif len(absent) > len(side.ranks):
            faulty |= set(side.ranks)
    return tuple(sorted(faulty))


def _absent(side: _Side) -> set[int]:
    """Return the members of a smaller group that have not made the call in which a side is waiting."""
    call = side.calls[0] if side.kind == "waits" and side.calls else None
    group = (
        call.site.group if call is not None and (call.is_collective or call.site.kind == NEW_GROUP) else None
    )
    return set() if group is None or group.is_default else set(group.ranks) - set(side.ranks)


def _ranks_of(sides: Sequence[_Side]) -> tuple[int, ...]:
    return tuple(sorted(rank for side in sides for rank in side.ranks))


def _condition(standing: Standing, side: _Side) -> list[str]:
    """Return the condition that lets only some ranks reach their call, for each rank on a side; "" if there is none."""
    return [
        _condition_of_rank(standing, rank, activity.call)
        for rank, activity in zip(side.ranks, side.activities, strict=True)
        if activity.call is not None
    ]


def _condition_of_rank(standing: Standing, rank: int, call: Call) -> str:
    """Return the condition around a call, or around one of the functions that contain it."""
    condition = condition_of(call)
    position = (standing.positions or {}).get(rank)
    if condition or position is None:
        return condition
    around = [
        condition_on_rank(frame.filename, frame.line)
        for frame in position.stack
        if is_user_file(frame.filename)
    ]
    return next(filter(None, around), "")


# --- what happened ---------------------------------------------------------------------------------------------------


def _left_loop(standing: Standing, sides: Sequence[_Side], faulty: Sequence[int]) -> Explanation | None:
    """Explain that one side has left a loop that the other side is still in, or has entered a loop alone."""
    for inside in sides:
        loop = _loop_of(inside)
        if loop is None:
            continue
        outside = [side for side in sides if side is not inside]
        leavers = _ranks_of(outside)
        after, batch = (
            num_batches(ranks, standing.calls, standing.steps or {}) for ranks in (leavers, inside.ranks)
        )
        has_fewer = after is not None and batch is not None and after < batch
        if any(not _is_outside(standing, side, loop, has_fewer=has_fewer) for side in outside):
            continue
        if any(condition for side in sides for condition in _condition(standing, side)):
            continue
        how_far = where = ""
        if after is not None and batch is not None:
            how_far = f" after {formatting.count(after, 'batch')}"
            where = f", in batch {batch if batch > after else batch + 1}"
        is_still = "is still" if len(inside.ranks) == 1 else "are still"
        left, stay = formatting.ranks(leavers), formatting.ranks(inside.ranks)
        headline = f"{left} left the loop on line {loop.first}{how_far}, but {stay} {is_still} in it{where}"
        if set(faulty) == set(inside.ranks):
            headline = (
                f"{stay} {is_still} in the loop on line {loop.first}{where}, but {left} left it{how_far}"
            )
        return Explanation(f"{headline}: {_states(sides)}", tuple(faulty), (), _UNEVEN)
    return None


def _loop_of(side: _Side) -> Loop | None:
    """Return the loop that all ranks of a side are in; None if there is none."""
    if side.kind != "waits" or not side.calls:
        return None
    loops = {loop_around(call.site.filename, call.site.line) for call in side.calls}
    return loops.pop() if len(loops) == 1 else None


def _is_outside(standing: Standing, side: _Side, loop: Loop, *, has_fewer: bool) -> bool:
    """Return whether all ranks of a side have left a loop.

    A rank in a function that calls the loop's function may have left the loop or may not have entered it yet.
    It has left the loop if it has taken fewer batches (``has_fewer``).
    """
    if side.kind == "returned" or not side.calls:
        return side.kind == "returned"
    places = [
        _user_lines(standing, rank) or [(call.site.filename, call.site.line)]
        for rank, call in zip(side.ranks, side.calls, strict=True)
    ]
    return all(loop.is_left_at(place) or (has_fewer and loop.is_called_at(place)) for place in places)


def _user_lines(standing: Standing, rank: int) -> list[tuple[str, int]]:
    """Return the lines of the user's code in a rank's stack; empty if the stack is unknown."""
    position = (standing.positions or {}).get(rank)
    stack = () if position is None else position.stack
    return [(frame.filename, frame.line) for frame in stack if is_user_file(frame.filename)]


def _alone(standing: Standing, sides: Sequence[_Side], faulty: Sequence[int]) -> Explanation | None:
    """Explain that the ranks at fault have made a call that the others can't reach because of a condition."""
    guilty = [side for side in sides if set(side.ranks) <= set(faulty)]
    if len(guilty) != 1 or guilty[0].kind != "waits" or not guilty[0].calls:
        return None
    side = guilty[0]
    conditions = sorted(set(filter(None, _condition(standing, side))))
    condition_text = f" under `{conditions[0]}`" if conditions else ""
    text = f"{formatting.ranks(side.ranks)} alone called {_what(side.calls[0])}{condition_text} ({places(side.calls)})"
    others = _states([other for other in sides if other is not side])
    advice = _ALONE if conditions else _SAME
    return Explanation(f"{text}; {others}", tuple(faulty), (), advice)


def _new_groups(standing: Standing, sides: Sequence[_Side]) -> Explanation | None:
    """Explain that ranks create groups in different orders, if a new group's members are all waiting for each other."""
    if not any(side.calls and side.calls[0].site.kind == NEW_GROUP and not _absent(side) for side in sides):
        return None
    by_rank = {
        rank: {call.number: call for call in rank_calls.calls if call.site.kind == NEW_GROUP}
        for rank, rank_calls in standing.calls.items()
    }
    for number in sorted(set.intersection(*map(set, by_rank.values()))):
        created = {rank: calls[number] for rank, calls in by_rank.items()}
        texts = {rank: _what(call) for rank, call in created.items()}
        if len(set(texts.values())) > 1:
            shown, faulty = sides_in_words(texts, created)
            return Explanation(f"new group {number}: {shown}", faulty, (), _GROUPS)
    return None


def _missing_members(sides: Sequence[_Side], faulty: Sequence[int]) -> Explanation | None:
    """Explain that members of a smaller group have not made the call in which its other members are waiting."""
    for side in sides:
        missing = sorted(_absent(side))
        others = [other for other in sides if other is not side]
        if (
            not missing
            or missing != sorted(faulty)
            or any(set(other.ranks) <= set(missing) for other in others)
        ):
            continue  # the ranks at fault are a side, and come first anyway
        has, wait = "has" if len(missing) == 1 else "have", "waits" if len(side.ranks) == 1 else "wait"
        text = f"{formatting.ranks(missing)} {has} not called {_what(side.calls[0])}"
        text += f", in which {formatting.ranks(side.ranks)} {wait} ({places(side.calls)})"
        return Explanation(f"{text}; {_states(others)}", tuple(faulty), (), _SAME)
    return None


def _plain(standing: Standing, sides: Sequence[_Side], faulty: Sequence[int]) -> Explanation:
    advice = _COME if any(side.kind in ("elsewhere", "behind") for side in sides) else _SAME
    if advice == _COME and standing.positions is not None:
        advice = f"{_COME} {_BUSY}"
    return Explanation(_states(sides), tuple(faulty), (), advice)


def _backward(standing: Standing, sides: Sequence[_Side]) -> Explanation | None:
    waiting = [
        rank for side in sides for rank in side.ranks if {BACKWARD} == {call.site.kind for call in side.calls}
    ]
    return explain_backward(standing.calls, waiting) if waiting else None


def _transfers(standing: Standing, sides: Sequence[_Side]) -> Explanation | None:
    waiting = [side for side in sides if side.kind == "waits" and side.calls]
    ranks = [rank for side in waiting if side.calls[0].site.kind in POINT_TO_POINT for rank in side.ranks]
    if not ranks:
        return None
    states = {rank: _state(replace(side, ranks=(rank,))) for side in sides for rank in side.ranks}
    states = {rank: text.removeprefix(f"rank {rank} ") for rank, text in states.items()}
    return explain_transfers(standing.calls, ranks, states)


# --- text ------------------------------------------------------------------------------------------------------------


def _states(sides: Sequence[_Side]) -> str:
    return "; ".join(map(_state, sides[:_MAX_SIDES]))


def _state(side: _Side) -> str:
    who = formatting.ranks(side.ranks)
    is_one = len(side.ranks) == 1
    position = side.activities[0].position
    if side.kind == "returned":
        ways = {rank: activity.left for rank, activity in zip(side.ranks, side.activities, strict=True)}
        return formatting.states(ways)
    if side.kind == "elsewhere":
        assert position is not None, "a rank that does not wait has a position"
        is_absent = f"{who} {'has' if is_one else 'have'} not arrived, and"
        if position.no_reply:
            return f"{is_absent} {'does' if is_one else 'do'} not answer ({position.no_reply})"
        return f"{is_absent} {'is' if is_one else 'are'} at {position.place}"
    if side.kind == "aborted":
        ended = f"{who} {'was' if is_one else 'were'} ended by torch's backend after starting"
        return f"{ended} {_what(side.calls[0])} ({places(side.calls)})"
    if side.kind == "behind":
        has = "has" if is_one else "have"
        if not side.calls:
            return f"{who} {has} called no collective yet"
        return f"{who} {has} called nothing since {_what(side.calls[0])} ({places(side.calls)})"
    wait = f"{who} {'waits' if is_one else 'wait'} in"
    if not side.calls:
        return f"{wait} {position.waiting_in if position else 'a collective'}"
    return f"{wait} {_what(side.calls[0])} ({places(side.calls)})"


def _what(call: Call) -> str:
    text = described(call, with_root=call.site.kind in POINT_TO_POINT)
    if call.site.kind == NEW_GROUP and call.site.group is not None:
        return f"{text} with {group_name(call.site.group)}"
    if not call.is_collective or call.site.group is None:
        return text
    return f"{text}, {numbered(call.number, call.site.group)}"


_UNEVEN = (
    "Every rank must repeat the loop the same number of times: prepare the loader (even_batches=True), or put "
    "the loop into accelerator.join_uneven_inputs([model]) or, without an Accelerator, into model.join()."
)
_ALONE = "Every rank of the group must call it: take it out of the condition."
_COME = "Every rank must take part in the same collectives: look for the code that delays the rank."
_BUSY = "If it did not hang but was busy for that long, increase hang_timeout_s."
_GROUPS = "Every rank must create the same groups in the same order, even those that it is not a member of."
_SAME = (
    "Every rank must call the same collectives in the same order: look for a condition, a loop or a return."
)

"""Explains why ranks are waiting in ``send`` or ``recv``: a peer takes no part, or they are waiting for each other.

    rank 0   recv from 1                          rank 1 has not called send
    rank 1   barrier

A rank may be waiting for several transfers at the same time (``batch_isend_irecv``). These are its last transfers, if
they were called on the same line. To find out whether a peer has called the other half, both ranks' transfers are
counted. This is possible only while every call of both ranks is still recorded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nblaunch import formatting
from nblaunch.diagnosis.disagreements import Explanation, described, place
from nblaunch.wire.collective_calls import POINT_TO_POINT, Call, RankCalls

_OTHER = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class _Wait:
    """A transfer that a rank is waiting for."""

    rank: int
    peer: int
    call: Call

    @property
    def text(self) -> str:
        """The call: ``recv float32[3] from rank 1``."""
        return f"{self.what} {'to' if self.call.site.kind == 'send' else 'from'} rank {self.peer}"

    @property
    def what(self) -> str:
        """The call without its peer: ``recv float32[3]``."""
        return described(self.call)


def explain_transfers(
    calls: Mapping[int, RankCalls], waiting: Collection[int], states: Mapping[int, str]
) -> Explanation | None:
    """Explain which transfer can't be completed; return None if no such transfer is known.

    Args:
        calls: rank -> its last calls.
        waiting: ranks that are waiting in their last call.
        states: rank -> what it is doing, as text after its name: ``waits in barrier (cell 5, line 7)``.
    """
    waits = [wait for rank in sorted(waiting) for wait in _unmatched(rank, calls)]
    by_rank = {wait.rank: wait for wait in reversed(waits)}  # the first transfer of each rank
    for wait in waits:
        if (back := by_rank.get(wait.peer)) is not None and _differ_in_tags(wait, back):
            text = f"{_sentence(wait)}; {_sentence(back)}"
            return Explanation(text, advice=_TAGS)
    if (unequal := _unequal(calls, waiting)) is not None:
        return unequal
    for wait in waits:
        if circle := _circle(wait, by_rank):
            return _explain_circle(circle)
    for wait in waits:
        if wait.peer not in by_rank and wait.peer in states:
            other = _OTHER[wait.call.site.kind]
            text = f"{_sentence(wait)}, which has not called {other} for it; rank {wait.peer} {states[wait.peer]}"
            return Explanation(text, advice=_MISSING)
    return None


def _unmatched(rank: int, calls: Mapping[int, RankCalls]) -> list[_Wait]:
    """Return the transfers that a rank is waiting for and whose other half, as far as is known, is missing."""
    last = calls[rank].last if rank in calls else None
    if last is None or last.site.kind not in POINT_TO_POINT:
        return []
    pending: list[Call] = []
    for call in reversed(calls[rank].calls):
        at = call.site
        if at.kind not in POINT_TO_POINT or (at.filename, at.line) != (last.site.filename, last.site.line):
            break
        pending.append(call)
    is_one = len(pending) == 1
    waits = []
    for call in reversed(pending):
        peer = call.site.root
        if peer < 0 or peer not in calls:
            continue
        balance = _balance(rank, call, calls)
        if balance is None:
            if is_one:  # it is waiting in this one
                waits.append(_Wait(rank, peer, call))
        elif balance > 0 and not any(wait.call.site == call.site for wait in waits):
            waits.append(_Wait(rank, peer, call))
    return waits


def _balance(rank: int, call: Call, calls: Mapping[int, RankCalls]) -> int | None:
    """Return the number of calls like ``call`` minus the number of their other halves; None if unknown."""
    here, there = calls[rank], calls[call.site.root]
    if any(len(each.calls) < each.num_calls for each in (here, there)):
        return None  # the oldest calls are no longer recorded
    site, kind = call.site, _OTHER[call.site.kind]
    mine = sum(_is_between(other, site.kind, call, site.root) for other in here.calls)
    if any(other.site.kind == "recv" and other.site.root < 0 for other in there.calls):
        return None  # it accepts any sender
    return mine - sum(_is_between(other, kind, call, rank) for other in there.calls)


def _is_between(call: Call, kind: str, like: Call, root: int) -> bool:
    site = call.site
    return (site.kind, site.group, site.detail, site.root) == (kind, like.site.group, like.site.detail, root)


def _differ_in_tags(wait: _Wait, back: _Wait) -> bool:
    """Return whether two transfers would match if their tags were equal."""
    site, other = wait.call.site, back.call.site
    is_pair = back.peer == wait.rank and other.kind == _OTHER[site.kind] and site.group == other.group
    return is_pair and site.detail != other.detail


def _unequal(calls: Mapping[int, RankCalls], waiting: Collection[int]) -> Explanation | None:
    """Explain the last transfer of a waiting rank if its other half has a different type or size."""
    for rank in sorted(waiting):
        last = calls[rank].last
        if last is None or last.site.root not in calls or _balance(rank, last, calls) is None:
            continue
        mine, theirs = (
            [call for call in calls[at].calls if _is_between(call, kind, last, root)]
            for at, kind, root in (
                (rank, last.site.kind, last.site.root),
                (last.site.root, _OTHER[last.site.kind], rank),
            )
        )
        if len(theirs) < len(mine) or _content(last) == _content(theirs[len(mine) - 1]):
            continue
        halves = [_Wait(rank, last.site.root, last), _Wait(last.site.root, rank, theirs[len(mine) - 1])]
        text = "; ".join(f"rank {half.rank} {half.text} ({place(half.call)})" for half in halves)
        return Explanation(f"transfer {len(mine)} between these ranks: {text}", advice=_SIZES)
    return None


def _content(call: Call) -> tuple[str, int]:
    return call.site.dtype, math.prod(call.shape) if call.site.num_dimensions == len(call.shape) else -1


def _circle(first: _Wait, by_rank: Mapping[int, _Wait]) -> list[_Wait]:
    """Return waits that form a cycle, in which each wait is for the next one's rank; empty if there is none."""
    path = [first]
    while (following := by_rank.get(path[-1].peer)) is not None:
        if following.rank == first.rank:
            return path
        if following in path:
            return []
        path.append(following)
    return []


def _explain_circle(circle: Sequence[_Wait]) -> Explanation:
    shown = sorted(circle, key=lambda wait: wait.rank)
    texts = "; ".join(_sentence(wait) for wait in shown[:_MAX_SHOWN])
    more = "; ..." if len(shown) > _MAX_SHOWN else ""
    return Explanation(
        f"{formatting.ranks(wait.rank for wait in shown)} wait for each other: {texts}{more}", advice=_CIRCLE
    )


def _sentence(wait: _Wait) -> str:
    return f"rank {wait.rank} waits in {wait.text} ({place(wait.call)})"


_MAX_SHOWN = 4
_MISSING = "Each recv needs a send from its peer, with the same group and tag, and each send needs a recv."
_SIZES = "A recv needs a tensor of the same type and size as its send."
_TAGS = "A send and its recv need the same tag."
_CIRCLE = (
    "No rank can continue: let some ranks send while the others receive, or start all transfers together "
    "with batch_isend_irecv."
)

"""The coordinator's view of the collectives that the ranks on all nodes have recorded.

    node ── CallMarks, twice a second: digests of a few calls ──> do any differ? ── AskStacks ──> all nodes
    node ── Stacks: all recorded calls ──> compared as on one machine (launcher/collective_watch.py)

A digest covers all collectives of a group up to a call, so once ranks differ, they continue to differ. Marks
cover the last calls, and calls with round numbers, because nodes send marks at different times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nblaunch.engines.link import NodeLink, NodesStacks
from nblaunch.engines.messages import CallMarks
from nblaunch.wire.board import Board, SlotReading
from nblaunch.wire.collective_calls import NUM_CALLS, Call, RankCalls

_NUM_LAST = 8
"""How many of each group's most recent calls are marked."""

_ROUND = NUM_CALLS // 4
"""Calls whose numbers are multiples of this are marked for as long as they are kept."""


class NodeCalls:
    """The calls of a node's ranks, as read on that node.

    Args:
        board: board that the ranks write to.
        ranks: ranks of the node.
    """

    def __init__(self, board: Board, ranks: range) -> None:
        self._board = board
        self._ranks = ranks
        self._num_calls: list[int] = []
        self._last = CallMarks({})

    def new_marks(self) -> CallMarks | None:
        """Return the marks of the last calls; None if they have not changed."""
        readers = [self._board.calls(rank) for rank in self._ranks]
        counts = [reader.num_calls for reader in readers]
        if counts == self._num_calls:
            return None
        self._num_calls = counts
        digests: dict[tuple[int, int], float] = {}
        differ = False
        for reader in readers:
            for key, digest in reader.digests(NUM_CALLS).items():
                differ = digests.setdefault(key, digest) != digest or differ
        marks = CallMarks(_chosen(digests), differ)
        if marks == self._last:
            return None
        self._last = marks
        return marks

    def read(self) -> dict[int, RankCalls]:
        """Return the last calls of each rank."""
        return sharing({rank: self._board.calls(rank).read() for rank in self._ranks})


def sharing(calls: Mapping[int, RankCalls]) -> dict[int, RankCalls]:
    """Return the calls, with equal calls of several ranks replaced by one object, so that they are sent only once.

    Only a rank's last call keeps its time, because nothing reads the times of earlier calls.

    Args:
        calls: rank -> its last calls.
    """
    by_serial: dict[int, Call] = {}
    return {rank: _with_known(rank_calls, by_serial) for rank, rank_calls in calls.items()}


def _with_known(rank_calls: RankCalls, by_serial: dict[int, Call]) -> RankCalls:
    last = rank_calls.last
    calls = []
    for call in rank_calls.calls:
        earlier = by_serial.setdefault(call.serial, call)
        calls.append(earlier if call is not last and _are_equal(call, earlier) else call)
    return replace(rank_calls, calls=tuple(calls))


def _are_equal(call: Call, other: Call) -> bool:
    return (call.number, call.chain, call.size, call.shape, call.value, call.site) == (
        other.number,
        other.chain,
        other.size,
        other.shape,
        other.value,
        other.site,
    )


def _chosen(digests: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    last: dict[tuple[int, bool], int] = {}
    for group, number in digests:
        key = group, number < 0  # optimizer steps have negative numbers
        last[key] = max(last.get(key, 0), abs(number))
    return {
        (group, number): digest
        for (group, number), digest in digests.items()
        if abs(number) > last[group, number < 0] - _NUM_LAST or number % _ROUND == 0
    }


class AllCalls:
    """The coordinator's copy of all nodes' calls; implements ``launcher.collective_watch.CallSource``.

    Args:
        ask: asks all nodes for the calls of their ranks.
        readings: returns the readings of all ranks.
    """

    def __init__(self, ask: Callable[[], NodesStacks], readings: Callable[[], Sequence[SlotReading]]) -> None:
        self._ask = ask
        self._readings = readings
        self._query: NodesStacks | None = None
        self._marks: dict[NodeLink, CallMarks] = {}
        self._calls: dict[int, RankCalls] = {}
        self._has_new_marks = False

    def take_marks(self, link: NodeLink, marks: CallMarks) -> None:
        """Store the marks of a node."""
        self._marks[link] = marks
        self._has_new_marks = True

    def take(self, calls: Mapping[int, RankCalls]) -> None:
        """Store the latest calls of a node's ranks."""
        self._calls.update(calls)

    def may_differ(self) -> bool:
        """Return whether the nodes' marks differ; return False immediately if there are no new marks."""
        if not self._has_new_marks:
            return False
        self._has_new_marks = False
        common: dict[tuple[int, int], float] = {}
        for marks in self._marks.values():
            if marks.differ:
                return True
            for key, digest in marks.digests.items():
                if common.setdefault(key, digest) != digest:
                    return True
        return False

    def read(self) -> dict[int, RankCalls] | None:
        """Ask all nodes; return the last calls once all have answered, and None until then.

        A node that has not answered in time is asked again, because without its ranks, the wrong rank could be blamed.
        """
        if self._query is None or (self._query.is_done and not self._query.is_complete):
            self._query = self._ask()
        if not self._query.is_complete:
            return None
        self._query = None
        return self.last()

    def last(self) -> dict[int, RankCalls]:
        """Return the last known calls, by rank."""
        return dict(sorted(self._calls.items()))

    def steps(self) -> dict[int, int]:
        """Return the number of batches so far in each rank's current loop over a prepared loader."""
        return {reading.rank: reading.step for reading in self._readings()}

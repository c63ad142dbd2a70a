"""The other nodes of a job, as the launcher of one node knows them: pure state, by news and by the clock.

news, twice a second ──> learn ──> events and samples of their ranks, for the dashboard
clock                ──> look  ──> "node 1 (host b, ranks 2-3) has not been heard of for 5 s"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from nblaunch.events import Event, Exited, Finished
from nblaunch.launch.diagnosis.elsewhere import Elsewhere
from nblaunch.nodes import messages
from nblaunch.nodes.messages import Heartbeat, Node, StopState
from nblaunch.wire.board import Sample

_T = TypeVar("_T")


@dataclass
class _Neighbour:
    member: Node
    heard_s: float
    count: int = -1
    state: str = messages.RUNNING
    is_silent: bool = False
    ahead_s: float = math.inf
    """How much our monotonic clock is ahead of its own: the least seen, which had the least delay on its way."""
    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def is_expected(self) -> bool:
        """Whether it has something to say: neither done nor gone."""
        return self.state in (messages.JOINING, messages.RUNNING)


class Neighbours:
    """Every node of a formed world but this one.

    Args:
        members: of them.
        now_s: ``time.monotonic()``.
        silence_s: seconds of silence after which a node is named.
        patience_s: seconds of silence after which it is given up.
        start: which start of the workers this world is.
    """

    def __init__(
        self, members: Iterable[Node], now_s: float, silence_s: float, patience_s: float, start: int = 0
    ) -> None:
        self._by_id = {member.id: _Neighbour(member, now_s) for member in members}
        self._start = start
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._told: set[tuple[str, int]] = set()
        self.stopping: dict[int, StopState] = {}
        self.elsewhere = Elsewhere(
            places={rank: n.member.label for n in self._by_id.values() for rank in n.member.ranks}
        )

    # --- what they say -------------------------------------------------------------------------------------------

    def learn(self, news: Iterable[Heartbeat], now_s: float) -> tuple[list[Event], list[str]]:
        """Take in the last news; returns events of their ranks, and notes for the person."""
        events: list[Event] = []
        notes: list[str] = []
        for page in news:
            neighbour = self._by_id.get(page.id)
            if neighbour is None or page.count == neighbour.count:
                continue
            if neighbour.is_silent:
                silent_s = now_s - neighbour.heard_s
                notes.append(f"{neighbour.member} is heard of again, after {silent_s:.0f} s")
            neighbour.ahead_s = min(neighbour.ahead_s, now_s - page.clock_s)
            neighbour.count, neighbour.heard_s, neighbour.is_silent = page.count, now_s, False
            events += self._take_summary(neighbour, page)
            notes += self._take_state(neighbour, page)
        return events, notes

    def _take_summary(self, neighbour: _Neighbour, page: Heartbeat) -> list[Event]:
        if page.restart_count != self._start:
            return []
        summary, own = page.summary, neighbour.member.ranks
        self.stopping[neighbour.member.node_rank] = replace(
            summary.stop, answers=_of(own, summary.stop.answers)
        )
        for sample in summary.samples:
            if sample.rank in own:
                neighbour.samples[sample.rank] = _moved(sample, neighbour.ahead_s)
        events: list[Event] = []
        for rank, finished in _of(own, summary.finished).items():
            self.elsewhere.finished.setdefault(rank, finished)
            events += self._once("finished", rank, Finished(rank, finished.time_s))
        for rank, failed in _of(own, summary.failed).items():
            there = self.elsewhere.failed.setdefault(rank, replace(failed, rank=rank))
            events += self._once("failed", rank, there)
        for rank, (status, time_s) in _of(own, summary.exits).items():
            self.elsewhere.exits.setdefault(rank, (status, time_s))
            events += self._once("exit", rank, Exited(rank, time_s, status=status))
        return events

    def _take_state(self, neighbour: _Neighbour, page: Heartbeat) -> list[str]:
        before, neighbour.state = neighbour.state, page.state
        if page.state == before or page.state not in (messages.LEFT, messages.FAILED):
            return []
        if page.reason == messages.FINISHED or (page.state == messages.FAILED and self.elsewhere.has_cause):
            return []  # as was to be expected
        text = f"{neighbour.member} {page.reason or 'gave up'}"
        self.elsewhere.lost.setdefault(neighbour.member.first_rank, text)
        return [text]

    def _once(self, kind: str, rank: int, event: Event) -> list[Event]:
        is_new = (kind, rank) not in self._told
        self._told.add((kind, rank))
        return [event] if is_new else []

    # --- what the clock says -------------------------------------------------------------------------------------

    def look(self, now_s: float) -> list[str]:
        """Notes about nodes that have fallen silent since the last look; gives up those silent for too long."""
        waited = [n for n in self._by_id.values() if n.is_expected]
        new = [n for n in waited if not n.is_silent and now_s - n.heard_s >= self._silence_s]
        for neighbour in new:
            neighbour.is_silent = True
        for neighbour in waited:
            silent_s = now_s - neighbour.heard_s
            if silent_s >= self._patience_s:
                self.elsewhere.lost.setdefault(neighbour.member.first_rank, _silence(neighbour, silent_s))
        if len(new) > 1 and len(new) == len(waited):
            return [
                f"none of the other {len(new)} nodes has been heard of for {self._silence_s:.0f} s: the network of "
                "this node may be cut, or the node that hosts the rendezvous is gone"
            ]
        return [_silence(neighbour, now_s - neighbour.heard_s) for neighbour in new]

    def blame_silent(self, now_s: float) -> None:
        """Workers here have failed because others did not answer: a node that is silent is the reason."""
        for neighbour in self._by_id.values():
            if neighbour.is_silent:
                text = _silence(neighbour, now_s - neighbour.heard_s)
                self.elsewhere.lost.setdefault(neighbour.member.first_rank, text)

    @property
    def must_stop(self) -> bool:
        """Whether workers here have to end, because of what happened elsewhere."""
        return self.elsewhere.has_cause or self.elsewhere.wants_restart

    @property
    def is_anybody_expected(self) -> bool:
        """Whether a node still has something to do, as far as is known."""
        lost = self.elsewhere.lost
        return any(n.is_expected and n.member.first_rank not in lost for n in self._by_id.values())

    @property
    def can_be_waited_for(self) -> bool:
        """Whether a silent node could still turn out to be the reason of a failure here."""
        return bool(self._by_id) and not self.elsewhere.has_cause

    def merged(self, samples: Sequence[Sample]) -> list[Sample]:
        """Samples of all ranks: of this node's as given, of the others' as last heard."""
        others = {rank: sample for n in self._by_id.values() for rank, sample in n.samples.items()}
        return [others.get(sample.rank, sample) for sample in samples]


def _of(ranks: range, by_rank: Mapping[int, _T]) -> dict[int, _T]:
    return {rank: value for rank, value in by_rank.items() if rank in ranks}


def _silence(neighbour: _Neighbour, silent_s: float) -> str:
    return f"{neighbour.member} has not been heard of for {silent_s:.0f} s"


def _moved(sample: Sample, ahead_s: float) -> Sample:
    """The sample in times of our clock."""
    return replace(sample, step_time_s=sample.step_time_s + ahead_s) if sample.step_time_s > 0 else sample

"""The state of a job's other nodes, derived from their heartbeats, and the agreement on a step at which all ranks stop.

    heartbeats, twice a second ──> update ──> events and readings of their ranks, for the dashboard
    clock                      ──> check  ──> "node 1 (host b, ranks 2 and 3) has sent no heartbeat for 5 s"

Plain state: nothing here blocks, reads or sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from nblaunch.diagnosis.report import RemoteFailures
from nblaunch.events import Event, Exited, HostMemory, Returned
from nblaunch.nodes import messages
from nblaunch.nodes.messages import Heartbeat, Node, StopState
from nblaunch.wire.board import Slot, SlotReading, private_slot
from nblaunch.wire.stop_agreement import StopAgreement

_T = TypeVar("_T")

_AHEAD_S = 2.0
_PATIENCE_S = 3.0


@dataclass
class _Peer:
    node: Node
    received_s: float
    count: int = -1
    state: str = messages.RUNNING
    is_silent: bool = False
    readings: dict[int, SlotReading] = field(default_factory=dict)
    host_memory: dict[int, HostMemory] = field(default_factory=dict)

    @property
    def is_expected(self) -> bool:
        """Whether further heartbeats are expected: the node has neither finished nor left."""
        return self.state in (messages.JOINING, messages.RUNNING)


class PeerStates:
    """The other nodes of a world.

    Args:
        silence_s: seconds without a heartbeat after which a node is reported.
        patience_s: seconds without a heartbeat after which it is considered lost.
        restart_count: how many times the workers were started before this world.
    """

    def __init__(
        self, nodes: Iterable[Node], now_s: float, silence_s: float, patience_s: float, restart_count: int = 0
    ) -> None:
        self._by_id = {node.id: _Peer(node, now_s) for node in nodes}
        self._restart_count = restart_count
        self._silence_s = silence_s
        self._patience_s = patience_s
        self._reported: set[tuple[str, int]] = set()
        self.stop_states: dict[int, StopState] = {}
        self.failures = RemoteFailures(
            labels={rank: peer.node.label for peer in self._by_id.values() for rank in peer.node.ranks}
        )

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def update(self, heartbeats: Iterable[Heartbeat], now_s: float) -> tuple[list[Event], list[str]]:
        """Handle the last heartbeats; return new events of their ranks, and notes for the user."""
        events: list[Event] = []
        notes: list[str] = []
        for heartbeat in heartbeats:
            peer = self._by_id.get(heartbeat.id)
            if peer is None or heartbeat.count == peer.count:
                continue
            if peer.is_silent:
                notes.append(f"{peer.node} is sending heartbeats again after {now_s - peer.received_s:.0f} s")
            peer.count, peer.received_s, peer.is_silent = heartbeat.count, now_s, False
            events += self._handle_summary(peer, heartbeat)
            notes += self._handle_state(peer, heartbeat)
        return events, notes

    def _handle_summary(self, peer: _Peer, heartbeat: Heartbeat) -> list[Event]:
        if heartbeat.restart_count != self._restart_count:
            return []
        summary, ranks = heartbeat.summary, peer.node.ranks
        self.stop_states[peer.node.node_rank] = replace(
            summary.stop, replies=_restricted(ranks, summary.stop.replies)
        )
        for reading in summary.readings:
            if reading.rank in ranks:
                peer.readings[reading.rank] = reading
        events: list[Event] = []
        for ended in summary.epochs:
            if ended.rank in ranks:
                events += self._once(f"epoch {ended.epoch} {ended.time_s}", ended.rank, ended)
        for sample in summary.host_memory:
            if sample.rank in ranks and sample != peer.host_memory.get(sample.rank):
                peer.host_memory[sample.rank] = sample
                events.append(sample)
        for rank, returned in _restricted(ranks, summary.returned).items():
            self.failures.returned.setdefault(rank, returned)
            events += self._once("returned", rank, Returned(rank, returned.time_s))
        for rank, failed in _restricted(ranks, summary.failed).items():
            there = self.failures.failed.setdefault(rank, replace(failed, rank=rank))
            events += self._once("failed", rank, there)
        for rank, (status, time_s) in _restricted(ranks, summary.exits).items():
            self.failures.exits.setdefault(rank, (status, time_s))
            events += self._once("exit", rank, Exited(rank, time_s, status=status))
        return events

    def _handle_state(self, peer: _Peer, heartbeat: Heartbeat) -> list[str]:
        before, peer.state = peer.state, heartbeat.state
        if heartbeat.state == before or heartbeat.state not in (messages.LEFT, messages.FAILED):
            return []
        if heartbeat.reason == messages.FINISHED or (
            heartbeat.state == messages.FAILED and self.failures.has_cause
        ):
            return []  # the node has ended as expected, or its failure is explained
        text = f"{peer.node} {heartbeat.reason or 'failed'}"
        self.failures.lost.setdefault(peer.node.first_rank, text)
        return [text]

    def _once(self, kind: str, number: int, event: Event) -> list[Event]:
        is_new = (kind, number) not in self._reported
        self._reported.add((kind, number))
        return [event] if is_new else []

    # --- silence -------------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> list[str]:
        """Return notes about nodes that have fallen silent since the last check; mark timed-out nodes as lost."""
        notes = []
        for peer in self._by_id.values():
            silent_s = now_s - peer.received_s
            if not peer.is_expected or silent_s < self._silence_s:
                continue
            if not peer.is_silent:
                peer.is_silent = True
                notes.append(_silence(peer, silent_s))
            if silent_s >= self._patience_s:
                self.failures.lost.setdefault(peer.node.first_rank, _silence(peer, silent_s))
        return notes

    def blame_silent(self, now_s: float) -> None:
        """Mark nodes without heartbeats as lost, because workers here failed when these nodes did not respond."""
        for peer in self._by_id.values():
            if peer.is_silent:
                text = _silence(peer, now_s - peer.received_s)
                self.failures.lost.setdefault(peer.node.first_rank, text)

    @property
    def must_end(self) -> bool:
        """Whether workers of this node must stop because of other nodes."""
        return self.failures.has_cause or self.failures.wants_restart

    @property
    def is_any_expected(self) -> bool:
        """Whether any node has neither finished nor been lost."""
        lost = self.failures.lost
        return any(peer.is_expected and peer.node.first_rank not in lost for peer in self._by_id.values())

    @property
    def can_be_waited_for(self) -> bool:
        """Whether a node without heartbeats could still turn out to be the cause of a failure here."""
        return bool(self._by_id) and not self.failures.has_cause

    def merged(self, readings: Sequence[SlotReading]) -> list[SlotReading]:
        """Return readings of all ranks: ``readings`` for this node, and the last readings received from the others."""
        others = {rank: reading for peer in self._by_id.values() for rank, reading in peer.readings.items()}
        return [others.get(reading.rank, reading) for reading in readings]


def _restricted(ranks: range, by_rank: Mapping[int, _T]) -> dict[int, _T]:
    return {rank: value for rank, value in by_rank.items() if rank in ranks}


def _silence(peer: _Peer, silent_s: float) -> str:
    return f"{peer.node} has sent no heartbeat for {silent_s:.0f} s"


@dataclass
class NodesStopAgreement:
    """One node's part in a :class:`StopAgreement` among the ranks of all nodes, which is reached through heartbeats.

        leader: StopAgreement over all slots, with copies of the slots of other nodes
            ── proposal, decision ──> other nodes write them into their ranks' slots
            <── checks, replies ──    and report the replies of their ranks

    Any node may start it. The lowest-numbered node with a running rank leads. Once all its ranks have returned, it
    makes no more proposals or decisions, and the next node leads as soon as it receives a heartbeat with this state.
    The same heartbeat contains the last proposal: if it was decided, all ranks stop there; if not, the new leader
    proposes a later step. Each proposal therefore names a later step than the one before, and the highest one is valid.
    Heartbeats take about half a second, so the proposed step is further ahead than on one node.

    Args:
        slots: rank -> slot of this node's ranks.
        state: state of this node, sent in every summary.
        peers: node rank -> last state received from that node.
        remote: labels of the ranks of other nodes, and the ranks that have returned; :class:`PeerStates` updates it.
    """

    slots: Mapping[int, Slot]
    state: StopState
    peers: Mapping[int, StopState]
    remote: RemoteFailures
    is_settled: bool = False
    _copies: dict[int, Slot] = field(default_factory=dict)
    _agreement: StopAgreement | None = None

    def poll(self, running: Iterable[int], now_s: float) -> None:
        """Forward proposals and replies. ``running``: ranks of this node whose function has not returned."""
        running = list(running)
        last = max(self.peers.values(), key=lambda state: state.proposal, default=StopState())
        if last.proposal > self.state.proposal:
            self._follow(last)
        if not self.is_settled and self._is_leader(running):
            self._lead(running, last.proposal, now_s)

    def _is_leader(self, running: Sequence[int]) -> bool:
        others = self.remote.labels.keys() - self.remote.returned.keys()
        return bool(running) and min(running) < min(others, default=math.inf)  # ranks are ordered by node

    def _follow(self, leader: StopState) -> None:
        for slot in self.slots.values():
            slot.stop_proposal, slot.stop_decision = leader.proposal, leader.decision
        self.is_settled = leader.decision == leader.proposal

    def _lead(self, running: Sequence[int], last_proposal: int, now_s: float) -> None:
        replies = {rank: reply for node in self.peers.values() for rank, reply in node.replies.items()}
        for rank, (num_checks, reply) in replies.items():
            copy = self._copies.setdefault(rank, private_slot())
            copy.num_checks, copy.stop_reply = num_checks, reply
        if self._agreement is None:
            # A proposal must be ahead of all ranks, but a node's first heartbeats do not contain its own checks.
            if not self.remote.labels.keys() <= replies.keys() | self.remote.returned.keys():
                return
            slots = {**self.slots, **self._copies}
            self._agreement = StopAgreement(
                slots, now_s, ahead_s=_AHEAD_S, patience_s=_PATIENCE_S, after=last_proposal
            )
        self._agreement.poll([*running, *replies], now_s)
        any_slot = next(iter(self.slots.values()))
        self.state.proposal, self.state.decision = any_slot.stop_proposal, any_slot.stop_decision
        self.is_settled = self._agreement.is_settled


def replies_of(slots: Mapping[int, Slot]) -> dict[int, tuple[int, int]]:
    """Return the replies of ranks to the proposal: rank -> (checks so far, reply)."""
    return {rank: (slot.num_checks, slot.stop_reply) for rank, slot in slots.items()}

"""Agreeing with the ranks of other nodes on the step to stop at: ``wire/stopping.py``, with news in between.

    node 0: StopAgreement over all slots; of other nodes' ranks it has copies
        ── proposal, decision ──> other nodes write them into their ranks' slots
        <── checks, replies ──    and tell what their ranks have answered

Any node may begin it. The news take about half a second, so proposals are made that much further ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nblaunch.nodes.messages import StopState
from nblaunch.wire.board import Slot, private_slot
from nblaunch.wire.stop_agreement import StopAgreement

_AHEAD_S = 2.0
_PATIENCE_S = 3.0


@dataclass
class CommonStop:
    """One node's part in it.

    Args:
        slots: rank -> slot of this node's ranks.
        leads: this is node 0.
        own: what this node tells the others; they are given it with every summary.
        theirs: node rank -> what that node told last.
        now_s: ``time.monotonic()``.
    """

    slots: Mapping[int, Slot]
    leads: bool
    own: StopState
    theirs: Mapping[int, StopState]
    now_s: float
    is_settled: bool = False
    _copies: dict[int, Slot] = field(default_factory=dict)
    _agreement: StopAgreement | None = None

    def poll(self, running: Iterable[int], now_s: float) -> None:
        """Pass on what there is to pass on. ``running``: ranks of this node whose function has not returned."""
        if self.leads:
            self._lead(running, now_s)
        else:
            self._follow()

    def _lead(self, running: Iterable[int], now_s: float) -> None:
        told = {rank: answer for node in self.theirs.values() for rank, answer in node.answers.items()}
        for rank, (num_checks, reply) in told.items():
            copy = self._copies.setdefault(rank, private_slot())
            copy.num_checks, copy.stop_reply = num_checks, reply
        slots = {**self.slots, **self._copies}
        if self._agreement is None:
            self._agreement = StopAgreement(slots, self.now_s, ahead_s=_AHEAD_S, patience_s=_PATIENCE_S)
        self._agreement.poll([*running, *told], now_s)
        any_slot = next(iter(slots.values()))
        self.own.proposal, self.own.decision = any_slot.stop_proposal, any_slot.stop_decision
        self.is_settled = self._agreement.is_settled

    def _follow(self) -> None:
        leader = self.theirs.get(0)
        if leader is None or not leader.proposal:
            return
        for slot in self.slots.values():
            slot.stop_proposal, slot.stop_decision = leader.proposal, leader.decision
        self.is_settled = leader.decision == leader.proposal


def answers_of(slots: Mapping[int, Slot]) -> dict[int, tuple[int, int]]:
    """What ranks say to the proposal: rank -> (checks so far, reply)."""
    return {rank: (slot.num_checks, slot.stop_reply) for rank, slot in slots.items()}

"""An agreement on the step at which all ranks leave their loops, without a collective at every step.

If one rank left its loop a step earlier than another, the other would wait in a collective forever. The launcher
therefore proposes a step a little ahead; the proposal is valid only if every rank receives it in time:

    launcher                                     each rank, at each check of ``should_stop``
    proposal: "stop at your check number P" ──>  before P: reply P (a promise to wait at P for the decision)
                                                 already past P: reply -P
    all replied P:  decision P              ──>  at P: stop
    one rejected, or waits too long at P:
                    decision -P             ──>  at P: continue; the launcher proposes a later step

A check takes two reads of shared memory. A rank waits only at check P, until the decision is made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from nblaunch.wire.board import Slot, StepBoundaries

Ballot = Slot | StepBoundaries
"""The fields in which a rank counts its checks and stores its replies to proposals."""

_SPIN_S = 0.0005
_PATIENCE_S = 0.25
_FIRST_MARGIN = 2
_AHEAD_S = 0.3

BOUNDARY_S = 1.0
"""How long an interrupt is held back so that all training ranks can reach the same optimizer step."""


def should_stop(slot: Ballot) -> bool:
    """Return whether every rank stops at this check. Every rank's worker must call this at the same steps."""
    count, proposal = slot.begin_check()
    return proposal != 0 and holds(slot, count, proposal)


def holds(slot: Ballot, count: int, proposal: int) -> bool:
    """Reply to a proposal at check number ``count``; return whether every rank stops there."""
    if slot.stop_decision == proposal:
        return count >= proposal
    if count > proposal:
        slot.stop_reply = -proposal
        return False
    slot.stop_reply = proposal
    return _wait_for_decision(slot, proposal) if count == proposal else False


def _wait_for_decision(slot: Ballot, proposal: int) -> bool:
    while slot.stop_proposal == proposal:
        if abs(slot.stop_decision) == proposal:
            return slot.stop_decision == proposal
        time.sleep(_SPIN_S)
    return False


class Agreement(Protocol):
    """The launcher's side of an agreement, on one node or on several."""

    is_settled: bool

    def poll(self, running: Iterable[int], now_s: float) -> None:
        """Propose a step, count replies and decide. ``running``: ranks whose function has not returned."""


class Boundary(Agreement, Protocol):
    """The launcher's side of an agreement on an optimizer step: all ranks raise an interrupt just before it.

    Attributes:
        limit_s: how long the interrupt may be held back while the ranks approach the step.
        is_withdrawn: whether the ranks have failed to agree.
    """

    limit_s: float
    is_withdrawn: bool

    def has_stopped(self, rank: int) -> bool:
        """Return whether a rank has reached the agreed check."""

    def withdraw(self) -> None:
        """Let ranks that wait at a proposed check continue, and make no more proposals."""


def on_boundary(slots: Mapping[int, Slot], now_s: float) -> StopAgreement | None:
    """Propose that all ranks stop before the next optimizer step; return None if some have not yet reached one."""
    boundaries = {rank: slot.boundaries for rank, slot in slots.items()}
    if not boundaries or not all(boundary.num_checks for boundary in boundaries.values()):
        return None
    agreement = StopAgreement(boundaries, now_s, ahead_s=0.0, margin=1)
    agreement.poll(boundaries, now_s)
    return agreement


class StopAgreement:
    """The launcher's side. ``poll`` it until :attr:`is_settled`.

    Args:
        slots: rank -> slot of the ranks that are still running.
        now_s: ``time.monotonic()``.
        ahead_s: seconds by which a proposal is ahead of the leading rank, so that it reaches all ranks in time.
        patience_s: seconds that a rank may wait at the proposed check.
        margin: minimum number of checks by which the first proposal is ahead.
        after: number of an earlier check that another launcher proposed; 0 = none. New proposals are later.
    """

    limit_s = BOUNDARY_S

    def __init__(
        self,
        slots: Mapping[int, Ballot],
        now_s: float,
        *,
        ahead_s: float = _AHEAD_S,
        patience_s: float = _PATIENCE_S,
        margin: int = _FIRST_MARGIN,
        after: int = 0,
    ) -> None:
        self._ahead_s = ahead_s
        self._patience_s = patience_s
        self._after = after
        self._slots = dict(slots)
        self._began_s = now_s
        self._first_checks = {rank: slot.num_checks for rank, slot in slots.items()}
        self._proposal = self._proposed_at = 0
        self._margin = margin
        self._waiting_since: float | None = None
        self.is_settled = self.is_withdrawn = False

    def poll(self, running: Iterable[int], now_s: float) -> None:
        """Propose a step, count replies and decide. ``running``: ranks whose function has not returned."""
        slots = [self._slots[rank] for rank in running]
        if self.is_settled or not slots:
            return
        if self._proposal == 0:
            self._propose(now_s)
        replies = [slot.stop_reply for slot in slots]
        if all(reply == self._proposal for reply in replies):
            self._decide(self._proposal)
            self.is_settled = True
        elif any(reply == -self._proposal for reply in replies) or self._is_patience_over(slots, now_s):
            self._decide(-self._proposal)
            # Twice the number of checks that a rank made while the proposal and the rejection were in transit.
            passed = max(slot.num_checks for slot in self._slots.values()) - self._proposed_at
            self._margin = 2 * max(self._margin, passed)
            self._proposal = 0

    def has_stopped(self, rank: int) -> bool:
        """Return whether a rank has reached the agreed check."""
        slot = self._slots[rank]
        return 0 < slot.stop_proposal == slot.stop_decision and slot.num_checks >= slot.stop_proposal

    def withdraw(self) -> None:
        """Let ranks that wait at a proposed check continue, and make no more proposals."""
        if not self.is_settled:
            self._decide(-self._proposal)
            self.is_settled = self.is_withdrawn = True

    def _propose(self, now_s: float) -> None:
        """Propose a check that the leading rank will reach in ``ahead_s`` at its current pace."""
        checks = {rank: slot.num_checks for rank, slot in self._slots.items()}
        seconds = max(now_s - self._began_s, 1e-3)
        pace = max((checks[rank] - self._first_checks[rank]) / seconds for rank in checks)
        # A withdrawn number must not be proposed again, because ranks that replied to it may have passed it.
        self._proposed_at = max(self._after, *checks.values())
        self._proposal = self._proposed_at + max(self._margin, int(pace * self._ahead_s))
        self._waiting_since = None
        for slot in self._slots.values():
            slot.stop_proposal = self._proposal

    def _decide(self, decision: int) -> None:
        for slot in self._slots.values():
            slot.stop_decision = decision

    def _is_patience_over(self, slots: Iterable[Ballot], now_s: float) -> bool:
        """Return whether a rank has waited too long at the proposed check; another may be waiting in a collective."""
        if not any(slot.num_checks >= self._proposal for slot in slots):
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now_s
        return now_s - self._waiting_since > self._patience_s

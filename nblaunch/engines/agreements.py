"""Agreements among the ranks on all nodes about the step at which they leave their loops or raise an interrupt.

    coordinator: NodesAgreement                          each node: NodeBallots
    a StopAgreement over copies of all ballots  ── Proposal ──>  writes it to the ballots of its ranks
                                                <── Replies ──   checks and replies of its ranks, when they change

A step is a check of ``accelerator.should_stop`` or an optimizer step (``wire/stop_agreement.py``). Only the coordinator
proposes and decides. It withdraws a proposal that a rank has already passed, so no rank acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from nblaunch.engines.messages import Proposal, Replies, Subject
from nblaunch.wire.board import Slot, private_slot
from nblaunch.wire.stop_agreement import BOUNDARY_S, Ballot, StopAgreement

_AHEAD_S = {"check": 0.5, "step": 0.1}
"""Seconds from the leading rank's step to a proposed step: enough for a message to all nodes and for their replies."""

_PATIENCE_S = {"check": 1.0, "step": 0.5}
"""Seconds that a rank may wait at the proposed check."""

_SHARE = 0.75
"""Fraction of the grace period after which ranks are interrupted even without a common step."""

_SLACK_S = 0.5
"""Additional seconds that the coordinator waits for a common step after an interrupt; nodes wait twice as many."""

_REPLY_S = 0.05
"""Seconds between a node's replies while only the number of checks changes."""


class NodesAgreement:
    """The coordinator's side; call :meth:`poll` until :attr:`is_over`.

    Args:
        subject: what ranks count.
        send: sends a message to all nodes.
        now_s: ``time.monotonic()``.
        grace_s: grace period of an interrupt, in seconds.

    Attributes:
        is_settled: whether all ranks stop at the same check.
        is_over: whether no more proposals follow.
    """

    def __init__(
        self, subject: Subject, send: Callable[[Proposal], None], now_s: float, grace_s: float
    ) -> None:
        self._subject = subject
        self._send = send
        # An interrupt can end without a common step: after their limit_s, nodes stop waiting for one.
        limit_s = min(BOUNDARY_S + _SLACK_S, grace_s * _SHARE) if subject == "step" else math.inf
        self._until_s = now_s + limit_s
        self._copies: dict[int, Slot] = {}
        self._agreement: StopAgreement | None = None
        self._sent = Proposal(subject)
        self.is_settled = self.is_over = False
        if subject == "check":
            send(self._sent)  # makes nodes reply; they already know about an interrupt

    def take(self, replies: Replies) -> None:
        """Store replies from a node's ranks."""
        for rank, (num_checks, reply) in replies.by_rank.items():
            copy = self._copies.setdefault(rank, private_slot())
            copy.num_checks, copy.stop_reply = num_checks, reply

    def poll(self, running: Iterable[int], now_s: float) -> None:
        """Propose a step, count the replies, and decide.

        Args:
            running: the ranks, on all nodes, whose functions have not ended.
            now_s: ``time.monotonic()``.
        """
        if self.is_over:
            return
        if self._agreement is None:
            self._begin(set(running), now_s)
        if self._agreement is not None:
            self._agreement.poll(self._copies.keys() & set(running), now_s)
            self._send_state()
            self.is_settled = self.is_over = self._agreement.is_settled
        if not self.is_over and now_s > self._until_s:
            self.give_up()

    def _begin(self, running: set[int], now_s: float) -> None:
        has_untrained = any(copy.num_checks == 0 for copy in self._copies.values())
        if self._subject == "step" and (has_untrained or not running):
            self.give_up()
        elif running and running <= self._copies.keys():  # a proposal must be ahead of all ranks
            self._copies = {rank: self._copies[rank] for rank in running}
            self._agreement = StopAgreement(
                self._copies,
                now_s,
                ahead_s=_AHEAD_S[self._subject],
                patience_s=_PATIENCE_S[self._subject],
                margin=1 if self._subject == "step" else 2,
            )

    def _send_state(self) -> None:
        slot = next(iter(self._copies.values()))
        proposal = Proposal(self._subject, slot.stop_proposal, slot.stop_decision)
        if proposal != self._sent:
            self._sent = proposal
            self._send(proposal)

    def give_up(self) -> None:
        """Release ranks waiting at a proposed check, and announce to the nodes that this was the last proposal."""
        self.is_over = True
        number = self._sent.number
        self._send(Proposal(self._subject, number, -number, is_last=True))


class NodeBallots:
    """The ballots of one node's ranks; they follow the coordinator's proposals. Implements ``stop_agreement.Boundary``.

    Args:
        subject: what ranks count.
        ballots: rank -> its ballot.
        send: sends replies to the coordinator.
        last: the coordinator's last proposal.
    """

    limit_s = BOUNDARY_S + 2 * _SLACK_S

    def __init__(
        self,
        subject: Subject,
        ballots: Mapping[int, Ballot],
        send: Callable[[Replies], None],
        last: Proposal | None = None,
    ) -> None:
        self._subject = subject
        self._ballots = ballots
        self._send = send
        self._sent: dict[int, tuple[int, int]] = {}
        self._next_s = 0.0
        self.is_settled = self.is_withdrawn = False
        if last is not None:
            self.take(last)

    def take(self, proposal: Proposal) -> None:
        """Pass a proposal on to the ranks."""
        if self.is_settled:
            return
        for ballot in self._ballots.values():
            # The order matters: a rank compares the decision with the proposal that it read before.
            ballot.stop_proposal = proposal.number
            ballot.stop_decision = proposal.decision
        self.is_withdrawn = proposal.is_last
        self.is_settled = proposal.is_last or 0 < proposal.number == proposal.decision

    def poll(self, running: Iterable[int], now_s: float) -> None:
        """Send the replies of running ranks if they have changed."""
        if self.is_settled:
            return
        replies = {rank: (self._ballots[rank].num_checks, self._ballots[rank].stop_reply) for rank in running}
        is_urgent = any(self._sent.get(rank, (0, 0))[1] != reply for rank, (_, reply) in replies.items())
        if not self._sent or is_urgent or (replies != self._sent and now_s >= self._next_s):
            self._sent, self._next_s = replies, now_s + _REPLY_S
            self._send(Replies(self._subject, replies))

    def has_stopped(self, rank: int) -> bool:
        """Return whether a rank has reached the agreed check."""
        ballot = self._ballots[rank]
        return 0 < ballot.stop_proposal == ballot.stop_decision and ballot.num_checks >= ballot.stop_proposal

    def withdraw(self) -> None:
        """Stop following the coordinator, so that the ranks continue and are interrupted wherever they are."""
        if not self.is_settled:
            self.take(Proposal(self._subject, 0, 0, is_last=True))

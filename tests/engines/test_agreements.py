"""Ranks of two nodes that end at the same check: the test delivers the messages, and decides how long they take."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest

from nblaunch.engines.agreements import NodeBallots, NodesAgreement
from nblaunch.engines.messages import Proposal, Replies, Subject
from nblaunch.wire.board import StepBoundaries, private_slot
from nblaunch.wire.stop_agreement import should_stop

LIMIT_S = 180.0


class Job:
    """Two nodes with two ranks each; with ``in_step``, all ranks wait for each other in every step."""

    def __init__(self, subject: Subject, delay_s: float = 0.0, grace_s: float = 1000.0) -> None:
        self.delay_s = delay_s
        self.ballots: dict[int, StepBoundaries] = {rank: private_slot().boundaries for rank in range(4)}
        self.steps: dict[int, int] = {}
        self.down: deque[tuple[float, Proposal]] = deque()
        self.up: deque[tuple[float, Replies]] = deque()
        self.leader = NodesAgreement(subject, self._send_down, time.monotonic(), grace_s)
        self.nodes = [
            NodeBallots(subject, {rank: self.ballots[rank] for rank in ranks}, self._send_up)
            for ranks in ((0, 1), (2, 3))
        ]

    def _send_down(self, proposal: Proposal) -> None:
        self.down.append((time.monotonic() + self.delay_s, proposal))

    def _send_up(self, replies: Replies) -> None:
        self.up.append((time.monotonic() + self.delay_s, replies))

    def carry(self) -> None:
        now = time.monotonic()
        while self.down and self.down[0][0] <= now:
            proposal = self.down.popleft()[1]
            for node in self.nodes:
                node.take(proposal)
        while self.up and self.up[0][0] <= now:
            self.leader.take(self.up.popleft()[1])

    def poll(self, now_s: float | None = None) -> None:
        running = self.ballots.keys() - self.steps.keys()
        now_s = time.monotonic() if now_s is None else now_s
        for node, ranks in zip(self.nodes, ((0, 1), (2, 3)), strict=True):
            node.poll(running & set(ranks), now_s)
        self.carry()
        self.leader.poll(running, now_s)
        self.carry()

    def train(self, pace_s: float, has_collectives: bool = True) -> None:
        """Let all ranks take steps until they stop."""
        reached = dict.fromkeys(self.ballots, 0)

        def is_joined(step: int) -> bool:
            """Wait for the collective of a step; return whether all ranks have joined it."""
            while min(reached.values()) <= step and not self.steps:
                time.sleep(0.0001)
            return min(reached.values()) > step

        def loop(rank: int) -> None:
            step, deadline = 0, time.monotonic() + LIMIT_S
            while time.monotonic() < deadline:
                reached[rank] += 1
                if has_collectives and not is_joined(step):
                    step = -1
                    break
                if should_stop(self.ballots[rank]):
                    break
                step += 1
                time.sleep(pace_s * (1 + rank))
            self.steps[rank] = step

        threads = [threading.Thread(target=loop, args=(rank,)) for rank in self.ballots]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            if all(ballot.num_checks for ballot in self.ballots.values()):
                self.poll()
            time.sleep(0.001)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
@pytest.mark.parametrize("pace_s", [0.0002, 0.02])
def test_ranks_that_wait_for_each_other_end_before_the_same_step(delay_s: float, pace_s: float) -> None:
    job = Job("step", delay_s)
    job.train(pace_s)
    assert job.leader.is_settled
    assert len(set(job.steps.values())) == 1, job.steps
    assert min(job.steps.values()) >= 0
    assert all(node.is_settled and not node.is_withdrawn for node in job.nodes)
    assert [node.has_stopped(rank) for node, rank in ((job.nodes[0], 1), (job.nodes[1], 3))] == [True, True]


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_independent_ranks_stop_at_the_same_check(delay_s: float) -> None:
    job = Job("check", delay_s)
    job.train(0.002, has_collectives=False)
    assert len(set(job.steps.values())) == 1


def test_untrained_ranks_wait_for_no_step() -> None:
    job = Job("step")
    for rank in (0, 1, 3):
        assert not should_stop(job.ballots[rank])
    job.poll()
    assert [node.is_withdrawn for node in job.nodes] == [True, True]
    assert not should_stop(job.ballots[0])


def test_nodes_learn_that_a_common_step_takes_too_long() -> None:
    job = Job("step", grace_s=0.4)
    for ballot in job.ballots.values():
        should_stop(ballot)
    began_s = time.monotonic()
    job.poll(began_s)
    assert {ballot.stop_proposal for ballot in job.ballots.values()} == {2}
    job.poll(began_s + 0.2)
    assert not any(node.is_settled for node in job.nodes)
    job.poll(began_s + 0.4)
    assert all(node.is_withdrawn for node in job.nodes)
    assert not any(should_stop(ballot) for ballot in job.ballots.values())
    assert not any(node.has_stopped(rank) for node, rank in ((job.nodes[0], 0), (job.nodes[1], 2)))


def test_ranks_continue_without_a_coordinator() -> None:
    job = Job("step")
    for ballot in job.ballots.values():
        should_stop(ballot)
    job.poll()
    lone = job.nodes[1]
    lone.withdraw()
    lone.take(Proposal("step", 2, 2))  # too late
    assert not any(should_stop(job.ballots[rank]) for rank in (2, 3))


def test_an_earlier_proposal_is_followed() -> None:
    ballot = private_slot().boundaries
    node = NodeBallots("check", {0: ballot}, lambda replies: None, Proposal("check", 1))
    node.poll([0], time.monotonic())
    assert ballot.stop_proposal == 1

"""Ranks of two nodes that leave at the same check: the test decides when heartbeats travel."""

from __future__ import annotations

import copy
import threading
import time

import pytest

from nblaunch.diagnosis.report import RemoteFailures
from nblaunch.events import Returned
from nblaunch.nodes.messages import StopState
from nblaunch.nodes.peer_states import NodesStopAgreement, answers_of
from nblaunch.wire.board import private_slot
from nblaunch.wire.stop_agreement import should_stop

LIMIT_S = 30.0


class Node:
    """One launcher with two ranks that look at ``should_stop`` in a loop, each at a pace of its own."""

    def __init__(self, node_rank: int) -> None:
        self.node_rank = node_rank
        ranks = (2 * node_rank, 2 * node_rank + 1)
        self.slots = {rank: private_slot() for rank in ranks}
        self.own = StopState(is_wanted=True)
        self.peers: dict[int, StopState] = {}
        others = range(2) if node_rank else range(2, 4)
        self.remote = RemoteFailures(labels=dict.fromkeys(others, "the other node"))
        self.stop = NodesStopAgreement(self.slots, node_rank == 0, self.own, self.peers, self.remote)
        self.steps: dict[int, int] = {}
        self.threads = [threading.Thread(target=self._loop, args=(rank,)) for rank in ranks]

    def _loop(self, rank: int) -> None:
        step = 0
        deadline = time.monotonic() + LIMIT_S
        while not should_stop(self.slots[rank]) and time.monotonic() < deadline:
            step += 1
            time.sleep(0.002 * (1 + rank))
        self.steps[rank] = step

    def send_to(self, other: Node) -> None:
        self.own.answers = answers_of(
            {rank: self.slots[rank] for rank in self.slots if rank not in self.steps}
        )
        other.peers[self.node_rank] = copy.copy(self.own)


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_ranks_of_both_leave_at_the_same_check(delay_s: float) -> None:
    leader, follower = Node(0), Node(1)
    leader.send_to(follower)
    follower.send_to(leader)
    threads = [*leader.threads, *follower.threads]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_S
    last_sent_s = 0.0
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for node in (leader, follower):
            running = [rank for rank in node.slots if rank not in node.steps]
            if running and not node.stop.is_settled:
                node.stop.poll(running, time.monotonic())
        if time.monotonic() - last_sent_s >= delay_s:
            last_sent_s = time.monotonic()
            leader.send_to(follower)
            follower.send_to(leader)
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert len({*leader.steps.values(), *follower.steps.values()}) == 1
    assert leader.stop.is_settled
    assert follower.stop.is_settled


def test_no_rank_follows_before_there_is_a_proposal() -> None:
    follower = Node(1)
    follower.stop.poll(follower.slots, 0.0)
    follower.peers[0] = StopState(is_wanted=True)
    follower.stop.poll(follower.slots, 0.0)
    assert not should_stop(follower.slots[2])
    assert follower.slots[2].stop_proposal == 0


def test_nothing_is_proposed_before_all_ranks_are_known() -> None:
    """A stop may be wanted before the other node has reported on its workers, or has sent a heartbeat at all."""
    leader, follower = Node(0), Node(1)
    leader.stop.poll(leader.slots, 0.0)
    leader.peers[1] = StopState()
    leader.stop.poll(leader.slots, 0.1)
    assert leader.own.proposal == 0
    for slot in follower.slots.values():
        slot.num_checks = 1000
    follower.send_to(leader)
    leader.stop.poll(leader.slots, 0.2)
    assert leader.own.proposal > 1000


def test_ranks_that_have_returned_are_not_waited_for() -> None:
    leader, follower = Node(0), Node(1)
    leader.remote.returned[2] = Returned(2, 0.0)
    follower.steps[2] = 5
    follower.send_to(leader)
    leader.stop.poll(leader.slots, 0.0)
    assert leader.own.proposal > 0

"""Ranks of two or three nodes that leave at the same check: the test decides when heartbeats are delivered."""

from __future__ import annotations

import copy
import threading
import time

import pytest

from nblaunch.diagnosis.report import RemoteFailures
from nblaunch.events import Returned
from nblaunch.nodes.messages import StopState
from nblaunch.nodes.peer_states import NodesStopAgreement, replies_of
from nblaunch.wire.board import private_slot
from nblaunch.wire.stop_agreement import should_stop

LIMIT_S = 180.0


class Node:
    """One launcher with two ranks that check ``should_stop`` in a loop, each at its own pace."""

    def __init__(self, node_rank: int, num_nodes: int = 2) -> None:
        self.node_rank = node_rank
        ranks = (2 * node_rank, 2 * node_rank + 1)
        self.slots = {rank: private_slot() for rank in ranks}
        self.own = StopState(is_wanted=True)
        self.peers: dict[int, StopState] = {}
        others = set(range(2 * num_nodes)).difference(ranks)
        self.remote = RemoteFailures(labels=dict.fromkeys(others, "another node"))
        self.stop = NodesStopAgreement(self.slots, self.own, self.peers, self.remote)
        self.steps: dict[int, int] = {}
        self.threads = [threading.Thread(target=self._loop, args=(rank,)) for rank in ranks]

    def _loop(self, rank: int) -> None:
        step = 0
        deadline = time.monotonic() + LIMIT_S
        while not should_stop(self.slots[rank]) and time.monotonic() < deadline:
            step += 1
            time.sleep(0.002 * (1 + rank))
        self.steps[rank] = step

    @property
    def running(self) -> list[int]:
        return [rank for rank in self.slots if rank not in self.steps]

    def send_to(self, *others: Node) -> None:
        self.own.replies = replies_of({rank: self.slots[rank] for rank in self.running})
        for other in others:
            other.peers[self.node_rank] = copy.copy(self.own)
            other.remote.returned.update({rank: Returned(rank, 0.0) for rank in self.steps})

    def finish(self) -> None:
        """Let the ranks return by themselves."""
        self.steps.update(dict.fromkeys(self.slots, 0))

    def look(self, count: int) -> set[bool]:
        """Let the ranks check ``should_stop`` before check ``count``, where no rank waits; return the replies."""
        looks = set()
        for slot in self.slots.values():
            while slot.num_checks < count - 1:
                looks.add(should_stop(slot))
        return looks


def run(*nodes: Node, delay_s: float) -> None:
    """Let the ranks of ``nodes`` loop until all have left; deliver heartbeats every ``delay_s`` seconds."""
    threads = [thread for node in nodes for thread in node.threads]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_S
    last_sent_s = 0.0
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for node in nodes:
            if node.running and not node.stop.is_settled:
                node.stop.poll(node.running, time.monotonic())
        if time.monotonic() - last_sent_s >= delay_s:
            last_sent_s = time.monotonic()
            exchange(*nodes)
        time.sleep(0.001)
    for thread in threads:
        thread.join()


def exchange(*nodes: Node) -> None:
    for node in nodes:
        node.send_to(*(other for other in nodes if other is not node))


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_ranks_of_both_nodes_stop_at_the_same_check(delay_s: float) -> None:
    leader, follower = Node(0), Node(1)
    exchange(leader, follower)
    run(leader, follower, delay_s=delay_s)
    assert len({*leader.steps.values(), *follower.steps.values()}) == 1
    assert leader.stop.is_settled
    assert follower.stop.is_settled


def test_no_rank_stops_before_a_proposal() -> None:
    follower = Node(1)
    follower.stop.poll(follower.slots, 0.0)
    follower.peers[0] = StopState(is_wanted=True)
    follower.stop.poll(follower.slots, 0.0)
    assert not should_stop(follower.slots[2])
    assert follower.slots[2].stop_proposal == 0


def test_proposals_need_all_ranks() -> None:
    """A stop may be requested before the other node has reported its workers, or has sent any heartbeat."""
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


def test_returned_ranks_are_not_awaited() -> None:
    leader, follower = Node(0), Node(1)
    leader.remote.returned[2] = Returned(2, 0.0)
    follower.steps[2] = 5
    follower.send_to(leader)
    leader.stop.poll(leader.slots, 0.0)
    assert leader.own.proposal > 0


# --- a leader that finishes --------------------------------------------------------------------------------------


def propose(leader: Node, *others: Node) -> int:
    """Let the leader propose a check and the others receive it; return its number."""
    exchange(leader, *others)
    leader.stop.poll(leader.running, 0.0)
    leader.send_to(*others)
    for node in others:
        node.stop.poll(node.running, 0.1)
    return leader.own.proposal


def test_the_next_node_leads_after_the_first_returned() -> None:
    nodes = Node(0, 3), Node(1, 3), Node(2, 3)
    nodes[0].finish()
    exchange(*nodes)
    run(*nodes[1:], delay_s=0.0)
    assert len({*nodes[1].steps.values(), *nodes[2].steps.values()}) == 1
    assert all(node.stop.is_settled for node in nodes[1:])


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_a_finished_leaders_proposal_is_replaced_by_a_later_one(is_withdrawn: bool) -> None:
    """Other nodes' ranks have replied to it, and may wait at it. Only the leader's ranks were close to it."""
    nodes = first, second, third = Node(0, 3), Node(1, 3), Node(2, 3)
    for slot in first.slots.values():
        slot.num_checks = 5
    proposal = propose(*nodes)
    for node in (second, third):
        assert node.look(proposal - 1) == {False}
    if is_withdrawn:
        first.own.decision = -proposal
    first.finish()
    exchange(*nodes)
    second.stop.poll(second.running, time.monotonic())
    assert second.own.proposal > proposal
    run(second, third, delay_s=0.0)
    ends = {slot.num_checks for node in (second, third) for slot in node.slots.values()}
    assert ends == {second.own.proposal}
    assert third.own.proposal == 0


def test_finished_leaders_decision_holds() -> None:
    """The leader's last heartbeat contains the decision, so the next leader proposes nothing."""
    nodes = first, second, third = Node(0, 3), Node(1, 3), Node(2, 3)
    proposal = propose(*nodes)
    for node in nodes:
        node.look(proposal)
    exchange(*nodes)
    first.stop.poll(first.running, 0.2)
    assert first.own.decision == proposal
    first.finish()
    first.send_to(second, third)
    for node in (third, second):
        node.stop.poll(node.running, 0.3)
        assert node.stop.is_settled
        assert {should_stop(slot) for slot in node.slots.values()} == {True}
        assert {slot.num_checks for slot in node.slots.values()} == {proposal}


def test_a_node_with_a_rank_that_runs_still_leads() -> None:
    leader, follower = Node(0), Node(1)
    leader.steps[0] = 5
    exchange(leader, follower)
    for node in (leader, follower):
        node.stop.poll(node.running, 0.0)
    assert leader.own.proposal > 0
    assert follower.own.proposal == 0

"""A launcher's conclusions about the other nodes, from given heartbeats and a given clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nblaunch.events import EpochEnded, Event, ExceptionInfo, Exited, ExitStatus, Failed, HostMemory, Returned
from nblaunch.nodes import messages
from nblaunch.nodes.messages import Heartbeat, Node, StopState, Summary
from nblaunch.nodes.peer_states import PeerStates
from nblaunch.wire.board import SlotReading

NODES = [
    Node(id="b", node_rank=1, host="beta", address="10.0.0.2", first_rank=2, num_workers=2),
    Node(id="c", node_rank=2, host="gamma", address="10.0.0.3", first_rank=4, num_workers=1),
]


def peers(nodes: list[Node] | None = None) -> PeerStates:
    return PeerStates(
        NODES if nodes is None else nodes, now_s=100.0, silence_s=5.0, patience_s=15.0, restart_count=0
    )


def heartbeat(
    id: str, count: int, state: str = messages.RUNNING, restart_count: int = 0, **fields: Any
) -> Heartbeat:
    return Heartbeat(id, count, 0, "host", state, restart_count=restart_count, **fields)


def summary(**fields: Any) -> Summary:
    return Summary(-1, 0.0, **fields)


def failed(rank: int) -> Failed:
    return Failed(rank, 1.0, info=ExceptionInfo("ValueError", "wrong"))


def test_silent_nodes_are_named_then_given_up() -> None:
    others = peers()
    others.update([heartbeat("b", 1), heartbeat("c", 1)], 101.0)
    assert others.check(105.9) == []
    others.update([heartbeat("c", 2)], 105.9)
    assert others.check(106.0) == ["node 1 (host beta, ranks 2 and 3) has sent no heartbeat for 5 s"]
    others.update([heartbeat("b", 1), heartbeat("c", 3)], 110.0)  # the last heartbeat is still there, but old
    assert others.check(110.0) == []
    assert not others.must_end
    others.update([heartbeat("c", 4)], 115.0)
    others.check(116.0)
    assert others.must_end
    assert others.failures.lost == {2: "node 1 (host beta, ranks 2 and 3) has sent no heartbeat for 15 s"}


def test_a_node_whose_heartbeats_resume_is_kept() -> None:
    others = peers([NODES[1]])
    assert others.check(107.0) == ["node 2 (host gamma, rank 4) has sent no heartbeat for 7 s"]
    _, notes = others.update([heartbeat("c", 1)], 108.0)
    assert notes == ["node 2 (host gamma, rank 4) is sending heartbeats again after 8 s"]
    assert others.check(112.9) == []
    assert not others.must_end


def test_a_silent_node_is_blamed_for_a_failure_here() -> None:
    others = peers([NODES[0]])
    others.check(105.0)
    assert others.can_be_waited_for
    others.blame_silent(106.0)
    assert others.must_end
    assert not others.can_be_waited_for


def test_no_heartbeats_are_expected_of_nodes_that_are_done() -> None:
    others = peers()
    others.update([heartbeat("b", 1, messages.DONE), heartbeat("c", 1, messages.DONE)], 101.0)
    assert others.check(1000.0) == []
    assert not others.is_any_expected
    assert not others.must_end


def test_the_reason_of_a_node_that_leaves_is_noted() -> None:
    others = peers()
    _, notes = others.update([heartbeat("b", 1, messages.LEFT, reason="was interrupted")], 101.0)
    assert (
        notes == ["node 1 (host beta, ranks 2 and 3) was interrupted"] == list(others.failures.lost.values())
    )
    assert others.must_end


def test_a_node_that_finished_is_not_lost() -> None:
    """Nodes notice the end of the job one after the other; the last ones learn it from nodes that are already gone."""
    others = peers()
    assert others.update([heartbeat("b", 1, messages.LEFT, reason=messages.FINISHED)], 101.0) == ([], [])
    assert not others.must_end
    assert not others.failures.lost


def test_failures_and_ends_are_emitted_once_and_kept() -> None:
    others = peers()
    sent = summary(failed={3: failed(3)}, exits={2: (ExitStatus(-9), 2.0)}, returned={2: Returned(2, 3.0)})
    events: list[Event] = []
    for count in (1, 2):
        new, _ = others.update([heartbeat("b", count, summary=sent)], 101.0)
        events += new
    assert events == [Returned(2, 3.0), failed(3), Exited(2, 2.0, status=ExitStatus(-9))]
    assert others.must_end
    assert others.failures.failed == {3: failed(3)}
    assert others.failures.labels[3] == "node 1 (host beta)"


def test_repeated_epoch_ends_are_emitted_once() -> None:
    others = peers()
    first, second = (EpochEnded(2, 1.0, number, 0.5, 2.0) for number in (1, 2))
    of_another = EpochEnded(4, 1.0, 1, 0.5, 2.0)
    sent = [(first,), (first, second, of_another), (second,)]
    emitted = [
        others.update([heartbeat("b", count, summary=summary(epochs=epochs))], 101.0)[0]
        for count, epochs in enumerate(sent)
    ]
    assert emitted == [[first], [second], []]
    of_another_training = replace(first, time_s=9.0)
    last = heartbeat("b", 3, summary=summary(epochs=(second, of_another_training)))
    assert others.update([last], 101.0)[0] == [of_another_training]


def test_peer_memory_is_emitted_per_sample_and_before_exit() -> None:
    others = peers()
    first, second, of_another = (
        HostMemory(2, 1.0, 10**8),
        HostMemory(2, 2.0, 10**9),
        HostMemory(4, 1.0, 10**8),
    )
    sent = [
        summary(host_memory=(first, of_another)),
        summary(host_memory=(first,)),
        summary(host_memory=(second,), returned={2: Returned(2, 3.0)}),
    ]
    emitted = [
        others.update([heartbeat("b", count, summary=one)], 101.0)[0] for count, one in enumerate(sent)
    ]
    assert emitted == [[first], [], [second, Returned(2, 3.0)]]


def test_nodes_report_only_their_own_ranks() -> None:
    others = peers()
    sent = summary(
        failed={0: failed(0), 9: failed(9)},
        exits={4: (ExitStatus(-9), 2.0)},
        returned={-1: Returned(-1, 3.0)},
        stop=StopState(replies={2: (1, 0), 77: (1, 0)}),
    )
    assert others.update([heartbeat("b", 1, summary=sent)], 101.0) == ([], [])
    assert not others.failures.has_cause
    assert others.stop_states[1].replies == {2: (1, 0)}


def test_heartbeats_of_a_former_start_report_nothing() -> None:
    """A failed node's heartbeat from before the restart may still exist when all nodes have met again."""
    others = peers()
    old = heartbeat("b", 9, restart_count=-1, summary=summary(failed={3: failed(3)}))
    assert others.update([old], 101.0) == ([], [])
    assert not others.must_end


def test_unknown_nodes_are_ignored() -> None:
    others = peers()
    assert others.update(
        [heartbeat("x", 1, messages.LEFT, summary=summary(failed={3: failed(3)}))], 101.0
    ) == (
        [],
        [],
    )
    assert not others.must_end


def test_unchanged_peer_readings_are_not_news() -> None:
    others = peers()
    sent = SlotReading(rank=2, step=7, total=9, step_time_s=5000.0)  # in that machine's clock
    own = [SlotReading(rank=rank, step=1) for rank in range(5)]
    for count, now_s in enumerate((101.0, 101.4, 102.0)):  # heartbeats have different delays
        others.update([heartbeat("b", count, summary=summary(readings=(sent,)))], now_s)
        assert others.merged(own) == [own[0], own[1], sent, own[3], own[4]]

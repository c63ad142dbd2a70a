"""What a launcher concludes about the other nodes, from imagined news and an imagined clock."""

from __future__ import annotations

from typing import Any

from nblaunch.events import Event, ExceptionInfo, Exited, ExitStatus, Failed, Finished
from nblaunch.launch.neighbours import Neighbours
from nblaunch.nodes import messages
from nblaunch.nodes.messages import Heartbeat, Node, StopState, Summary
from nblaunch.wire.board import Sample

MEMBERS = [
    Node(id="b", node_rank=1, host="beta", address="10.0.0.2", first_rank=2, num_workers=2),
    Node(id="c", node_rank=2, host="gamma", address="10.0.0.3", first_rank=4, num_workers=1),
]


def neighbours(members: list[Node] | None = None) -> Neighbours:
    return Neighbours(
        MEMBERS if members is None else members, now_s=100.0, silence_s=5.0, patience_s=15.0, start=0
    )


def page(id: str, beat: int, state: str = messages.RUNNING, start: int = 0, **fields: Any) -> Heartbeat:
    return Heartbeat(id, beat, 0, "host", state, restart_count=start, **fields)


def summary(**fields: Any) -> Summary:
    return Summary(-1, 0.0, **fields)


def failed(rank: int) -> Failed:
    return Failed(rank, 1.0, info=ExceptionInfo("ValueError", "wrong"))


def test_a_node_is_named_once_when_it_falls_silent_and_given_up_later() -> None:
    others = neighbours()
    others.learn([page("b", 1), page("c", 1)], 101.0)
    assert others.look(105.9) == []
    others.learn([page("c", 2)], 105.9)
    assert others.look(106.0) == ["node 1 (host beta, ranks 2-3) has not been heard of for 5 s"]
    others.learn([page("b", 1), page("c", 3)], 110.0)  # the page is still there, but no younger
    assert others.look(110.0) == []
    assert not others.must_stop
    others.learn([page("c", 4)], 115.0)
    others.look(116.0)
    assert others.must_stop
    assert others.elsewhere.lost == {2: "node 1 (host beta, ranks 2-3) has not been heard of for 15 s"}


def test_a_node_that_is_heard_again_is_forgiven() -> None:
    others = neighbours([MEMBERS[1]])
    assert others.look(107.0) == ["node 2 (host gamma, rank 4) has not been heard of for 7 s"]
    _, notes = others.learn([page("c", 1)], 108.0)
    assert notes == ["node 2 (host gamma, rank 4) is heard of again, after 8 s"]
    assert others.look(112.9) == []
    assert not others.must_stop


def test_silence_of_all_at_once_is_told_once() -> None:
    (note,) = neighbours().look(105.0)
    assert "none of the other 2 nodes has been heard of for 5 s" in note


def test_silence_explains_a_failure_here() -> None:
    others = neighbours([MEMBERS[0]])
    others.look(105.0)
    assert others.can_be_waited_for
    others.blame_silent(106.0)
    assert others.must_stop
    assert not others.can_be_waited_for


def test_who_is_done_need_not_be_heard() -> None:
    others = neighbours()
    others.learn([page("b", 1, messages.DONE), page("c", 1, messages.DONE)], 101.0)
    assert others.look(1000.0) == []
    assert not others.is_anybody_expected
    assert not others.must_stop


def test_a_node_that_leaves_says_why() -> None:
    others = neighbours()
    _, notes = others.learn([page("b", 1, messages.LEFT, reason="was interrupted")], 101.0)
    assert notes == ["node 1 (host beta, ranks 2-3) was interrupted"] == list(others.elsewhere.lost.values())
    assert others.must_stop


def test_a_node_that_leaves_because_all_is_done_is_not_lost() -> None:
    """Nodes notice in turn that all is done; the last ones hear it of those that have gone already."""
    others = neighbours()
    assert others.learn([page("b", 1, messages.LEFT, reason=messages.FINISHED)], 101.0) == ([], [])
    assert not others.must_stop
    assert not others.elsewhere.lost


def test_failures_and_ends_are_told_once_and_kept() -> None:
    others = neighbours()
    told = summary(failed={3: failed(3)}, exits={2: (ExitStatus(-9), 2.0)}, finished={2: Finished(2, 3.0)})
    events: list[Event] = []
    for beat in (1, 2):
        new, _ = others.learn([page("b", beat, summary=told)], 101.0)
        events += new
    assert events == [Finished(2, 3.0), failed(3), Exited(2, 2.0, status=ExitStatus(-9))]
    assert others.must_stop
    assert others.elsewhere.failed == {3: failed(3)}
    assert others.elsewhere.places[3] == "node 1 (host beta)"


def test_a_node_speaks_for_its_own_ranks_alone() -> None:
    others = neighbours()
    told = summary(
        failed={0: failed(0), 9: failed(9)},
        exits={4: (ExitStatus(-9), 2.0)},
        finished={-1: Finished(-1, 3.0)},
        stop=StopState(answers={2: (1, 0), 77: (1, 0)}),
    )
    assert others.learn([page("b", 1, summary=told)], 101.0) == ([], [])
    assert not others.elsewhere.has_cause
    assert others.stopping[1].answers == {2: (1, 0)}


def test_news_of_a_former_start_are_no_news() -> None:
    """The page of a node that failed before the restart may still lie there when all have met again."""
    others = neighbours()
    old = page("b", 9, start=-1, summary=summary(failed={3: failed(3)}))
    assert others.learn([old], 101.0) == ([], [])
    assert not others.must_stop


def test_strangers_are_ignored() -> None:
    others = neighbours()
    assert others.learn([page("x", 1, messages.LEFT, summary=summary(failed={3: failed(3)}))], 101.0) == (
        [],
        [],
    )
    assert not others.must_stop


def test_samples_of_others_take_their_places_in_our_time() -> None:
    others = neighbours()
    sample = Sample(rank=2, step=7, total=9, step_time_s=5000.0)
    others.learn([page("b", 1, summary=summary(samples=(sample,)), clock_s=5001.0)], 101.0)
    own = [Sample(rank=rank, step=1) for rank in range(5)]
    merged = others.merged(own)
    assert [found.step for found in merged] == [1, 1, 7, 1, 1]
    assert merged[2].step_time_s == 100.0  # a second ago, as it was there
    assert merged[0] is own[0]

"""If ranks wait in a backward pass, the report says how another rank's step differs."""

from __future__ import annotations

from nblaunch.diagnosis.disagreements import Explanation
from nblaunch.diagnosis.stalls import Standing, explain_stall
from nblaunch.wire.collective_calls import BACKWARD, FORWARD, Call, Group, RankCalls, Site

ALL = Group((0, 1, 2), 0, True)


def calls_of(*kinds: str, syncs: bool = True) -> RankCalls:
    """Return calls of the given kinds; ``forward:model 2`` is a forward pass of that model."""
    counts: dict[str, int] = {}
    calls = []
    for serial, text in enumerate(kinds, 1):
        kind, _, detail = text.partition(":")
        counts[kind] = number = counts.get(kind, 0) + 1
        group = None if kind == BACKWARD else ALL
        site = Site(kind, group, filename="train.py", line=serial, detail=detail)
        calls.append(Call(serial, site, number, 0, -1, (), float(serial), float(syncs)))
    return RankCalls(tuple(calls), len(calls))


def explained(*calls: RankCalls) -> Explanation:
    found = explain_stall(Standing(dict(enumerate(calls))))
    assert found is not None
    return found


STEP = calls_of(FORWARD, BACKWARD)


def test_another_model_is_named() -> None:
    usual = calls_of(f"{FORWARD}:model 1", BACKWARD)
    found = explained(usual, calls_of(f"{FORWARD}:model 2", BACKWARD), usual)
    assert found.ranks == (1,)
    assert found.headline.startswith("forward 1 of DistributedDataParallel: rank 1 called model 2")


def test_a_collective_mistaken_for_gradients_is_named() -> None:
    """All ranks wait in backward, because the backend mistook the extra call for a gradient exchange."""
    found = explained(STEP, STEP, calls_of(FORWARD, "all_reduce", BACKWARD))
    assert found.ranks == (2,)
    assert found.headline.startswith("rank 2 alone called all_reduce, collective 1 (train.py, line 2)")


def test_a_collective_that_one_rank_left_out_is_named() -> None:
    usual = calls_of(FORWARD, "all_reduce", BACKWARD)
    found = explained(usual, STEP, usual)
    assert found.ranks == (1,)
    assert found.headline.startswith("rank 1 has not called all_reduce, collective 1")


def test_a_rank_without_all_gradients_is_named() -> None:
    """A parameter has no gradient on rank 1: its backward pass ends, and the others wait for the gradient."""
    found = explained(STEP, calls_of(FORWARD, BACKWARD, "all_reduce"), STEP)
    assert found.ranks == (1,)
    assert found.headline.startswith(
        "rank 1 has finished backward 1 (train.py, line 2) without exchanging all the gradients"
    )
    assert "find_unused_parameters" in found.advice


def test_a_call_of_the_bare_module_is_named() -> None:
    twice = calls_of(FORWARD, BACKWARD, FORWARD, BACKWARD)
    found = explained(twice, calls_of(FORWARD, BACKWARD, BACKWARD, "all_reduce"), twice)
    assert found.ranks == (1,)
    assert "rank 1 has called DistributedDataParallel 1 time before backward 2" in found.headline


def test_ranks_that_wait_alike_are_not_explained() -> None:
    assert explain_stall(Standing({0: STEP, 1: STEP})) is None

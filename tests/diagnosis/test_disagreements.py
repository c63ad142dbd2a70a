"""Calls in which ranks differ: the first such call, and the ranks at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nblaunch.diagnosis.disagreements import completed, explain, explain_splits, find_disagreement
from nblaunch.diagnosis.report import LEFT
from nblaunch.diagnosis.stacks import Position
from nblaunch.diagnosis.stalls import Standing, explain_stall, waits_for_finished
from nblaunch.wire.collective_calls import BACKWARD, NEW_GROUP, STEP, Call, Group, RankCalls, Site, Splits

ALL = Group((0, 1, 2, 3), 0, True)


def calls_of(*sites: Site, first: int = 1) -> RankCalls:
    """Return the calls of a rank, with the numbers and chains that it would record."""
    calls: list[Call] = []
    counts: dict[object, int] = {}
    chain = 0
    for serial, site in enumerate(sites, start=first):
        key = site.group if site.kind not in (BACKWARD, STEP) else site.kind
        counts[key] = number = counts.get(key, first - 1) + 1
        size = 4 if site.num_tensors else -1
        chain = hash((chain, site.kind, site.dtype, site.reduction, site.root))
        value = float(site.detail or 0) if site.kind == STEP else 0.0
        calls.append(Call(serial, replace(site, detail=""), number, chain, size, (4,), float(serial), value))
    return RankCalls(tuple(calls), len(calls) + first - 1)


def reduce(line: int = 9, **changed: object) -> Site:
    site = Site("all_reduce", ALL, "float32", 1, 1, "SUM", filename="train.py", line=line)
    return replace(site, **changed)  # type: ignore[arg-type]


BARRIER = Site("barrier", ALL, filename="train.py", line=20)


def test_equal_calls_on_any_lines_do_not_differ() -> None:
    calls = {rank: calls_of(reduce(rank), BARRIER, reduce(30 + rank)) for rank in range(4)}
    assert find_disagreement(calls) is None


def test_ranks_with_different_progress_do_not_differ() -> None:
    assert find_disagreement({rank: calls_of(*[reduce()] * (rank + 1)) for rank in range(4)}) is None


@pytest.mark.parametrize(
    "other", [BARRIER, reduce(dtype="int32"), reduce(reduction="MAX"), reduce(kind="reduce", root=1)]
)
def test_the_minority_is_at_fault(other: Site) -> None:
    calls = {rank: calls_of(reduce(), other if rank == 2 else reduce(), reduce()) for rank in range(4)}
    found = find_disagreement(calls)
    assert found is not None
    assert found.number == 2
    assert explain(found, calls).ranks == (2,)


def test_neither_of_two_equal_sides_is_at_fault() -> None:
    calls = {rank: calls_of(reduce(reduction="MAX" if rank < 2 else "SUM")) for rank in range(4)}
    found = find_disagreement(calls)
    assert found is not None
    assert explain(found, calls).ranks == ()


def test_overwritten_differences_are_not_reported() -> None:
    calls = {0: calls_of(*[reduce()] * 5, first=300), 1: calls_of(*[reduce()] * 5, first=300)}
    shifted = tuple(replace(call, chain=call.chain + 1) for call in calls[1].calls)
    assert find_disagreement({**calls, 1: replace(calls[1], calls=shifted)}) is None


def last(number: int, calls: RankCalls) -> RankCalls:
    return replace(calls, calls=calls.calls[-number:])


def test_an_overwritten_call_is_inferred_from_later_agreement() -> None:
    maximum = reduce(10, reduction="MAX")
    calls = {
        rank: calls_of(reduce(), maximum if rank == 3 else reduce(), *[reduce()] * 8) for rank in range(4)
    }
    found = find_disagreement({**calls, 0: last(4, calls[0]), 1: last(5, calls[1])})
    assert found is not None
    assert (found.number, found.missing) == (2, set())
    assert explain(found, calls).headline.startswith(
        "collective 2: rank 3 all_reduce float32[4] MAX (train.py, line 10); ranks 0-2 all_reduce float32[4] SUM"
    )


def test_a_rank_without_matching_calls_is_not_named() -> None:
    calls = {rank: calls_of(*[reduce(root=rank)] * 9) for rank in range(3)}
    found = find_disagreement({**calls, 2: last(3, calls[2])})
    assert found is not None
    assert found.calls.keys() == {0, 1}


def test_ranks_that_come_later_complete_a_difference() -> None:
    calls = {rank: calls_of(reduce(), reduce(reduction="MAX" if rank == 3 else "SUM")) for rank in range(4)}
    early = {rank: calls[rank] if rank > 1 else last(1, calls_of(reduce())) for rank in range(4)}
    found = find_disagreement(early)
    assert found is not None
    assert explain(found, early).ranks == ()
    assert explain(completed(found, calls), calls).ranks == (3,)


def test_a_learning_rate_must_differ_twice() -> None:
    def steps(*rates: float) -> RankCalls:
        return calls_of(*(Site(STEP, ALL, detail=str(rate), filename="train.py", line=5) for rate in rates))

    assert find_disagreement({0: steps(0.1, 0.1, 0.1), 1: steps(0.1, 0.2, 0.1)}) is None
    calls = {0: steps(0.1, 0.1, 0.1), 1: steps(0.1, 0.2, 0.2), 2: steps(0.1, 0.1, 0.1)}
    found = find_disagreement(calls)
    assert found is not None
    assert "rank 1 learning rate 0.2" in explain(found, calls).headline
    shares = {
        rank: replace(
            of, calls=tuple(replace(call, site=replace(call.site, detail=f"{rank}")) for call in of.calls)
        )
        for rank, of in calls.items()
    }
    assert find_disagreement(shares) is None, "each rank steps other parameters"


SOURCE = """
for batch in loader:
    loss.backward()
if rank == 0:
    dist.all_reduce(x)
dist.barrier()
"""


def stand(
    tmp_path: Path,
    calls: Mapping[int, Sequence[tuple[str, int]]],
    returned: Sequence[int] = (),
    source: str = SOURCE,
) -> Standing:
    (tmp_path / "train.py").write_text(source)
    found = {
        rank: calls_of(*(Site(kind, None if kind == BACKWARD else ALL, filename=str(tmp_path / "train.py"), line=line)
                         for kind, line in own))
        for rank, own in calls.items()
    }  # fmt: skip
    return Standing(found, dict.fromkeys(returned, LEFT))


def test_early_exits_from_loops_are_explained(tmp_path: Path) -> None:
    backward = (BACKWARD, 3)
    calls = {0: [backward] * 3, 1: [backward] * 2 + [("barrier", 6)], 2: [backward] * 3}
    found = explain_stall(stand(tmp_path, calls))
    assert found is not None
    assert found.ranks == (1,)
    assert found.headline.startswith(
        "rank 1 left the loop on line 2 after 2 batches, but ranks 0 and 2 are still in it, in batch 3"
    )


def test_a_collective_under_a_rank_condition_is_explained(tmp_path: Path) -> None:
    for calls in ({0: [("all_reduce", 5)], 1: [(BACKWARD, 3)]}, {0: [("all_reduce", 5)], 1: []}):
        found = explain_stall(stand(tmp_path, calls, returned=[1] if not calls[1] else []))
        assert found is not None
        assert found.ranks == (0,)
        assert "rank 0 alone called all_reduce" in found.headline
        assert "under `if rank == 0`" in found.headline


def test_two_ranks_in_different_places_are_named_without_blame(tmp_path: Path) -> None:
    found = explain_stall(stand(tmp_path, {0: [(BACKWARD, 3)] * 2, 1: [(BACKWARD, 3), ("barrier", 6)]}))
    assert found is not None
    assert found.ranks == ()
    assert "rank 0" in found.headline
    assert "rank 1" in found.headline


def test_a_rank_without_any_call_is_named() -> None:
    calls = {0: calls_of(reduce()), 1: calls_of(reduce()), 2: RankCalls()}
    found = explain_stall(Standing(calls))
    assert found is not None
    assert found.ranks == (2,)
    assert found.headline.startswith("rank 2 has called no collective yet; ranks 0 and 1 wait in all_reduce")
    overwritten = calls | {2: RankCalls(num_calls=1000)}
    assert explain_stall(Standing(overwritten)) is None


def test_ranks_that_all_wait_for_the_same_are_not_explained(tmp_path: Path) -> None:
    assert explain_stall(stand(tmp_path, {rank: [("barrier", 6)] for rank in range(3)})) is None


def test_a_call_of_a_function_that_the_loop_calls_is_inside_it(tmp_path: Path) -> None:
    source = """
def evaluate():
    dist.all_reduce(x)
def train():
    for batch in loader:
        loss.backward()
        evaluate()
"""
    standing = stand(
        tmp_path, {0: [(BACKWARD, 6)] * 3, 1: [(BACKWARD, 6)] * 2 + [("all_reduce", 3)]}, source=source
    )
    found = explain_stall(standing)
    assert found is not None
    assert "left the loop" not in found.headline


def test_a_rank_before_a_loop_has_not_left_it(tmp_path: Path) -> None:
    source = "dist.barrier()\nfor batch in loader:\n    dist.all_reduce(x)\n"
    found = explain_stall(
        stand(tmp_path, {0: [("all_reduce", 3)], 1: [("barrier", 1)], 2: [("all_reduce", 3)]}, source=source)
    )
    assert found is None or "left the loop" not in found.headline


def test_a_rank_that_is_elsewhere_has_not_left_a_loop(tmp_path: Path) -> None:
    waits, sleeps = Position("train.py, line 3 in train", "backward"), Position("train.py, line 1 in train")
    standing = stand(tmp_path, {0: [(BACKWARD, 3)] * 2, 1: [(BACKWARD, 3)], 2: [(BACKWARD, 3)] * 2})
    found = explain_stall(replace(standing, positions={0: waits, 1: sleeps, 2: waits}))
    assert found is not None
    assert found.ranks == (1,)
    assert found.headline.startswith("rank 1 has not arrived, and is at train.py, line 1")


def test_a_loop_in_a_helper_can_be_left(tmp_path: Path) -> None:
    source = """
def epoch():
    for batch in loader:
        loss.backward()
def train():
    epoch()
    dist.barrier()
"""
    calls = {0: [(BACKWARD, 4)] * 3, 1: [(BACKWARD, 4)] * 2 + [("barrier", 7)], 2: [(BACKWARD, 4)] * 3}
    found = explain_stall(stand(tmp_path, calls, source=source))
    assert found is not None
    assert found.headline.startswith("rank 1 left the loop on line 3 after 2 batches")


def test_an_earlier_call_on_another_line_is_named(tmp_path: Path) -> None:
    """Rank 0 makes a call alone, and the backend pairs it with the others' next call."""
    calls = {
        0: calls_of(reduce(3), reduce(3), reduce(7), reduce(3)),
        1: calls_of(reduce(3), reduce(3), reduce(3), BARRIER),
        2: calls_of(reduce(3), reduce(3), reduce(3), BARRIER),
    }
    found = find_disagreement(calls)
    assert found is not None
    lines = explain(found, calls).lines
    assert lines == (
        "Earlier, ranks called collective 3 from different lines: "
        "rank 0 train.py, line 7; ranks 1 and 2 train.py, line 3.",
    )
    alternating = {rank: calls_of(*[reduce(3), reduce(5 if rank else 7)] * 2, BARRIER if rank else reduce(3))
                   for rank in range(3)}  # fmt: skip
    found = find_disagreement(alternating)
    assert found is not None
    assert not explain(found, alternating).lines


def test_parts_of_all_to_all_are_compared_after_some_ranks_went_on() -> None:
    """The backend ends the rank that receives too much, after the others have already continued."""
    exchange = Site("all_to_all", ALL, filename="train.py", line=5)
    calls = {
        rank: replace(
            calls_of(exchange, *([] if rank == 1 else [BARRIER])),
            splits=Splits(1, (1, 2 if rank == 0 else 1, 1, 1), (1, 1, 1, 1)),
        )
        for rank in range(4)
    }
    found = explain_splits(calls)
    assert found is not None
    assert "rank 0 sends 2 rows to rank 1" in found.headline


def test_a_rank_ended_by_the_backend_is_not_at_fault() -> None:
    calls = {rank: calls_of(reduce(), *([] if rank == 1 else [reduce()])) for rank in range(4)}
    assert explain_stall(Standing(calls)).ranks == (1,)  # type: ignore[union-attr]
    found = explain_stall(Standing(calls, aborted=[1]))
    assert found is not None
    assert found.ranks == ()
    assert "rank 1 was ended by torch's backend" in found.headline


PAIR = Group((0, 1), 0)


@pytest.mark.parametrize(("group", "faulty"), [(Group((0, 1, 2), 0), (2,)), (PAIR, ())])
def test_only_members_of_a_group_are_compared(group: Group, faulty: tuple[int, ...]) -> None:
    """Two of three members are a group's majority; one of two is not, whatever ranks outside it do."""
    waiting = [0, 1] if len(group.ranks) == 3 else [0]
    calls = {rank: calls_of(reduce(group=group) if rank in waiting else BARRIER) for rank in range(5)}
    found = explain_stall(Standing(calls))
    assert found is not None
    assert found.ranks == faulty


def test_a_member_that_does_not_create_its_group_is_named(tmp_path: Path) -> None:
    create = Site(NEW_GROUP, PAIR, filename="train.py", line=4)
    calls = {0: calls_of(reduce()), 1: calls_of(create), 2: calls_of(create, reduce())}
    in_group, in_reduce = (
        Position("train.py, line 4", "new_group"),
        Position("train.py, line 9", "all_reduce"),
    )
    found = explain_stall(Standing(calls, {}, {0: in_reduce, 1: in_group, 2: in_reduce}))
    assert found is not None
    assert found.ranks == (0,)
    assert found.headline.startswith(
        "rank 0 has not called new_group with ranks 0 and 1, in which rank 1 waits"
    )


@pytest.mark.parametrize(
    ("left", "at", "is_certain"),
    [
        (RankCalls(has_joined=False), "init_process_group", True),
        (RankCalls(), "init_process_group", False),  # it may be leaving the call as well
        (RankCalls(has_joined=False), "", False),
        (calls_of(reduce()), "all_reduce", True),
        (calls_of(reduce(), reduce()), "all_reduce", False),  # data may still be on its way
        (RankCalls(num_calls=1000), "all_reduce", False),  # the calls were overwritten
        (RankCalls(has_joined=False), "all_reduce", True),
    ],
)
def test_only_calls_that_a_finished_rank_never_makes_are_hopeless(
    left: RankCalls, at: str, is_certain: bool
) -> None:
    others = calls_of(reduce(), reduce()) if at == "all_reduce" else RankCalls()
    calls = {0: left, 1: others, 2: others}
    positions = {rank: Position("train.py, line 9", at) for rank in (1, 2)}
    assert waits_for_finished(Standing(calls, {0: LEFT}, positions)) is is_certain
    positions[2] = Position("train.py, line 8")
    assert not waits_for_finished(Standing(calls, {0: LEFT}, positions))


def test_groups_created_in_another_order_are_explained() -> None:
    other = Group((1, 2), 0)
    first, second = (Site(NEW_GROUP, group, filename="train.py", line=4) for group in (PAIR, other))
    calls = {
        0: calls_of(first),
        1: calls_of(first, second),
        2: calls_of(second),
        3: calls_of(first, second, BARRIER),
    }
    calls = {
        rank: replace(of, calls=tuple(replace(call, number=call.serial) for call in of.calls))
        for rank, of in calls.items()
    }
    at = {rank: Position("train.py, line 4", "new_group") for rank in range(3)} | {
        3: Position("x", "barrier")
    }
    found = explain_stall(Standing(calls, {}, at))
    assert found is not None
    assert found.ranks == (2,)
    assert "new group 1: rank 2 new_group with ranks 1 and 2" in found.headline

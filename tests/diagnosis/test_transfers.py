"""If ranks wait in send or recv, the report names the missing half, or ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch.diagnosis.stalls import Standing, explain_stall
from nblaunch.wire.collective_calls import Call, Group, RankCalls, Site

ALL = Group((0, 1, 2), 0, True)


def transfer(kind: str, peer: int, line: int = 5, **changed: object) -> Site:
    return Site(kind, ALL, "float32", 1, 1, root=peer, filename="train.py", line=line, **changed)  # type: ignore[arg-type]


BARRIER = Site("barrier", ALL, filename="train.py", line=20)


def calls_of(*sites: Site, sizes: Sequence[int] = ()) -> RankCalls:
    shapes = [*sizes, *[4] * len(sites)]
    calls = [
        Call(i, site, i, 0, -1, (shape,), 0.0, 0.0)
        for i, (site, shape) in enumerate(zip(sites, shapes, strict=False), 1)
    ]
    return RankCalls(tuple(calls), len(calls))


def headline(*calls: RankCalls) -> str:
    found = explain_stall(Standing(dict(enumerate(calls))))
    assert found is not None
    assert found.ranks == (), "a missing half does not show which side is wrong"
    return found.headline


def test_a_recv_without_a_send_names_the_peer() -> None:
    done = calls_of(transfer("send", 1), BARRIER)
    assert headline(done, calls_of(transfer("recv", 0), transfer("recv", 0, 6))) == (
        "rank 1 waits in recv float32[4] from rank 0 (train.py, line 6), which has not called send for it; "
        "rank 0 waits in barrier, collective 2 (train.py, line 20)"
    )


def test_the_open_transfer_of_a_batch_is_found() -> None:
    """batch_isend_irecv starts all transfers on one line, and rank 0 sends nothing."""
    ring = {0: [transfer("recv", 2)], 1: [transfer("recv", 0), transfer("send", 2)]}
    ring[2] = [transfer("recv", 1), transfer("send", 0)]
    shown = headline(calls_of(*ring[0], BARRIER), calls_of(*ring[1]), calls_of(*ring[2], BARRIER))
    assert "rank 1 waits in recv float32[4] from rank 0" in shown


def test_ranks_that_wait_in_a_circle_are_explained() -> None:
    shown = headline(*(calls_of(transfer("recv", (rank - 1) % 3)) for rank in range(3)))
    assert shown.startswith("ranks 0-2 wait for each other: rank 0 waits in recv float32[4] from rank 2")


def test_different_tags_are_explained() -> None:
    shown = headline(
        calls_of(transfer("send", 1, detail="tag 3")), calls_of(transfer("recv", 0, detail="tag 7"))
    )
    assert "rank 0 waits in send float32[4] (tag 3) to rank 1" in shown
    assert "rank 1 waits in recv float32[4] (tag 7) from rank 0" in shown


def test_different_sizes_are_explained() -> None:
    sent = calls_of(transfer("send", 1), transfer("send", 1), BARRIER, sizes=(4, 8))
    shown = headline(sent, calls_of(transfer("recv", 0), transfer("recv", 0), sizes=(4, 2)))
    assert "rank 1 recv float32[2] from rank 0" in shown
    assert "rank 0 send float32[8] to rank 1" in shown


def test_a_transfer_whose_half_exists_is_not_missing() -> None:
    sent = calls_of(transfer("send", 1), BARRIER)
    found = explain_stall(Standing({0: sent, 1: calls_of(transfer("recv", 0))}))
    assert found is None or "has not called" not in found.headline

"""All ranks leave at the same step, or none does: with simulated ranks, with threads, and with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.wire.board import Board, Slot, private_slot
from nblaunch.wire.stop_agreement import StopAgreement, should_stop

LIMIT_S = 180.0


def test_no_rank_stops_without_a_proposal() -> None:
    slot = private_slot()
    assert [should_stop(slot) for _ in range(1000)] == [False] * 1000
    assert slot.num_checks == 1000


def test_a_rank_stops_at_the_proposal_and_not_before() -> None:
    slot = private_slot()
    agreement = StopAgreement({0: slot}, 0.0)
    agreement.poll([0], 0.0)
    proposal = slot.stop_proposal
    assert proposal > 0
    looks = []
    for _ in range(proposal):
        agreement.poll([0], 0.0)
        looks.append(should_stop(slot))
    assert looks == [False] * (proposal - 1) + [True]
    assert agreement.is_settled


def test_ranks_past_the_proposal_get_a_later_one() -> None:
    slots = {0: private_slot(), 1: private_slot()}
    agreement = StopAgreement(slots, 0.0)
    agreement.poll([0, 1], 0.0)
    first = slots[0].stop_proposal
    for _ in range(first + 5):  # this rank did not see the proposal in time
        slots[1].begin_check()
    assert not should_stop(slots[1])
    assert not should_stop(slots[0])
    agreement.poll([0, 1], 0.01)
    assert slots[0].stop_decision == -first
    agreement.poll([0, 1], 0.02)
    assert slots[0].stop_proposal > slots[1].num_checks
    assert not agreement.is_settled


def test_a_rank_that_waits_too_long_is_let_go() -> None:
    slots = {0: private_slot(), 1: private_slot()}
    agreement = StopAgreement(slots, 0.0)
    agreement.poll([0, 1], 0.0)
    proposal = slots[0].stop_proposal
    for _ in range(proposal - 1):
        assert not should_stop(slots[0])
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: done.append(should_stop(slots[0])))
    waiting.start()
    deadline = time.monotonic() + LIMIT_S
    while slots[0].num_checks < proposal and time.monotonic() < deadline:
        time.sleep(0.001)
    agreement.poll([0, 1], 1.0)
    agreement.poll([0, 1], 1.2)
    assert waiting.is_alive()
    agreement.poll([0, 1], 1.3)  # the other may wait for this rank in a collective
    waiting.join(LIMIT_S)
    assert done == [False]


def test_ranks_that_returned_are_not_asked() -> None:
    slots = {0: private_slot(), 1: private_slot()}
    agreement = StopAgreement(slots, 0.0)
    agreement.poll([0], 0.0)
    while not agreement.is_settled:
        assert slots[0].num_checks < 10
        stopped = should_stop(slots[0])
        agreement.poll([0], 0.0)
    assert should_stop(slots[0]) or stopped
    StopAgreement(slots, 0.0).poll([], 1.0)  # no rank is left, so there is nothing to agree on


def _run_ranks(pauses_s: list[float], collective: Callable[[], object]) -> list[int]:
    """Run threads with loops like training; return the check at which each one left."""
    slots = {rank: private_slot() for rank in range(len(pauses_s))}
    left: dict[int, int] = {}

    def loop(rank: int, slot: Slot) -> None:
        while not should_stop(slot):
            time.sleep(pauses_s[rank])
            collective()
        left[rank] = slot.num_checks

    threads = [threading.Thread(target=loop, args=item, daemon=True) for item in slots.items()]
    for thread in threads:
        thread.start()
    agreement = StopAgreement(slots, time.monotonic())
    deadline = time.monotonic() + LIMIT_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        agreement.poll([rank for rank in slots if rank not in left], time.monotonic())
        time.sleep(0.001)
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "ranks wait for each other for ever"
    return [left[rank] for rank in sorted(left)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0005, 0.002, 0.02]), min_size=2, max_size=4))
def test_coupled_ranks_of_any_pace_leave_together(pauses_s: list[float]) -> None:
    barrier = threading.Barrier(len(pauses_s), timeout=LIMIT_S)
    assert len(set(_run_ranks(pauses_s, barrier.wait))) == 1


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from([0.0005, 0.001, 0.005]), min_size=2, max_size=4))
def test_independent_ranks_leave_at_the_same_step(pauses_s: list[float]) -> None:
    assert len(set(_run_ranks(pauses_s, lambda: None))) == 1


def test_a_slow_rank_in_a_collective_is_not_waited_for_at_the_check() -> None:
    """One rank is always half a second late: its partner at the check must not wait for its check."""
    barrier = threading.Barrier(2, timeout=LIMIT_S)
    assert len(set(_run_ranks([0.0, 0.5], barrier.wait))) == 1


WORKER = """
import sys, time
from nblaunch.wire.board import Board
from nblaunch.wire.stop_agreement import should_stop
fd, rank, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
slot = Board(3, fd).slot(rank)
while not should_stop(slot):
    if pause_s:
        time.sleep(pause_s)
print(slot.num_checks)
"""


@pytest.mark.parametrize("pauses_s", [(0.0, 0.0, 0.0), (0.001, 0.002, 0.001), (0.02, 0.01, 0.015)])
def test_real_processes_leave_together(pauses_s: tuple[float, ...]) -> None:
    board = Board.create(3)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(board.fd), str(rank), str(pause_s)],
            pass_fds=[board.fd],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for rank, pause_s in enumerate(pauses_s)
    ]
    try:
        slots = {rank: board.slot(rank) for rank in range(3)}
        deadline = time.monotonic() + LIMIT_S
        while not all(slot.num_checks > 20 for slot in slots.values()) and time.monotonic() < deadline:
            time.sleep(0.005)
        agreement = StopAgreement(slots, time.monotonic())
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            running = [rank for rank, process in enumerate(processes) if process.poll() is None]
            agreement.poll(running, time.monotonic())
            time.sleep(0.01)
        left = [int(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        slots = {}
        board.close()
    if 0.0 in pauses_s:
        return  # independent ranks are thousands of steps apart, so only check that they leave
    assert len(set(left)) == 1

"""SIGINT in a worker: an exception of the user's code, and of nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nblaunch.wire.board import Slot, private_slot
from nblaunch.worker.process_control import Interrupts


@pytest.fixture
def slot() -> Iterator[Slot]:
    before = signal.getsignal(signal.SIGINT)
    yield private_slot()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupts(slot: Slot) -> Interrupts:
    return Interrupts(slot)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_the_function_is_raised_when_it_begins(
    interrupts: Interrupts, slot: Slot
) -> None:
    interrupt()
    assert slot.read(0).interrupts == 1
    with pytest.raises(KeyboardInterrupt), interrupts:
        pytest.fail("the function has begun")
    with interrupts:
        pass  # once


def test_an_interrupt_after_the_function_is_only_counted(interrupts: Interrupts, slot: Slot) -> None:
    with interrupts:
        pass
    interrupt()
    assert slot.read(0).interrupts == 1


def test_an_interrupt_of_the_function_is_raised_where_it_is(interrupts: Interrupts) -> None:
    with interrupts, pytest.raises(KeyboardInterrupt):
        interrupt()

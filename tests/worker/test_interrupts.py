"""Signals in a worker: SIGINT, and SIGCHLD if it has a handler, raise only in the user's code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from nblaunch.wire.board import Slot, private_slot
from nblaunch.worker.process_control import ChildHandler, FunctionBounds, Interrupts


@pytest.fixture
def slot() -> Iterator[Slot]:
    before = signal.getsignal(signal.SIGINT)
    yield private_slot()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupts(slot: Slot) -> Interrupts:
    return Interrupts(slot, FunctionBounds(call.__code__, value_of.__code__))


def call(function: Callable[[], Any]) -> Any:
    return function()


def value_of(interrupts: Interrupts, function: Callable[[], Any], after: Callable[[], None]) -> Any:
    """Call a function like a worker, followed by a few lines of its own."""
    with interrupts:
        value = call(function)
        after()
    return value


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


def test_self_sent_interrupts_are_raised_in_place(interrupts: Interrupts) -> None:
    with interrupts, pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_right_after_the_function_keeps_the_value(interrupts: Interrupts, slot: Slot) -> None:
    assert value_of(interrupts, lambda: 7, after=interrupt) == 7
    assert slot.read(0).interrupts == 1


def test_an_interrupt_in_the_function_is_raised_there(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        value_of(interrupts, interrupt, after=lambda: None)


def test_an_interrupt_is_raised_in_a_function_without_frames(interrupts: Interrupts) -> None:
    """The first interrupt seems to come as such a function begins, and is raised a moment later."""
    timer = threading.Timer(0.05, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        value_of(interrupts, partial(time.sleep, 60), after=lambda: None)
    timer.join()


class Death(Exception):
    """An exception that the SIGCHLD handler raises."""


def on_child(signum: int, frame: object) -> None:
    raise Death


def end_child() -> None:
    os.kill(os.getpid(), signal.SIGCHLD)


@pytest.fixture
def child_handler() -> Iterator[ChildHandler]:
    """Return a ChildHandler in whose block a function has set a handler."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handler = ChildHandler()
    with handler:
        signal.signal(signal.SIGCHLD, on_child)
    yield handler
    signal.signal(signal.SIGCHLD, before)


def test_the_functions_handler_is_active_only_in_its_block(child_handler: ChildHandler) -> None:
    end_child()
    for _ in range(2):
        with child_handler, pytest.raises(Death):
            end_child()
        end_child()


def test_the_function_may_remove_its_handler(child_handler: ChildHandler) -> None:
    with child_handler:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with child_handler:
        end_child()


def test_child_death_at_function_end_is_raised_once(
    child_handler: ChildHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = signal.signal

    def late(number: int, handler: Any) -> Any:
        monkeypatch.undo()
        end_child()  # signal.signal also first runs the handler of an earlier signal
        return original(number, handler)

    with pytest.raises(Death), child_handler:
        monkeypatch.setattr(signal, "signal", late)
    end_child()
    with child_handler, pytest.raises(Death):
        end_child()

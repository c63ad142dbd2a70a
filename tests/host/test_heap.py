"""The heap is frozen during a fork, and then returned to the kernel's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from nblaunch.host import heap


@pytest.fixture(autouse=True)
def frozen_for_other_tests() -> Iterator[None]:
    yield
    gc.freeze()


@pytest.mark.parametrize("num_before", [0, 375])
def test_the_heap_is_unfrozen_again(num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 freezes 375 objects at its start; that does not mean that the user keeps the heap frozen."""
    gc.unfreeze()
    count = gc.get_freeze_count
    with monkeypatch.context() as patched:
        patched.setattr(gc, "get_freeze_count", lambda: num_before)
        with heap.frozen():
            assert count() > 2000
    assert count() == 0


def test_a_heap_that_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    with heap.frozen():
        pass
    assert gc.get_freeze_count() > 2000


def test_listing_a_frozen_heap_keeps_it_frozen() -> None:
    held = [object()]
    gc.freeze()
    assert any(one is held for one in heap.all_objects())
    assert gc.get_freeze_count() > 2000


def test_a_growing_heap_is_not_visited_until_the_thresholds_are_back() -> None:
    gc.unfreeze()
    collections: list[str] = []
    thresholds = gc.get_threshold()
    gc.callbacks.append(watch := lambda phase, info: collections.append(phase))
    try:
        with heap.growing():
            held = [[number] for number in range(10 * thresholds[0])]
            assert not collections
        held += [[number] for number in range(10 * thresholds[0])]
    finally:
        gc.callbacks.remove(watch)
    assert collections
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() > len(held) / 2


def test_thresholds_that_an_import_sets_are_kept() -> None:
    before = gc.get_threshold()
    try:
        with heap.growing():
            gc.set_threshold(5, 6, 7)
        assert gc.get_threshold() == (5, 6, 7)
    finally:
        gc.set_threshold(*before)

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

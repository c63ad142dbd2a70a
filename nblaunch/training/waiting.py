"""Wait for other ranks, in a :func:`barrier` or :func:`one_at_a_time`.

A rank that waits for others shows it on the progress board (:class:`Waiting`), so that a slow rank can be
distinguished from those that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nblaunch import context
from nblaunch.events import WorkerState
from nblaunch.training.joining import is_distributed
from nblaunch.wire.board import Slot


class Waiting:
    """Context manager: show on the board that this rank waits for others, then what it showed before."""

    __slots__ = ("_before", "_slot")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __enter__(self) -> None:
        self._before = self._slot.state
        self._slot.set_state(WorkerState.WAITING)

    def __exit__(self, *exc_info: object) -> None:
        self._slot.set_state(self._before)
        self._slot.note_progress()


def waiting() -> Waiting:
    """Return a :class:`Waiting` on the slot of this process."""
    return Waiting(context.current().slot)


def barrier(device: torch.device) -> None:
    """Wait until every rank has come here; return at once where there is no process group."""
    if not is_distributed():
        return
    with waiting():
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[device.index or 0])
        else:
            dist.barrier()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run the block in one process of this machine after the other, as to build a model that memory holds but once.

        with nblaunch.one_at_a_time():
            model = build_model().to(accelerator.device)

    Nothing in the block may wait for other ranks: they wait for its end. In processes that nblaunch did not launch it
    does nothing.
    """
    with context.current().locks.lock():
        yield

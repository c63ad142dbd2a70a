"""Reports a launch whose ranks repeat each other's training, because nothing divides the data among them.

A library's own ``fit`` uses the ranks of a launch only if it is asked to. Otherwise each rank trains a complete model
on all samples. This raises no error and takes as long as training in one process. The losses of such ranks are equal to
the last digit, and no process group connects the ranks.
"""

from __future__ import annotations

import sys
from typing import Any

from nblaunch import env
from nblaunch.context import ProcessContext
from nblaunch.user_code import innermost_user_frame

CHECK = "repeated_training"
"""Name of this check in ``NBLAUNCH_CHECKS``."""

_NUM_LOSSES = 10


class FirstLosses:
    """The first losses of this rank, which the launcher compares across ranks.

    Args:
        here: the context of this process.
    """

    def __init__(self, here: ProcessContext) -> None:
        is_off = here.topology.world_size == 1 or env.is_check_off(CHECK)
        self._losses: list[str] | None = None if is_off else []
        self._here = here

    def add(self, loss: Any) -> None:
        """Add the loss of a backward pass, a single-element tensor."""
        if self._losses is None:
            return
        if _has_group():
            self._losses = None
            return
        self._losses.append(float(loss).hex())
        if len(self._losses) < _NUM_LOSSES:
            return
        losses, self._losses = self._losses, None
        if len(set(losses)) > 1:
            self._report(losses)

    def _report(self, losses: list[str]) -> None:
        self._here.observe(
            CHECK,
            f"every rank repeats the same training: the first {len(losses)} losses are equal on all ranks, and no "
            "process group connects the ranks",
            "Divide the samples among the ranks, with accelerator.prepare(), DistributedDataParallel or an option of "
            "the library, such as strategy='ddp' of Lightning; or launch with num_processes=1",
            innermost_user_frame(),
            value=tuple(losses),
            judged_by="distinct",
        )


def _has_group() -> bool:
    """Return whether this process communicates with other ranks through torch."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and c10d.is_initialized() and c10d.get_world_size() > 1

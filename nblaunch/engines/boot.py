"""What a fresh interpreter needs before it can load the call: plain data, which needs none of the user's code."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nblaunch.wire.assignment import Assignment


@dataclass(frozen=True)
class Boot:
    """What a fresh interpreter needs to know before it can load the call.

    Args:
        assignments: one for a worker, all for a zygote.
        report_fd: a zygote's pipe to the kernel; -1 for a worker.
        has_shell: the kernel is an IPython shell, so ``display`` shall work here too.
        log_path: where a zygote's own output goes.
        random_states: the kernel's, so that a fresh worker draws the numbers that a forked one would. Pickled: numpy
            must not be imported before the number of threads is set.
    """

    assignments: tuple[Assignment, ...]
    report_fd: int
    has_shell: bool
    log_path: str
    random_states: bytes


def capture_random_states() -> dict[str, Any]:
    """The states of the generators that this process has loaded."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put back what :func:`capture_random_states` returned in another process."""
    random.setstate(states["random"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))

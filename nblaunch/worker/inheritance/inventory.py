"""The inventory of inherited state: each kind of thing that a kernel may hold, and what a worker gets of it.

A forked worker starts with a copy of the kernel's memory and descriptors, but not of its threads. A worker of a
forkserver or of spawn starts from a fresh interpreter, which has what the launch sends: the call, and the state that
``start_methods/saved_call.py`` captures. Every row has a contract test of the same name for each start method in
``tests/contracts/inheritance/``; ``docs/how-a-launch-works.md`` shows the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Treatment(Enum):
    """What a worker gets of a kind of state."""

    KEPT = "kept"
    """As in the kernel."""
    RENEWED = "renewed"
    """Made anew for this worker, and works."""
    DROPPED = "dropped"
    """Belongs to the kernel alone; the worker starts without it."""
    REFUSED = "refused"
    """An error, before the function starts or at the first use, says why and what to do."""
    NOTED = "noted"
    """Not there or not usable; one line says so."""


@dataclass(frozen=True)
class Way:
    """How one start method treats a kind of state.

    Args:
        treatment: the outcome in one word.
        text: the outcome in one sentence, without a full stop.
    """

    treatment: Treatment
    text: str


@dataclass(frozen=True)
class Kind:
    """One kind of state that a kernel may hold when it launches.

    Args:
        name: unique; contract tests and documentation refer to it.
        fork: what a forked worker gets.
        fresh: what a worker of a forkserver or of spawn gets.
    """

    name: str
    fork: Way
    fresh: Way


KINDS: tuple[Kind, ...] = (
    Kind(
        "exit handlers",
        fork=Way(
            Treatment.DROPPED, "`atexit` and `weakref.finalize` calls of the kernel run in the kernel alone"
        ),
        fresh=Way(Treatment.DROPPED, "a fresh interpreter has none of the kernel's"),
    ),
    Kind(
        "environment variables",
        fork=Way(Treatment.KEPT, "the kernel's, with the worker's rank and sizes added"),
        fresh=Way(Treatment.KEPT, "the kernel's, with the worker's rank and sizes added"),
    ),
    Kind(
        "random generators",
        fork=Way(
            Treatment.KEPT,
            "`random`, NumPy's global generator and torch's on the CPU have the kernel's states, alike on all ranks "
            "and in each attempt; then the kernel's move on, so that the next launch draws other numbers. A generator "
            "that is an object (`numpy.random.default_rng()`, `torch.Generator`) is copied: the next launch replays it",
        ),
        fresh=Way(Treatment.KEPT, "the same"),
    ),
)
"""Ordered by what users meet first."""

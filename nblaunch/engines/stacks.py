"""A query for the stacks of ranks on several nodes."""

from __future__ import annotations

import time
from dataclasses import replace

from nblaunch.diagnosis.hang import Check
from nblaunch.diagnosis.stacks import described_here
from nblaunch.engines.link import NodeLink
from nblaunch.engines.messages import Stacks

_STACKS_S = 4.0
"""Time for nodes to collect their ranks' stacks, slightly longer than they need at most."""


class NodesStacks:
    """A query for stacks to several nodes. Implements ``launcher.hang_watch.StackQuery``.

    Args:
        number: number of the query.
        asked: the nodes; each is removed when it answers.
    """

    def __init__(self, number: int, asked: set[NodeLink]) -> None:
        self._number = number
        self._missing = asked
        self._checks: dict[int, Check] = {}
        self._until_s = time.monotonic() + _STACKS_S

    @property
    def is_done(self) -> bool:
        """Whether all nodes have answered or ended, or their time has run out."""
        return self.is_complete or time.monotonic() > self._until_s

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have answered or ended."""
        return all(link.is_over for link in self._missing)

    def poll(self) -> None:
        """Do nothing: replies arrive through :meth:`take`."""

    def take(self, stacks: Stacks, link: NodeLink) -> None:
        """Store a reply if it belongs to this query."""
        if stacks.number == self._number:
            for rank, check in stacks.checks.items():
                self._checks[rank] = replace(check, position=described_here(check.position))
            self._missing.discard(link)

    def checks(self) -> dict[int, Check]:
        """Return each rank's position and processor time."""
        return dict(sorted(self._checks.items()))

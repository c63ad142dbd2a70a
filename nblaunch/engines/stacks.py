"""Nodes that have been asked where their ranks are."""

from __future__ import annotations

import time
from dataclasses import replace

from nblaunch.diagnosis.hang import Check
from nblaunch.diagnosis.stacks import described_here
from nblaunch.engines.link import NodeLink
from nblaunch.engines.messages import Stacks

_STACKS_S = 4.0
"""How long nodes have to find out where their ranks are: a little more than they take at most."""


class NodesStacks:
    """One question for stacks to several nodes. Implements ``launcher.hang_watch.StackQuery``.

    Args:
        number: of the question.
        asked: the nodes, which are taken out as they answer.
    """

    def __init__(self, number: int, asked: set[NodeLink]) -> None:
        self._number = number
        self._missing = asked
        self._checks: dict[int, Check] = {}
        self._until_s = time.monotonic() + _STACKS_S

    @property
    def is_done(self) -> bool:
        """Whether all nodes have answered, are over, or have had time enough."""
        waiting = [link for link in self._missing if not link.is_over]
        return not waiting or time.monotonic() > self._until_s

    def poll(self) -> None:
        """Do nothing: answers arrive by :meth:`take`."""

    def take(self, stacks: Stacks, link: NodeLink) -> None:
        """Take an answer, if it is one to this question."""
        if stacks.number == self._number:
            for rank, check in stacks.checks.items():
                self._checks[rank] = replace(check, position=described_here(check.position))
            self._missing.discard(link)

    def checks(self) -> dict[int, Check]:
        """Return rank -> its position, and its processor time."""
        return dict(sorted(self._checks.items()))

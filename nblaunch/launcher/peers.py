"""Peers: the other nodes of a job, as the launcher of one node needs them. ``nodes/link.py`` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.topology import Topology
from nblaunch.wire.board import Slot, SlotReading
from nblaunch.wire.stop_agreement import Agreement


class Peers(Protocol):
    """The other nodes of a job, while workers run."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when something has arrived from them."""

    def receive(self) -> None:
        """Handle what has arrived."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will arrive."""

    @property
    def must_stop(self) -> bool:
        """Whether the workers of this node have to end, because of other nodes."""

    def agreement(self, slots: Mapping[int, Slot]) -> Agreement:
        """Start an agreement with them on the step at which all ranks leave their loops."""

    def exchange(
        self, readings: Sequence[SlotReading], report: AttemptReport, running: Mapping[int, Slot]
    ) -> list[SlotReading]:
        """Send them the state of this node's ranks; return readings of all ranks, and add failures to the report."""

    def send_port(self, port: int) -> None:
        """Send them the port of the workers' store, which this node hosts."""

    def worker_settings(self, topology: Topology, restart_count: int) -> dict[str, str | None]:
        """Return the environment of this node's workers beyond that of their topology."""

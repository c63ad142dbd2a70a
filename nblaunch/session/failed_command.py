"""A command of a session that has failed, kept for the debugger until the session's next one."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch import formatting
from nblaunch.launcher.debug_client import DebugClient
from nblaunch.launcher.post_mortem import KeptFailure
from nblaunch.session.client import SessionClient


class FailedCommand(KeptFailure):
    """The frames of the ranks on which a command has raised, those that were interrupted among them.

    Args:
        client: of the session.
        failed_rank: with the root cause.
        ranks: that have raised.
    """

    def __init__(self, client: SessionClient, failed_rank: int, ranks: Sequence[int]) -> None:
        super().__init__(client.debugger, failed_rank)
        self._client = client
        self._ranks = ranks

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """As of any failure; pdb opens on ranks that have raised."""
        found = super().find_debugger(rank)
        if found[1] not in self._ranks:
            raise ValueError(
                f"rank {rank} has ended the command; it failed on {formatting.ranks(self._ranks)}. "
                "session.inspect('name') shows variables of every rank"
            )
        return found

    def _release(self) -> None:
        self._client.forget(self._ranks)

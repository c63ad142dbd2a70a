"""The release of ranks that are still busy after a command's first failure or interrupt.

after 0.1 s, or 0.5 s without an interrupt
         the ranks that have ended the command leave their groups: collectives that wait for them fail
1 s later, again and again, at growing intervals
         all ranks: those that are stuck in native code disconnect their own groups (``interrupts.py``)
after 5 s
         a note says where the busy ranks are, and what a second interrupt does
after 5 minutes without progress
         all ranks are killed, which ends the session
"""

from __future__ import annotations

import time
from collections.abc import Set
from concurrent.futures import Future

from nblaunch import formatting
from nblaunch.launcher.requests import JobRequests
from nblaunch.session.output import CommandReport

_PATIENCE_S = 0.5
"""Time from the first failure until the client releases running ranks that may be waiting for failed ranks."""

_INTERRUPTED_PATIENCE_S = 0.1
"""Like ``_PATIENCE_S``, but after an interrupt."""

_STUCK_S = 1.0
_MAX_PAUSE_S = 16.0
_NOTE_S = 5.0
_LIMIT_S = 300.0


class Release:
    """The release of one command's busy ranks, from its first failure or interrupt.

    Args:
        report: facts about the command.
        requests: requests to the session's job.
        is_interrupted: whether the command was interrupted; False = a rank has failed.

    Attributes:
        leaving: ranks that were asked to leave their groups.
        killed: why the ranks were killed; empty while they were not.
    """

    def __init__(self, report: CommandReport, requests: JobRequests, *, is_interrupted: bool) -> None:
        self._report = report
        first = next(iter(report.failed.values()), None)
        self._cause = "the interrupt"
        if first is not None and not is_interrupted:
            self._cause = f"rank {first.rank} raised {first.info.type_name}"
        self._requests = requests
        self._began_s = self._progressed_s = time.monotonic()
        self._pause_s = self._next_s = _STUCK_S
        self._progress: object = None
        self._stacks: Future[str] | None = None
        self._is_noted = False
        self.leaving: set[int] = set()
        self.killed = ""

    def is_due(self, *, is_interrupted: bool) -> bool:
        """Return whether busy ranks have had enough time to end by themselves."""
        return self._elapsed_s() > (_INTERRUPTED_PATIENCE_S if is_interrupted else _PATIENCE_S)

    def take_leaving(self, ranks: Set[int]) -> set[int]:
        """Return which of the session's ``ranks`` to ask now to leave their groups.

        Ranks that have ended the command are asked at once. All ranks are asked again at growing intervals, because
        a busy rank may begin to wait later.
        """
        chosen = set(ranks - self._report.busy - self.leaving)
        if self._elapsed_s() > self._next_s and len(ranks) > 1:  # a single rank waits for no other
            self._next_s = self._elapsed_s() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            chosen = set(ranks)
        self.leaving |= chosen
        return chosen

    def take_note(self, *, is_interrupted: bool) -> str:
        """Return a note about ranks that do not end, once; otherwise no text."""
        if self._is_noted or self._elapsed_s() < _NOTE_S:
            return ""
        if self._stacks is None:
            self._stacks = self._requests.ask_stacks()
        if not self._stacks.done():
            return ""
        self._is_noted = True
        how = "A second interrupt kills" if is_interrupted else "Two interrupts kill"
        lines = [f"{self._what()} {_NOTE_S:g} s after {self._cause}:"]
        lines += [f"    {line}" for line in self._stacks.result().splitlines()]
        lines += [
            f"{how} all ranks, which ends the session: the ranks' variables are lost. Without progress, this happens "
            f"after {_LIMIT_S:g} s."
        ]
        return "\n".join(lines)

    def kill_late(self, progress: object) -> None:
        """Kill all ranks if they have made no progress for too long.

        Args:
            progress: counters of the ranks; progress changes one of them.
        """
        if progress != self._progress:
            self._progress, self._progressed_s = progress, time.monotonic()
        if not self.killed and time.monotonic() - self._progressed_s > _LIMIT_S:
            self.killed = (
                f"{self._what()} within {_LIMIT_S:g} s after {self._cause}, so all ranks were killed"
            )
            self._requests.cancel()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _what(self) -> str:
        return f"{formatting.ranks(sorted(self._report.busy))} did not end the command"

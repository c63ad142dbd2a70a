"""Commands to all or some ranks of a session."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from nblaunch import formatting
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames, hides_launcher
from nblaunch.launcher.debug_client import RankValues
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.session.client import SessionClient, saved_values
from nblaunch.session.output import CommandReport
from nblaunch.wire.assignment import restore_sources
from nblaunch.wire.worker_commands import Execute, SessionCommand, SetVariables

_numbers = itertools.count(1)
"""The numbers given to the commands of all sessions. A traceback uses a command's number to look up its lines."""


class CommandedSession(Protocol):
    """The parts of a :class:`Session` that commands use."""

    _client: SessionClient

    def _execute(self, command: Execute, ranks: Sequence[int] | None) -> dict[int, Any]: ...

    def _request(
        self, ranks: Sequence[int], command: SessionCommand, files: Sequence[int] = ()
    ) -> CommandReport: ...

    def _outcome(self, report: CommandReport) -> JobOutcome: ...


class RankCommands(ABC):
    """Commands to ranks of a session: a :class:`Session` sends them to all ranks, :meth:`Session.ranks` to some."""

    @abstractmethod
    def _target(self) -> tuple[CommandedSession, Sequence[int]]:
        """Return the session and the ranks that receive commands."""

    def execute(self, code: str) -> RankValues:
        """Run ``code`` on the ranks like a cell, with top-level ``await``, ``%`` magics and ``!`` commands.

        Their output appears in the running cell, labelled with the rank. ``torch.distributed`` is initialised before
        the first code that names torch, or before the first command after torch was imported.

        Args:
            code: Python.

        Returns:
            rank -> the value of the last expression, or None. Tensors arrive on the CPU, and an
            :class:`nblaunch.wire.pickling.pickle_errors.Unpicklable` replaces values that can't be pickled.

        Raises:
            KeyboardInterrupt: the command was interrupted. The ranks' variables are kept.
            WorkerDied: a rank has ended, which ends the session.
            BaseException: the exception of the first rank that failed, with its original type.
        """
        __tracebackhide__ = True
        session, ranks = self._target()
        with HiddenLauncherFrames(), session._client.command():
            filename = f"<session command {next(_numbers)}>"
            restore_sources({filename: code})
            return RankValues(session._execute(Execute(code=code, filename=filename), ranks))

    def put(self, **values: Any) -> None:
        """Set variables on the ranks: ``session.put(lr=0.1)``.

        Args:
            **values: name -> value. Values are pickled; the ranks share tensors until one writes to them.

        Raises:
            PayloadError: a value can't be pickled.
        """
        __tracebackhide__ = True
        session, ranks = self._target()
        with HiddenLauncherFrames(), session._client.command():
            with saved_values(values) as fd:
                report = session._request(ranks, SetVariables(), [fd])
            session._outcome(report).with_traceback().raise_error()

    @hides_launcher
    def __getitem__(self, name: str) -> RankValues:
        """Return the value of a variable on each rank.

        Raises:
            NameError: a rank has no such variable.
        """
        __tracebackhide__ = True
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a variable; use execute() for expressions")
        return self.execute(name)


class SomeRanks(RankCommands):
    """Some ranks of a session."""

    def __init__(self, session: CommandedSession, ranks: Sequence[int]) -> None:
        self._session = session
        self._ranks = ranks

    def _target(self) -> tuple[CommandedSession, Sequence[int]]:
        return self._session, self._ranks

    def __repr__(self) -> str:
        return f"<{formatting.ranks(self._ranks)} of {self._session!r}>"

"""A session's client: sends commands and variables to the ranks, waits for them to finish, and handles failures.
:class:`RankCommands` are the commands that users call.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from nblaunch import debugging, formatting
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames, hides_launcher
from nblaunch.errors import JobCancelled, LaunchError, PayloadError
from nblaunch.events import Note
from nblaunch.host import signal_handlers
from nblaunch.launcher.debug_client import DebugClient, KeptFailure, RankValues
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.requests import interrupts_as_requests
from nblaunch.launcher.runner import JobRunner
from nblaunch.session.output import BUSY, CommandReport, SessionOutput
from nblaunch.session.release import Release
from nblaunch.wire.assignment import restore_sources
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.exceptions import set_attribute
from nblaunch.wire.pickling import payload, pickle_errors
from nblaunch.wire.stop_agreement import BOUNDARY_S, StopAgreement, on_boundary
from nblaunch.wire.worker_commands import (
    Close,
    Execute,
    LeaveGroup,
    RunFunction,
    SessionCommand,
    SetVariables,
)

_TICK_S = 0.1
_BOUNDARY_TICK_S = 0.01
"""Seconds between checks while ranks are agreeing on a last optimizer step. The ranks reply through shared memory,
which does not wake the client.
"""

_NAMES_TORCH = re.compile(r"\b(?:torch|Accelerator)\b")

ENDED = "the session has ended, and the variables of its ranks are lost; session.restart() starts new ranks"


class SessionClient:
    """The kernel's side of the connections to the ranks. It sends one command at a time.

    Attributes:
        busy_since_s: when the command was sent, according to ``monotonic()``.
        num_interrupts: how many times the current or last command was interrupted.
        debugger: client of the debugger in the ranks.
    """

    def __init__(self, runner: JobRunner, output: SessionOutput) -> None:
        self._runner = runner
        assert runner.debugger is not None, "a session has a debugger"
        self.debugger = runner.debugger
        self._connections = dict(self.debugger.connections)
        self._output = output
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._group = 1
        self._has_torch = False
        self._boundary: StopAgreement | None = None
        """Agreement on an optimizer step; an interrupt is raised on all ranks just before that step."""
        self._boundary_until_s = 0.0
        self._killed = ""
        """Why the ranks were killed, if the client has killed them without a second interrupt."""
        self.busy_since_s = 0.0
        self.num_interrupts = 0

    @property
    def busy(self) -> set[int]:
        """The ranks that execute the current command."""
        return self._output.command.busy

    @contextmanager
    def command(self) -> Iterator[None]:
        """Run a block that sends one command and handles its results.

        While the block is running, an interrupt is counted and passed on to busy ranks instead of being raised at a
        random line of code in this process. Handlers for other signals are delayed.

        Raises:
            RuntimeError: another thread's command is running.
            KeyboardInterrupt: the block was interrupted and raised nothing else.
        """
        with signal_handlers.held_back():
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(BUSY)
            try:
                self.num_interrupts = 0  # reset before counting begins
                with interrupts_as_requests(self.interrupt):
                    yield
                if self.num_interrupts:  # the command has finished, but the rest of the cell must not run
                    raise KeyboardInterrupt
            finally:
                command, self._output.command = self._output.command, CommandReport()
                command.close()
                self._lock.release()

    def request(
        self, ranks: Sequence[int], command: SessionCommand, files: Sequence[int] = ()
    ) -> CommandReport:
        """Send the command of a :meth:`command` block to ranks, and wait until all have finished it.

        Args:
            files: descriptors of files that each rank receives.

        Returns:
            The report; its outboxes stay open until the end of the block.

        Raises:
            LaunchError: the session had already ended.
            KeyboardInterrupt: the block had already been interrupted.
            WorkerDied: a rank has ended.
        """
        self.raise_if_ended()
        if self.num_interrupts:
            raise KeyboardInterrupt
        reaches_all = len(ranks) == len(self._connections)
        is_joint = False
        if isinstance(command, (Execute, RunFunction)):
            reads_variable = isinstance(command, Execute) and command.is_name
            is_joint = (reaches_all or len(ranks) > 1) and not reads_variable
            needs_group = reaches_all and not reads_variable and self._uses_torch(command)
            command = replace(
                command,
                group=self._group if needs_group else 0,
                has_breakpoints=debugging.takes_breakpoints(False),
            )
            self.debugger.forget_stops()
        self._runner.keep_weights(False)
        self._boundary = None
        with suppress(ValueError):  # the workers have ended
            for slot in self._runner.slots.values():
                slot.boundaries.clear_proposal()
        report = self._send_all(ranks, command, files)
        self._wait_for_end(report, is_joint)
        if isinstance(command, (Execute, RunFunction)):
            self._pump_all()  # events arrive before the ranks' output
        return report

    def _send_all(self, ranks: Sequence[int], command: SessionCommand, files: Sequence[int]) -> CommandReport:
        report = CommandReport(number=next(self._numbers))
        self.busy_since_s = time.monotonic()
        self._output.command = report  # closed at the end of the block
        report.open_outboxes(ranks)
        command = replace(command, number=report.number)
        try:
            for rank in ranks:
                self._connections[rank].send(command, [*files, report.outboxes[rank]])
        except OSError:
            self.raise_end()
        return report

    def interrupt(self) -> None:
        """Interrupt busy ranks; a second call kills all ranks. Does nothing if no command is running.

        If all ranks have finished the command, the interrupt is only counted. Safe in signal handlers and in any
        thread.
        """
        if not self._lock.locked():
            return
        self.num_interrupts += 1
        if self.num_interrupts > 1 and self.busy:
            self._runner.requests.cancel()
        self._runner.keep_weights(True)
        if self.num_interrupts == 1 and not self.debugger.prompts:
            self._propose_boundary()
        if self._boundary is None:
            self._signal(self.busy)

    def _propose_boundary(self) -> None:
        """Propose a last optimizer step to the busy ranks, if all of them are training."""
        if not self.busy <= self._output.command.begun:
            return  # a rank may be running an earlier command with other steps
        now_s = time.monotonic()
        with suppress(ValueError, KeyError):  # the workers have ended
            self._boundary = on_boundary({rank: self._runner.slots[rank] for rank in self.busy}, now_s)
            self._boundary_until_s = now_s + BOUNDARY_S

    def close(self) -> None:
        """Let the workers exit, and close the connections; busy workers are killed."""
        if self.busy:
            self._runner.requests.cancel()  # the supervising thread closes the connections
            return
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(Close())
        self._connections = {}
        self.debugger.close()  # otherwise its descriptors would stay open until garbage collection

    def raise_if_ended(self) -> None:
        """Raise an error with the reason if the workers have ended.

        Raises:
            LaunchError: the session was closed, or the error that ended it has already been raised.
            WorkerDied: a rank has ended.
        """
        __tracebackhide__ = True
        if self._runner.is_running:
            return
        if self._connections:
            self.raise_end()
        raise LaunchError(ENDED)

    def raise_end(self) -> None:
        """Show how the workers ended, and raise an error with the reason."""
        __tracebackhide__ = True
        self._runner.wait()
        self._output.show_end()
        self.close()
        outcome = self._runner.outcome
        if outcome is not None and outcome.status == "cancelled":
            killed = self._killed or "the ranks were killed by a second interrupt or close()"
            raise JobCancelled(f"{killed}; {ENDED}")
        if outcome is not None and outcome.error is not None:
            set_attribute(outcome.error, "__notes__", [*getattr(outcome.error, "__notes__", ()), ENDED])
            outcome.raise_error()
        raise LaunchError(ENDED)

    def _uses_torch(self, command: Execute | RunFunction) -> bool:
        """Return whether a command names torch or torch is imported; ranks that use torch may wait for each other."""
        code = command.code if isinstance(command, Execute) else ""
        return self._has_torch or "torch" in sys.modules or _NAMES_TORCH.search(code) is not None

    def _wait_for_end(self, report: CommandReport, is_joint: bool) -> None:
        """Wait until no rank is busy; release ranks that are waiting for a failed rank.

        Args:
            is_joint: whether ranks may get stuck in their group if one of them fails.

        Raises:
            WorkerDied: a rank has ended without a result.
        """
        release: Release | None = None
        # The death of a rank ends the session.
        while (report.busy or self._output.ended) and self._runner.is_running:
            self._output.wait(_BOUNDARY_TICK_S if self._awaits_boundary() else _TICK_S)
            self._do_between_waits()
            is_interrupted = self.num_interrupts > 0
            if release is None and (is_interrupted or report.failed):
                release = Release(report, self._runner.requests, is_interrupted=is_interrupted)
            if release is not None and report.busy and not self._awaits_boundary():
                self._free_waiting(release, is_interrupted=is_interrupted)
        self._killed = release.killed if release is not None else ""
        self._has_torch |= report.has_torch
        if report.unfinished or self._was_stopped(report):
            self.raise_end()
        # If no rank has failed, each has handled the interrupt and returned.
        report.interrupted = self.num_interrupts > 0 and bool(report.failed)
        has_failed = (release and release.leaving) or self.num_interrupts or (is_joint and report.failed)
        if has_failed and len(self._connections) > 1:
            self._group += 1  # ranks may be stuck in this group, so the next command forms another

    def _was_stopped(self, report: CommandReport) -> bool:
        """Return whether the launcher, not the user, interrupted ranks because another rank had died."""
        raised = {failed.info.type_name for failed in report.failed.values()}
        return bool(self._output.ended) and not self.num_interrupts and KeyboardInterrupt.__name__ in raised

    def _do_between_waits(self) -> None:
        """Show output, answer the debugger's prompts, and interrupt again."""
        self._output.pump()
        signal_handlers.run_arrived()  # an exception in the user's handler ends the command here
        if self.debugger.prompts and not self.num_interrupts:
            self._pump_all()
            debugging.answer_prompt(self.debugger, self.interrupt)
        if self.num_interrupts and not self._awaits_boundary():
            self._signal(self.busy)  # again, because an interrupt has no effect on a rank that has not begun

    def _pump_all(self) -> None:
        """Show everything that the ranks have written so far."""
        self._runner.requests.ask_logs().result()
        self._output.pump()

    def _awaits_boundary(self) -> bool:
        """Poll the agreement on a last optimizer step; return whether ranks may still reach that step on their own."""
        boundary = self._boundary
        if boundary is None:
            return False
        now_s = time.monotonic()
        with suppress(ValueError):  # the workers have ended
            if now_s < self._boundary_until_s:
                boundary.poll(self.busy, now_s)
                return True
            boundary.withdraw()
        self._boundary = None
        return False

    def _free_waiting(self, release: Release, *, is_interrupted: bool) -> None:
        """Interrupt the busy ranks, and ask ranks to leave their groups; kill all ranks if that does not help."""
        if not release.is_due(is_interrupted=is_interrupted):
            return
        self._signal(self.busy)
        for rank in release.take_leaving(self._connections.keys()):
            with suppress(OSError, KeyError):  # a command that is waiting for the rank reports its end
                self._connections[rank].send(LeaveGroup())
        if note := release.take_note(is_interrupted=is_interrupted):
            self._output.on_event(Note.of_job(note))
        release.kill_late(self._output.progress())

    def _signal(self, ranks: Iterable[int]) -> None:
        pids = self._runner.pids
        for rank in list(ranks):
            with suppress(ProcessLookupError, KeyError):
                os.kill(pids[rank], signal.SIGINT)


class FailedCommand(KeptFailure):
    """The frames of ranks whose command raised an exception or was interrupted.

    Args:
        failed_rank: rank with the root cause.
        ranks: ranks that raised an exception.
    """

    def __init__(self, debugger: DebugClient, failed_rank: int, ranks: Sequence[int]) -> None:
        super().__init__(debugger, failed_rank)
        self._ranks = ranks

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client and the rank to debug; pdb opens only on ranks that raised an exception."""
        debugger = super().find_debugger(rank)
        if debugger[1] not in self._ranks:
            raise ValueError(
                f"rank {rank} completed the command; it failed on {formatting.ranks(self._ranks)}. "
                "session.inspect('name') shows a variable on every rank"
            )
        return debugger

    def _release(self) -> None:
        """Do nothing: each rank releases its frames when its next command begins."""


@contextmanager
def saved_values(values: Mapping[str, Any]) -> Iterator[int]:
    """Yield the descriptor of a memory file that contains ``values``, pickled once for all ranks.

    Raises:
        PayloadError: a value can't be pickled.
    """
    fd = create_memory_file("nblaunch-values")
    try:
        try:
            payload.dump(values, fd)
        except Exception as error:
            parts = [
                part
                for name, value in values.items()
                for part in pickle_errors.unpicklable_parts(value, name)
            ]
            named = "; ".join(map(str, parts)) or f"{error}"
            raise PayloadError(f"put() can't pickle these values: {named}") from error
        yield fd
    finally:
        os.close(fd)


# --- commands to all or some ranks ------------------------------------------------------------------------------------

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

        Each rank's output appears in the running cell, labelled with the rank. ``torch.distributed`` is initialised
        before the first command that names torch, or before the first one after torch was imported.

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

"""The client of a session: sends a command to the ranks, waits for their replies, and handles failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait

from nblaunch import debugging
from nblaunch.errors import LaunchError
from nblaunch.launcher.requests import interrupts_as_requests
from nblaunch.launcher.runner import JobRunner
from nblaunch.session.output import SessionOutput
from nblaunch.wire.exceptions import set_attribute
from nblaunch.wire.messages import (
    Close,
    DropFrames,
    Execute,
    LeaveGroup,
    ReceivedReply,
    RunFunction,
    SessionCommand,
    receive_reply,
)

_TICK_S = 0.1
_PATIENCE_S = 0.5
"""From the first failure until ranks that still run are freed: they may wait for those that do not."""

_INTERRUPTED_PATIENCE_S = 0.1
"""The same from an interrupt on."""

_ENDED = "the session has ended, and what its ranks had is gone; session.restart() starts new ones"


Replies = dict[int, ReceivedReply]
"""rank -> its reply."""


class SessionClient:
    """The kernel's side of the connections with the ranks. It sends one command at a time.

    Args:
        runner: of the job whose workers the ranks are.
        output: shows what ranks print while a command runs.

    Attributes:
        busy: ranks that have not answered the present command.
        busy_since_s: when it was sent, by ``monotonic()``.
        num_interrupts: interrupts of the present or last command.
        channel: to the debugger in the ranks.
        names: of variables that commands have set on the first rank.
    """

    def __init__(self, runner: JobRunner, output: SessionOutput) -> None:
        self._runner = runner
        self._connections = dict(runner.connections)
        assert runner.debug_channel is not None, "a session has a debugger"
        self.channel = runner.debug_channel
        self._output = output
        self._lock = threading.Lock()
        self._group = 1
        self.busy: set[int] = set()
        self.busy_since_s = 0.0
        self.num_interrupts = 0
        self.names: set[str] = set()

    def request(self, ranks: Sequence[int], command: SessionCommand, files: Sequence[int] = ()) -> Replies:
        """Send a command to ranks, and wait for their replies.

        Args:
            ranks: which.
            command: what to do.
            files: descriptors of files that each of them gets.

        Raises:
            LaunchError: the session has ended before.
            RuntimeError: another thread's command runs.
            WorkerDied: a rank has ended.
        """
        if not self._runner.is_running:
            raise LaunchError(_ENDED)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "the session is running another command; wait for it, or call session.interrupt()"
            )
        try:
            self.num_interrupts = 0
            with interrupts_as_requests(self.interrupt):
                return self._request(ranks, command, files)
        finally:
            self.busy = set()
            self._lock.release()

    def forget(self, ranks: Iterable[int]) -> None:
        """Let ranks give up the frames of a command that has failed, if no other command runs."""
        if not self._runner.is_running or not self._lock.acquire(blocking=False):
            return
        try:
            for rank in ranks:
                with suppress(OSError, EOFError, KeyError):
                    self._connections[rank].send(DropFrames())
                    receive_reply(self._connections[rank])
        finally:
            self._lock.release()

    def interrupt(self) -> None:
        """Interrupt the ranks that are busy; the second time kill all. Safe in signal handlers and any thread."""
        self.num_interrupts += 1
        if self.num_interrupts > 1:
            self._runner.requests.cancel()
        self._signal(self.busy)

    def close(self) -> None:
        """Let the workers end, and close the connections; workers that are busy are killed."""
        if self.busy:
            self._runner.requests.cancel()
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(Close())
        self._connections = {}

    def raise_end(self) -> None:
        """Raise why the workers have ended."""
        __tracebackhide__ = True
        self._runner.wait()
        self.close()
        outcome = self._runner.outcome
        if outcome is not None and outcome.error is not None:
            set_attribute(outcome.error, "__notes__", [*getattr(outcome.error, "__notes__", ()), _ENDED])
            outcome.raise_error()
        raise LaunchError(_ENDED)

    def _request(self, ranks: Sequence[int], command: SessionCommand, files: Sequence[int]) -> Replies:
        if isinstance(command, (Execute, RunFunction)):
            group = self._group if len(ranks) == len(self._connections) else 0
            command = replace(command, group=group, has_breakpoints=debugging.has_breakpoints(False))
            self.channel.forget_stops()
        self.busy, self.busy_since_s = set(ranks), time.monotonic()
        for rank in ranks:
            self._send(rank, command, files)
        replies = self._collect()
        if any(received.reply.has_output for received in replies.values()):
            self._runner.requests.ask_logs().result()
        if len(ranks) > 1 and failed_ranks(replies):
            self._group += 1  # the ranks may be at odds in the present one
        return replies

    def _collect(self) -> Replies:
        """Wait until no rank is busy, nor leaving the group; free ranks that wait for one that has failed.

        A rank is busy, then done; where another has failed, those that are done leave the group, and reply again.
        """
        replies: Replies = {}
        done: set[int] = set()
        leaving: set[int] = set()
        failed_since_s: float | None = None
        while self.busy or leaving:
            for rank in self._wait([*self.busy, *leaving]):
                received = self._receive(rank)
                if rank in leaving:
                    leaving.remove(rank)
                    continue
                replies[rank] = received
                self.names.update(received.reply.new_names)
                self.busy.remove(rank)
                done.add(rank)
            self._serve()
            if failed_since_s is None and (self.num_interrupts or failed_ranks(replies)):
                failed_since_s = time.monotonic()
            if (self.busy or leaving) and self._is_over(failed_since_s):
                self._interrupt_waiting(done)
                leaving |= done
                done.clear()
        return {rank: replies[rank] for rank in sorted(replies)}

    def _wait(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks that have replied, after a tick at the latest; a prompt ends the wait, too."""
        prompting = [self.channel.connections[rank].fileno() for rank in self.busy - self.channel.gone]
        descriptors = {rank: self._connections[rank].fileno() for rank in ranks}
        ready = wait([*descriptors.values(), *prompting], _TICK_S)
        return [rank for rank, descriptor in descriptors.items() if descriptor in ready]

    def _serve(self) -> None:
        """Show output, answer prompts of the debugger, and interrupt again; raise the end of the workers."""
        if not self._runner.is_running:
            self.raise_end()  # a process that a rank has left behind may keep its connection open
        self._output.pump()
        self.channel.receive_available()
        if self.channel.prompts and not self.num_interrupts:
            debugging.answer_prompt(self.channel, self.interrupt)
        if self.num_interrupts:
            self._signal(self.busy)  # again: one that arrives before a rank has begun has no effect

    def _is_over(self, failed_since_s: float | None) -> bool:
        """Return whether ranks that still run had the time to end by themselves since the first failure."""
        patience_s = _INTERRUPTED_PATIENCE_S if self.num_interrupts else _PATIENCE_S
        return failed_since_s is not None and time.monotonic() - failed_since_s > patience_s

    def _interrupt_waiting(self, done: Collection[int]) -> None:
        """Interrupt the busy ranks, and let those that are done leave the group.

        Ranks in a collective return once those that they wait for have left it. A rank that was interrupted inside of
        a collective leaves only when this has ended, too: so nothing waits here for the replies.
        """
        self._group += bool(done)  # also where no rank fails by it
        self._signal(self.busy)
        for rank in done:
            self._send(rank, LeaveGroup())

    def _send(self, rank: int, command: SessionCommand, files: Sequence[int] = ()) -> None:
        try:
            self._connections[rank].send(command, files)
        except OSError:
            self.raise_end()

    def _receive(self, rank: int) -> ReceivedReply:
        try:
            return receive_reply(self._connections[rank])
        except (EOFError, OSError):
            self.raise_end()
            raise

    def _signal(self, ranks: Iterable[int]) -> None:
        pids = self._runner.pids
        for rank in list(ranks):
            with suppress(ProcessLookupError, KeyError):
                os.kill(pids[rank], signal.SIGINT)


def failed_ranks(replies: Replies) -> list[int]:
    """Return the ranks whose command has raised."""
    return [rank for rank, received in replies.items() if received.reply.failed is not None]

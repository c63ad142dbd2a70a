"""The debugger's client, in the kernel: sends commands and lines to the workers, receives replies and prompts.

supervisor's loop ─┐                       ┌──> replies: (rank, number) -> ReceivedReply
callers that wait ─┴─> receive_available() ┴──> prompts: rank -> Prompted

A :class:`RankValues` shows values from several ranks, and a :class:`Comparison` shows a function's variables. A
:class:`KeptFailure` holds the workers that are kept after a failure.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from nblaunch import formatting
from nblaunch.diagnosis.exceptions import rebuild
from nblaunch.user_code import cell_name
from nblaunch.wire.worker_commands import (
    PDB_PROMPT,
    CommandConnection,
    Debug,
    DebugCommand,
    FrameVariables,
    Inspect,
    Line,
    Prompted,
    ReadVariables,
    ReceivedReply,
    Release,
    Reply,
    Resumed,
)

_POLL_S = 0.05
_PATIENCE_S = 1.0
"""Time to wait for a rank's next prompt; other ranks are then prompted, because the rank may be waiting for them."""

_RESUMING = {
    *("c", "cont", "continue", "n", "next", "s", "step", "r", "return", "unt", "until", "j", "jump"),
    *("q", "quit", "exit"),
}
"""pdb commands that continue the program."""


class DebugClient:
    """The kernel's side of the connections to the debuggers in the ranks on this machine. Safe in any thread.

    Args:
        connections: rank -> connection.

    Attributes:
        prompts: rank -> prompt at which its pdb is waiting.
        printed: rank -> last output of its pdb, until it is taken.
        gone: ranks whose process has ended; all ranks after the client is closed.
        announced_stops: breakpoints that were reported to the user.
        stopped_s: time of the last ``breakpoint()``, by ``monotonic()``.
    """

    def __init__(self, connections: Mapping[int, CommandConnection]) -> None:
        self.connections = dict(connections)
        self._ranks = sorted(connections)
        self.prompts: dict[int, Prompted] = {}
        self.printed: dict[int, str] = {}
        self.gone: set[int] = set()
        self.announced_stops: set[tuple[str, int, int]] = set()
        self.stopped_s = 0.0
        self._replies: dict[tuple[int, int], ReceivedReply] = {}
        self._continued: set[tuple[str, int, int]] = set()
        self._arrived: deque[int] = deque()
        self._stops: dict[int, tuple[str, int, int]] = {}
        self._debugged: int | None = None
        self._sent_s = 0.0
        self._numbers = itertools.count(1)
        self._receiving = threading.Lock()

    # --- commands ----------------------------------------------------------------------------------------------------

    def checked_rank(self, rank: int | None, default: int) -> int:
        """Return ``rank``, or ``default`` for None.

        Raises:
            ValueError: there is no such rank.
        """
        if rank is not None and rank not in self._ranks:
            raise ValueError(
                f"rank={rank} is not running here; this machine has {formatting.ranks(self._ranks)}"
            )
        return default if rank is None else rank

    def inspect(self, expression: str, timeout_s: float) -> RankValues:
        """Evaluate an expression on the ranks; return rank -> value or exception, for ranks that answered.

        A ValueError replaces a value that can't be rebuilt in the kernel.
        """
        number = next(self._numbers)
        replies = self._ask(Inspect(expression=expression, number=number), number, self._ranks, timeout_s)
        return RankValues({rank: _value_or_error(rank, received) for rank, received in replies.items()})

    def compare(self, first: int, timeout_s: float) -> Comparison:
        """Compare the variables of rank ``first``'s innermost function that is active on all ranks."""
        frames = self._read_variables(None, self._ranks, timeout_s)
        running = {rank: frame for rank, frame in frames.items() if frame.stack}
        for function in running[first].stack if first in running else ():
            if all(function in frame.stack for frame in running.values()):
                others = [rank for rank, frame in running.items() if frame.function != function]
                frames |= self._read_variables(function, others, timeout_s)
                break
        return Comparison(dict(sorted(frames.items())), [rank for rank in self._ranks if rank not in frames])

    def _read_variables(
        self, function: tuple[str, int] | None, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, FrameVariables]:
        """Read the variables of a function's frame, on ranks that answer in time."""
        number = next(self._numbers)
        replies = self._ask(ReadVariables(function=function, number=number), number, ranks, timeout_s)
        return {
            rank: received.reply.value
            for rank, received in replies.items()
            if isinstance(received.reply.value, FrameVariables)
        }

    def open_pdb(self, rank: int) -> None:
        """Open pdb on a rank, unless it is already waiting for a line."""
        if rank not in self.prompts:
            self.printed.pop(rank, None)  # left by an earlier pdb
            self._send(rank, Debug())

    def next_prompt(self) -> int | None:
        """Return the rank to prompt: the same as before, until it continues or takes too long."""
        if self._debugged not in self.prompts:
            is_running = self._debugged is not None and time.monotonic() - self._sent_s < _PATIENCE_S
            self._debugged = self._debugged if is_running else min(self.prompts, default=None)
        return self._debugged if self._debugged in self.prompts else None

    def take_arrived(self) -> set[int]:
        """Return the ranks whose prompts have arrived since the last call. Only one thread may call this."""
        return {self._arrived.popleft() for _ in range(len(self._arrived))}

    def send_line(self, rank: int, text: str) -> None:
        """Send a line to a rank's pdb. If the rank continues, ranks at the same breakpoint also continue.

        Do nothing if the rank is no longer waiting, because it has ended or a line from another thread has resumed it.
        """
        prompt = self.prompts.pop(rank, None)
        if prompt is None:
            return
        self._sent_s = time.monotonic()
        resumes = bool(text.split()) and text.split()[0] in _RESUMING
        if resumes and prompt.prompt.endswith(PDB_PROMPT):
            # Read before the line is sent: another thread may learn at once that the rank has continued, and forget
            # its position.
            self._continue_others(self._stops.pop(rank, None))
        self._send(rank, Line(text=text))

    def forget_stops(self) -> None:
        """Forget earlier prompts before the next command of a session."""
        for state in (self.prompts, self.printed, self._continued, self._stops):
            state.clear()
        self._debugged = None

    def release(self) -> None:
        """Let the kept workers end."""
        for rank in self.connections:
            self._send(rank, Release())

    def close(self) -> None:
        """Close the connections to the workers, which then end."""
        with self._receiving:
            self.gone.update(self.connections)
            self.connections = {}

    def wait_for_prompt(self, rank: int) -> Prompted | None:
        """Wait until a rank's pdb is ready for a line; return None if the user left pdb or the rank ended."""
        while (prompt := self.prompts.get(rank)) is None:
            if rank in self.printed or rank in self.gone:
                return None
            self.receive_available(_POLL_S)
        return prompt

    def take_printed(self, rank: int) -> str:
        """Return the last output of a rank's pdb."""
        return self.printed.pop(rank, "")

    def _ask(
        self, command: DebugCommand, number: int, ranks: Sequence[int], timeout_s: float
    ) -> dict[int, ReceivedReply]:
        for rank in ranks:
            self._send(rank, command)
        deadline = time.monotonic() + timeout_s
        replies: dict[int, ReceivedReply] = {}
        while len(replies) < len(ranks) and time.monotonic() < deadline:
            self.receive_available(_POLL_S)
            for rank in ranks:
                if (rank, number) in self._replies:
                    replies[rank] = self._replies.pop((rank, number))
            if self.gone.issuperset(set(ranks) - replies.keys()):
                break
        return {rank: replies[rank] for rank in sorted(replies)}

    def _send(self, rank: int, command: DebugCommand) -> None:
        try:
            self.connections[rank].send(command)
        except (OSError, KeyError):  # the rank has ended, or close() was called
            self.gone.add(rank)

    # --- messages ----------------------------------------------------------------------------------------------------

    def receive_available(self, timeout_s: float = 0.0) -> None:
        """Receive messages; wait up to ``timeout_s`` for the first one."""
        with self._receiving:
            ranks = {
                connection.fileno(): rank
                for rank, connection in self.connections.items()
                if rank not in self.gone
            }
            for fd in ranks.keys() & wait(ranks, timeout_s):
                self._receive(ranks[fd])

    def _receive(self, rank: int) -> None:
        try:
            message, files = self.connections[rank].receive()
        except (EOFError, OSError):
            self.gone.add(rank)
            self.prompts.pop(rank, None)
            return
        if isinstance(message, Reply):
            self._replies[rank, message.number] = ReceivedReply.of(message, files)
        elif isinstance(message, Prompted):
            self._handle_prompt(rank, message)
        elif isinstance(message, Resumed):
            self._handle_end(rank, message)

    def _handle_prompt(self, rank: int, message: Prompted) -> None:
        """Keep a prompt. If another rank has left the same breakpoint, let this rank continue."""
        if message.stop is not None:
            self._stops[rank] = message.stop
        if message.stop in self._continued:
            self._send(rank, Line(text="continue"))
            return
        if message.stop is not None:
            self.stopped_s = time.monotonic()
        self.printed.pop(rank, None)
        # First, because another thread may see the prompt and ask for earlier output.
        self._arrived.append(rank)
        self.prompts[rank] = message

    def _handle_end(self, rank: int, message: Resumed) -> None:
        if self._debugged == rank:
            self._debugged = None
        if self._stops.pop(rank, None) not in self._continued:
            self.printed[rank] = message.text

    def _continue_others(self, stop: tuple[str, int, int] | None) -> None:
        """Let all ranks at a breakpoint continue, and also ranks that reach it later.

        They wait at the next collective that needs the rank in pdb.
        """
        if stop is None:
            return
        with self._receiving:  # otherwise a prompt that another thread receives now would never be answered
            self._continued.add(stop)
            for rank in [peer for peer, prompt in self.prompts.items() if prompt.stop == stop]:
                del self.prompts[rank]
                self._send(rank, Line(text="continue"))


# --- failures that are kept for the debugger -------------------------------------------------------------------------


class KeptFailure(ABC):
    """A failure of a job (``runner.py``) or a session command that the debugger can inspect.

    The workers keep running until the next launch, ``release()`` or the end of this process, but for at most 30
    minutes.

    Args:
        debugger: client of the debugger in the workers.
        failed_rank: the rank that failed first.

    Attributes:
        failed_rank: the rank that failed first.
        since_s: time of the failure, by ``monotonic()``.
    """

    def __init__(self, debugger: DebugClient, failed_rank: int) -> None:
        self.failed_rank = failed_rank
        self.since_s = time.monotonic()
        self._debugger = debugger
        self._lock = threading.Lock()
        self._released = threading.Event()
        _kept[next(_numbers)] = self

    @property
    def is_released(self) -> bool:
        """Whether the failure was released."""
        return self._released.is_set()

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client of the debugger, and the rank to debug: ``rank``, or for None the rank that failed.

        Raises:
            ValueError: there is no such rank.
        """
        return self._debugger, self._debugger.checked_rank(rank, self.failed_rank)

    def wait(self) -> None:
        """Wait until the kept workers are released."""
        self._released.wait()

    def release(self) -> None:
        """End the kept workers."""
        with self._lock:
            if not self.is_released:
                try:
                    self._release()
                finally:
                    self._released.set()

    @abstractmethod
    def _release(self) -> None:
        """Do what :meth:`release` does, once."""


_kept: weakref.WeakValueDictionary[int, KeptFailure] = weakref.WeakValueDictionary()
"""The kept failures, in order of arrival."""

_numbers = itertools.count()


def latest_kept_failure() -> KeptFailure | None:
    """Return the last failure that is still kept."""
    kept = [failure for failure in list(_kept.values()) if not failure.is_released]
    return kept[-1] if kept else None


def release_kept_failures() -> None:
    """Release all kept failures of this process's jobs and sessions, before new workers start."""
    for kept in list(_kept.values()):
        kept.release()


# --- replies of the ranks --------------------------------------------------------------------------------------------


_MISSING = "not defined"


@dataclass(frozen=True)
class Comparison:
    """The local variables of a job's ranks. Its text lists each value with its ranks.

    Args:
        frames: rank -> variables of its frame.
        silent: ranks that did not answer in time, or that have ended.
    """

    frames: Mapping[int, FrameVariables]
    silent: Sequence[int] = ()

    @property
    def differing(self) -> dict[str, dict[int, str]]:
        """Name of an aspect (such as ``batch.shape``) -> rank -> text, for aspects that differ between ranks."""
        differences = {
            name: values for name, values in self._by_name().items() if len(set(values.values())) > 1
        }
        return dict(sorted(differences.items(), key=lambda item: _differs_by_nature(item[1])))

    @property
    def equal(self) -> dict[str, str]:
        """Name of an aspect -> text, for aspects that are the same on all ranks."""
        return {
            name: next(iter(values.values()))
            for name, values in self._by_name().items()
            if len(set(values.values())) == 1
        }

    def _by_name(self) -> dict[str, dict[int, str]]:
        names = dict.fromkeys(name for frame in self.frames.values() for name in frame.aspects)
        return {
            name: {rank: frame.aspects.get(name, _MISSING) for rank, frame in self.frames.items()}
            for name in names
        }

    def __repr__(self) -> str:
        places = _grouped({rank: _place(frame) for rank, frame in self.frames.items()})
        lines = [f"{formatting.ranks(ranks)}: {place}" for place, ranks in places]
        if self.silent:
            lines.append(f"{formatting.ranks(self.silent)}: no reply")
        for name, values in self.differing.items():
            # The rarest value comes first, because it is probably the wrong one.
            parts = [f"{text} on {formatting.ranks(ranks)}" for text, ranks in reversed(_grouped(values))]
            lines.append(f"{name} is {', '.join(parts)}")
        if self.frames:
            lines.append(f"the same on all ranks: {_listed(self.equal)}")
        return "\n".join(lines)


def _differs_by_nature(values: Mapping[int, str]) -> bool:
    """Return whether all values are distinct, as rank numbers are. Such values are rarely of interest."""
    is_own_rank = all(text == str(rank) for rank, text in values.items())
    return is_own_rank or len(set(values.values())) == len(values) > 2


def _grouped(values: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Return (text, ranks that have it) pairs, with the most frequent text first."""
    return sorted(formatting.ranks_by_text(values).items(), key=lambda group: -len(group[1]))


def _place(frame: FrameVariables) -> str:
    if not frame.filename:
        return "idle"
    return f"{frame.function[0]}, {cell_name(frame.filename)}, line {frame.line}"


def _listed(equal: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {text}" for name, text in equal.items()) or "nothing"


def _value_or_error(rank: int, received: ReceivedReply) -> Any:
    if received.reply.failed:
        return rebuild(received.reply.failed)
    try:
        return received.result.value_of(rank)
    except ValueError as error:
        return error


class RankValues(dict[int, Any]):
    """rank -> value. Its text shows equal values once: ``[0-3] 2``."""

    def __repr__(self) -> str:
        grouped = formatting.ranks_by_text({rank: repr(value) for rank, value in self.items()})
        return "\n".join(f"[{formatting.spans(ranks)}] {text}" for text, ranks in grouped.items())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Show the same text in IPython, which would otherwise show a dict."""
        printer.text(repr(self))

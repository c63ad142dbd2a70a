"""Replies of workers to the commands of a session and of the debugger, with an outbox for values of any type."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import Failed, Returned, StateSent
from nblaunch.wire import outbox
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.outbox import Outbox, RankResult
from nblaunch.wire.worker_commands import CommandConnection


@dataclass(frozen=True)
class Reply:
    """The reply to a command. Its outbox follows as a memory file if ``returned`` is set.

    Args:
        time_s: when it ended, by the wall clock.
        failed: the exception that the command raised.
        value: of an expression, where its type is one of :data:`PLAIN_TYPES`.
        returned: where any other value lies in the outbox (``wire/outbox.py``).
        sent_states: of a call: where the states of modules lie there, by argument path.
        shown: a display of the value, by MIME type, where that was asked for.
        has_output: something was printed since the last reply.
        number: of the command, where it has one.
        new_names: of variables that commands have set since the last reply; of the first rank of a machine alone.
    """

    time_s: float = 0.0
    failed: Failed | None = None
    value: Any = None
    returned: Returned | None = None
    sent_states: Mapping[ArgPath, StateSent] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    has_output: bool = False
    number: int = 0
    new_names: Sequence[str] = ()

    @classmethod
    def of_value(cls, rank: int, value: Any, outbox_fd: int) -> Reply:
        """Return the reply that brings ``value``, which is in the outbox if it is not of a plain type."""
        if isinstance(value, PLAIN_TYPES):
            return cls(value=value)
        location = Outbox(outbox_fd).put_value(value)
        return cls(returned=Returned(rank, time.time(), value_location=location))


PLAIN_TYPES = (type(None), bool, int, float, str)
"""Types of values that travel in the reply itself."""


@dataclass(frozen=True)
class ReceivedReply:
    """What a rank replied, and what lay in the outbox that came with it."""

    reply: Reply
    result: RankResult

    @classmethod
    def of(cls, reply: Reply, files: Sequence[int]) -> ReceivedReply:
        """Read what came with a reply, and close its files."""
        try:
            if reply.returned is None or not files:
                return cls(reply, RankResult(value=reply.value))
            return cls(reply, outbox.read(files[0], reply.returned.value_location, reply.sent_states))
        finally:
            for fd in files:
                os.close(fd)

    def value_of(self, rank: int) -> Any:
        """Return the value of the reply of ``rank``.

        Raises:
            ValueError: it can't be rebuilt in this process.
        """
        if self.result.value_error:
            raise ValueError(
                f"the value of rank {rank} can't be rebuilt in the kernel: {self.result.value_error}"
            )
        return self.result.value


def receive_reply(connection: CommandConnection) -> ReceivedReply:
    """Wait for the reply to a command.

    Raises:
        EOFError, OSError: the other process has gone.
    """
    return ReceivedReply.of(*connection.receive())


def send_reply(connection: CommandConnection, reply: Reply, outbox_fd: int) -> None:
    """Send a reply, with its outbox if there is something in it.

    Raises:
        OSError: the other process has gone.
    """
    connection.send(reply, [outbox_fd] if reply.returned is not None else [])

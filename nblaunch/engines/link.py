"""The coordinator's view of nodes. A NodeLink is its view of one node, from the start to the end of the node program.

starting ── Hello ──> loading ── Ready, ClockIs ──> ready ── StartRanks ──> running ── AttemptOver ──> ready
    └───────────────────── end of its channel, or silence for too long ─────────────────────> lost
"""

from __future__ import annotations

import os
import pickle
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nblaunch import packages
from nblaunch.diagnosis.hang import Check
from nblaunch.diagnosis.stacks import described_here
from nblaunch.engines import NodeHandle
from nblaunch.engines.channel import Channel, ChannelError
from nblaunch.engines.messages import (
    PART_BYTES,
    Boot,
    CallPart,
    ClockIs,
    Hello,
    Leave,
    Ready,
    Stacks,
)
from nblaunch.errors import LaunchError
from nblaunch.events import Event
from nblaunch.nodes.messages import Heartbeat, Node
from nblaunch.wire import schema
from nblaunch.wire.board import SlotReading
from nblaunch.wire.collective_calls import RankCalls

_CLOSE_S = 3.0
_STACKS_S = 4.0
"""Time for nodes to collect their ranks' stacks; slightly longer than the maximum that they need."""

_MIN_SHIFT_S = 0.05
"""Clock difference below which times from the node are not converted."""


class NodeLink:
    """One node of a job.

    Args:
        handle: handle of its program.
        number: the node's sequence number at the start, which becomes its node rank.

    Attributes:
        hello: its versions; None until they arrive.
        ready: its plan; None until it has loaded the call.
        is_over: whether its ranks in the current attempt have ended and all of their results have arrived.
        loss: why the node is lost; empty while it is alive.
    """

    def __init__(self, handle: NodeHandle, number: int) -> None:
        self._handle = handle
        self.number = number
        self.channel = Channel(handle.reading_fd, handle.writing_fd, b"c")
        self.hello: Hello | None = None
        self.ready: Ready | None = None
        self.is_over = True
        self.loss = ""
        self._ahead_s = 0.0
        self._monotonic_ahead_s = 0.0
        self.has_clock = False

    @property
    def label(self) -> str:
        """``node 1 (host b)``."""
        host = self.hello.host if self.hello is not None else self._handle.host
        return f"node {self.number} (host {host})"

    # --- its start -----------------------------------------------------------------------------------------------

    def receive_hello(self) -> None:
        """Read the node's first message if it has arrived.

        Raises:
            LaunchError: the node's version of Python or nblaunch is incompatible.
        """
        for body in self.channel.receive_raw(1):
            try:
                self.hello = schema.load(Hello, body)
            except ValueError as error:
                raise LaunchError(
                    f"{self.label} is not running this version of the node program: {error}"
                ) from None
            _check_versions(self.label, self.hello)

    def send_boot(self, boot: Boot, call_fd: int) -> None:
        """Send the call that the node must run.

        Args:
            boot: the first message, to which the address of this node is added.
            call_fd: memory file with the call.
        """
        self.channel.send_raw(pickle.dumps(replace(boot, address=self._handle.address)))
        self.channel.key = boot.key
        self.channel.send_bulk(_parts(call_fd, boot.call_bytes))

    def set_clock(self, reply: ClockIs) -> None:
        """Compare the node's clocks with this process's; the error is at most half the round-trip time."""
        now_s, now_monotonic = time.time(), time.monotonic()
        error_s = (now_monotonic - reply.sent_s) / 2
        ahead_s = reply.time_s - (now_s - error_s)
        self._ahead_s = ahead_s if abs(ahead_s) > max(_MIN_SHIFT_S, error_s) else 0.0
        ahead_s = reply.monotonic_s - (now_monotonic - error_s)
        self._monotonic_ahead_s = ahead_s if abs(ahead_s) > max(_MIN_SHIFT_S, error_s) else 0.0
        self.has_clock = True

    def how_ended(self) -> str:
        """Return the reason why the node's program ended."""
        return self.loss or self._handle.how_ended()

    # --- what it sends -------------------------------------------------------------------------------------------

    def receive(self) -> list[object]:
        """Return the node's messages since the last call. Set :attr:`loss` if its channel has ended."""
        try:
            messages: list[object] = self.channel.receive()
        except ChannelError as error:
            self.lose(str(error))
            return []
        if self.channel.is_closed and not self.loss:
            self.loss = self._handle.how_ended()
        return messages

    def lose(self, why: str) -> None:
        """Mark the node as lost, and end its program if possible."""
        if not self.loss:
            self.loss = why
            self._handle.kill()

    def here(self, event: Event) -> Event:
        """Return an event from this node with its time converted to this process's clock."""
        return replace(event, time_s=event.time_s - self._ahead_s) if self._ahead_s else event

    def time_here(self, time_s: float) -> float:
        """Convert a wall clock time of this node to this process's clock."""
        return time_s - self._ahead_s

    def reading_here(self, reading: SlotReading) -> SlotReading:
        """Return a reading from this node with times converted to this process's clock."""
        if not self._monotonic_ahead_s or not reading.step_time_s:
            return reading
        return replace(reading, step_time_s=reading.step_time_s - self._monotonic_ahead_s)

    def heartbeat_here(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return a heartbeat from this node with the times of its readings converted to this process's clock."""
        if not self._monotonic_ahead_s:
            return heartbeat
        readings = tuple(map(self.reading_here, heartbeat.summary.readings))
        return replace(heartbeat, summary=replace(heartbeat.summary, readings=readings))

    def calls_here(self, calls: Mapping[int, RankCalls]) -> Mapping[int, RankCalls]:
        """Return collectives of this node's ranks with times converted to this process's clock."""
        ahead_s = self._monotonic_ahead_s
        if not ahead_s:
            return calls
        return {
            rank: replace(
                rank_calls, calls=(*rank_calls.calls[:-1], replace(last, time_s=last.time_s - ahead_s))
            )
            for rank, rank_calls in calls.items()
            if (last := rank_calls.last) is not None
        }

    # --- its place -----------------------------------------------------------------------------------------------

    def as_node(self, node_rank: int, first_rank: int) -> Node:
        """Return the node with its place in an attempt."""
        assert self.ready is not None, "it has loaded the call"
        assert self.hello is not None, "it has loaded the call"
        return Node(
            id=self.ready.id,
            node_rank=node_rank,
            host=self.hello.host,
            address=self.ready.address,
            first_rank=first_rank,
            num_workers=self.ready.num_processes,
        )

    def leave(self) -> NodeHandle | None:
        """End the job but not the node program; return the program's handle, or None if the program can't be kept."""
        if self.loss or self.channel.is_closed:
            return None
        self.channel.send(Leave())
        return None if self.channel.wants_to_write else self._handle

    def close(self) -> None:
        """Close the channel, which ends the program."""
        self._handle.close(0.0 if self.loss else _CLOSE_S)


class LinkWaiter:
    """Waits until bytes can be received from or sent to nodes, with one poll object for all waits.

    Args:
        fd: descriptor that also ends a wait when it is readable.
    """

    def __init__(self, fd: int) -> None:
        self._poller = select.poll()
        self._poller.register(fd, select.POLLIN)
        self._watched: dict[int, NodeLink] = {}

    def wait(self, links: Iterable[NodeLink], timeout_s: float) -> list[NodeLink]:
        """Wait up to ``timeout_s`` seconds; return the links that have received bytes or have room to send some."""
        wanted: dict[int, NodeLink] = {}
        for link in links:
            if not link.loss:
                wanted[link.channel.reading_fd] = link
                if link.channel.wants_to_write:
                    wanted[link.channel.writing_fd] = link
        for fd in self._watched.keys() - wanted.keys():
            self._poller.unregister(fd)
        for fd in wanted.keys() - self._watched.keys():
            is_read = fd == wanted[fd].channel.reading_fd
            self._poller.register(fd, select.POLLIN if is_read else select.POLLOUT)
        self._watched = wanted
        ready = {fd for fd, _ in self._poller.poll(1000 * timeout_s)}
        return list(dict.fromkeys(link for fd, link in wanted.items() if fd in ready))


def end_all(links: list[NodeLink]) -> None:
    """End the programs of all nodes. All channels are closed first, so that no program waits for another."""
    while links:
        links.pop().close()


class NodesStacks:
    """A query that asks several nodes for stacks. Implements ``launcher.hang_watch.StackQuery``.

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


def _check_versions(label: str, hello: Hello) -> None:
    here = Hello.of_this_process()
    if hello.python != here.python:
        raise LaunchError(
            f"{label} has Python {hello.python}, but this process has {here.python}: neither can read functions "
            f"that the other pickled. Use the same minor version on all machines"
        )
    if hello.nblaunch != here.nblaunch:
        raise LaunchError(
            f"{label} has nblaunch {hello.nblaunch}, but this process has {here.nblaunch}: install the same version "
            f"on all machines"
        )


def torch_notes(links: list[NodeLink]) -> list[str]:
    """Return a sentence about nodes whose torch differs from this process's."""
    here = packages.version("torch") or ""
    others = [
        f"{link.label}: {link.ready.torch}" for link in links if link.ready and link.ready.torch != here
    ]
    if not others:
        return []
    return [
        f"nodes have a different torch version from this process ({here}), so results may differ: {', '.join(others)}"
    ]


def _parts(fd: int, num_bytes: int) -> Iterator[CallPart]:
    for at in range(0, num_bytes, PART_BYTES):
        yield CallPart(os.pread(fd, PART_BYTES, at))

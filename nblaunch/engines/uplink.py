"""Uplink: sends a node's events and logs to the coordinator, and receives its requests, while an attempt runs.

    supervisor ── events, readings ──> Uplink ── immediately, or twice a second ──> coordinator
               <── requests, must_end ──      <── Request, EndRanks, Proposal, AskStacks ──────

To this node's supervisor, Uplink represents the other nodes (``launcher.attempt.Peers``). Logs are sent as the raw
bytes of their files, no faster than the channel accepts them. The more nodes a job has, the less often each node sends
data that is not urgent, so the coordinator's work does not grow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.engines import messages
from nblaunch.engines.agreements import NodeBallots
from nblaunch.engines.channel import Channel
from nblaunch.engines.collectives import NodeCalls
from nblaunch.engines.messages import (
    AskStacks,
    DevicesUsed,
    EndRanks,
    Happened,
    LogPart,
    OutboxPart,
    Proposal,
    Request,
    Stacks,
    Subject,
    Terminate,
)
from nblaunch.events import (
    DeviceUse,
    Event,
    Exited,
    Failed,
    HostMemory,
    Interrupted,
    LogLines,
    Returned,
    Started,
    StateSent,
    StatusLine,
    ValueLocation,
)
from nblaunch.host import descriptors, files
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.hang_watch import LocalStacks
from nblaunch.launcher.requests import JobRequests
from nblaunch.nodes import network
from nblaunch.nodes.messages import DONE, RUNNING, Heartbeat, StopState, Summary, for_peers
from nblaunch.topology import Topology
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.board import Slot, SlotReading
from nblaunch.wire.outbox import RankResult
from nblaunch.wire.stop_agreement import Ballot

_HEARTBEAT_S = 0.5
_MESSAGES_PER_S = 128
"""Maximum number of heartbeats, or of log parts, that all nodes together send per second."""

_LOG_BYTES = 256 << 10
"""Number of log bytes that are sent per check; there are ten checks per second."""

_MAX_LAG_BYTES = 8 << 20
_KEPT_BYTES = 1 << 20
"""If the unsent part of a log exceeds ``_MAX_LAG_BYTES``, only its last ``_KEPT_BYTES`` are sent, and the rest stays in
the file.
"""

_STACKS_BYTES = 256 << 10
_URGENT = (Started, Returned, Failed, Exited, Interrupted, StateSent)


class Uplink:
    """Represents the coordinator to the supervisor of this node's ranks.

    Args:
        channel: channel to the coordinator.
        requests: requests to the ranks of this node.
        id: id of the node program.
        host: name of this machine.
        address: address at which other nodes reach this node.

    Attributes:
        must_end: whether the coordinator wants this node's ranks to end.
        outboxes: descriptor of an outbox -> its rank.
        calls: collectives of this node's ranks; None until they have started.
    """

    def __init__(self, channel: Channel, requests: JobRequests, id: str, host: str, address: str) -> None:
        self._channel = channel
        self._requests = requests
        self._id = id
        self._host = host
        self._address = address
        self._attempt: Attempt | None = None
        self._logs: dict[int, _Log] = {}
        self._events: list[Event] = []
        self._pids: dict[int, int] = {}
        self._gone: set[int] = set()
        self._host_memory: dict[int, HostMemory] = {}
        self._device_use: dict[int, float] = {}
        self._proposals: dict[Subject, Proposal] = {}
        self._ballots: dict[Subject, NodeBallots] = {}
        self._readings: Sequence[SlotReading] = ()
        self._queries: list[tuple[int, LocalStacks]] = []
        self._num_heartbeats = 0
        self._next_heartbeat_s = 0.0
        self._next_logs_s = 0.0
        self._pace_s = 0.0
        self.must_end = False
        self.outboxes: dict[int, int] = {}
        self.calls: NodeCalls | None = None

    def begin(self, attempt: Attempt) -> None:
        """Prepare for the ranks of ``attempt`` before they start."""
        self._attempt = attempt
        self._logs = {rank: _Log(attempt.log.log_path(rank, attempt.number)) for rank in attempt.ranks}
        self._pace_s = attempt.topology.num_nodes / _MESSAGES_PER_S

    # --- Peers: from the coordinator -----------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that is readable when the coordinator has sent something."""
        return self._channel.reading_fd

    @property
    def is_closed(self) -> bool:
        """Whether the coordinator has ended."""
        return self._channel.is_closed

    def receive(self) -> None:
        """Handle the coordinator's messages. If the coordinator has ended, the ranks end immediately."""
        self.take(self._channel.receive())
        if self._channel.is_closed and not self._requests.is_cancelled:
            self._requests.cancel()

    def take(self, messages: Iterable[object]) -> None:
        """Handle messages that have arrived from the coordinator."""
        for message in messages:
            self._handle(message)

    def _handle(self, message: object) -> None:
        if isinstance(message, Request):
            getattr(self._requests, message.kind)()
        elif isinstance(message, Terminate):
            self._requests.terminate(message.grace_s)
        elif isinstance(message, EndRanks):
            self.must_end = True
        elif isinstance(message, Proposal):
            self._handle_proposal(message)
        elif isinstance(message, AskStacks):
            self._ask_stacks(message)

    def _handle_proposal(self, proposal: Proposal) -> None:
        self._proposals[proposal.subject] = proposal
        if proposal.subject in self._ballots:
            self._ballots[proposal.subject].take(proposal)
        if proposal.subject == "check" and not self._requests.wants_stop:
            self._requests.stop()

    def agreement(self, slots: Mapping[int, Slot]) -> NodeBallots:
        """Follow the coordinator in the agreement on the last step."""
        return self._follow("check", slots)

    def boundary(self, slots: Mapping[int, Slot], now_s: float) -> NodeBallots:
        """Follow the coordinator in the agreement on the last optimizer step."""
        return self._follow("step", {rank: slot.boundaries for rank, slot in slots.items()})

    def _follow(self, subject: Subject, ballots: Mapping[int, Ballot]) -> NodeBallots:
        last = self._proposals.get(subject)
        self._ballots[subject] = following = NodeBallots(subject, ballots, self._channel.send, last)
        return following

    def worker_settings(self, topology: Topology) -> dict[str, str | None]:
        """Return environment variables that this node's ranks need in addition to their topology."""
        return network.worker_settings(topology, self._address)

    def _ask_stacks(self, message: AskStacks) -> None:
        assert self._attempt is not None, "ranks run"
        pids = {
            rank: pid for rank, pid in self._pids.items() if rank in message.ranks and rank not in self._gone
        }
        self._queries.append((message.number, LocalStacks(self._attempt, pids)))

    # --- to the coordinator --------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Send an event, and do so immediately if others are waiting for it."""
        if isinstance(event, (LogLines, StatusLine)):
            return  # reconstructed from the bytes of the logs
        if isinstance(event, HostMemory):
            self._host_memory[event.rank] = event
            return
        if isinstance(event, DeviceUse):
            self._device_use[event.rank] = event.share
            return
        if isinstance(event, Started):
            self._pids[event.rank] = event.pid
        if isinstance(event, Exited):
            self._gone.add(event.rank)
        self._events.append(event)
        if isinstance(event, _URGENT):
            is_end = isinstance(event, (Exited, Failed)) and event.rank in self._logs
            last_lines = self._new_log(event.rank, _KEPT_BYTES) if is_end else []
            self._channel.send(*last_lines, *self._take_events())

    def _take_events(self) -> list[Happened]:
        events, self._events = tuple(self._events), []
        return [Happened(events)] if events else []

    def exchange(
        self, readings: Sequence[SlotReading], report: AttemptReport, running: Mapping[int, Slot]
    ) -> list[SlotReading]:
        """Send the state of this node's ranks if it is due; return their readings."""
        assert self._attempt is not None, "ranks run"
        self._readings = [reading for reading in readings if reading.rank in self._attempt.ranks]
        news: list[object] = [*self._take_events()]
        now_s = time.monotonic()
        if now_s >= self._next_heartbeat_s:
            news += self._heartbeat(RUNNING)
        if now_s >= self._next_logs_s and not self._channel.is_full:
            self._next_logs_s = now_s + self._pace_s
            news += self._new_logs(_LOG_BYTES)
        for number, query in list(self._queries):
            query.poll()
            if query.is_done:
                self._queries.remove((number, query))
                calls = {} if self.calls is None else self.calls.read()
                news.append(Stacks(number, query.checks(), calls))
        self._channel.send(*news)
        self._channel.flush()
        return self._readings

    def _heartbeat(self, state: str) -> list[object]:
        """Return the state of this node's ranks, along with other data that is sent at the same interval."""
        self._next_heartbeat_s = time.monotonic() + max(_HEARTBEAT_S, self._pace_s)
        if self._channel.is_full and state == RUNNING:
            return []  # queued bytes are a sign of life
        assert self._attempt is not None, "ranks run"
        summary = Summary(
            readings=tuple(map(for_peers, self._readings)),
            host_memory=tuple(self._host_memory.values()),
            stop=StopState(self._requests.wants_stop),
        )
        sent: list[object] = []
        if self.calls is not None and (marks := self.calls.new_marks()) is not None:
            sent.append(marks)
        if self._device_use:
            sent.append(DevicesUsed(self._device_use))
            self._device_use = {}
        self._num_heartbeats += 1
        sent.append(
            Heartbeat(
                id=self._id,
                count=self._num_heartbeats,
                node_rank=self._attempt.topology.node_rank,
                host=self._host,
                state=state,
                restart_count=self._attempt.restart_count,
                summary=summary,
            )
        )
        return sent

    def _new_logs(self, max_bytes: int) -> list[LogPart]:
        """Return the ranks' new output, up to ``max_bytes`` in total, taking the ranks in turn."""
        parts: list[LogPart] = []
        for rank in sorted(self._logs, key=lambda rank: self._logs[rank].sent_s):
            if max_bytes > 0:
                new = self._new_log(rank, max_bytes)
                parts += new
                max_bytes -= sum(len(part.data) for part in new)
        return parts

    def _new_log(self, rank: int, max_bytes: int) -> list[LogPart]:
        """Return a rank's new output, at most ``max_bytes``; empty if there is none."""
        data, left_out = self._logs[rank].read(max_bytes)
        return [LogPart(rank, data, left_out=left_out)] if data else []

    # --- the end -------------------------------------------------------------------------------------------------

    def send_outbox(
        self, fd: int, value_location: ValueLocation, sent: Mapping[ArgPath, StateSent]
    ) -> RankResult:
        """Send a rank's outbox to the coordinator instead of reading it here."""
        rank = self.outboxes[fd]
        end = max(value_location.end, 0, *(event.end for event in sent.values()))
        at = 0
        while at < end and not self._channel.is_closed:
            data = os.pread(fd, min(messages.PART_BYTES, end - at), at)
            if not data:
                break
            self._channel.send(OutboxPart(rank, at, data))
            at += len(data)
            while self._channel.is_full and not self._channel.is_closed:
                self._channel.send_now(_HEARTBEAT_S)
                self.receive()
            if time.monotonic() >= self._next_heartbeat_s:
                self._channel.send(*self._heartbeat(RUNNING))
        return RankResult()

    def end(self, ranks_with_stacks: Sequence[int]) -> None:
        """Send the rest of the logs, the stacks of crashed ranks, and a last heartbeat."""
        assert self._attempt is not None, "ranks have run"
        self._channel.send(*self._take_events())
        for rank in self._logs:
            while not self._channel.is_closed and (parts := self._new_log(rank, messages.PART_BYTES)):
                self._channel.send(*parts)
                self._channel.send_now(_HEARTBEAT_S)
        for rank in ranks_with_stacks:
            path = self._attempt.log.stacks_path(rank, self._attempt.number)
            if data := files.read_end(path, _STACKS_BYTES):
                self._channel.send(LogPart(rank, data, is_stacks=True))
        self._channel.send(*self._heartbeat(DONE))
        for log in self._logs.values():
            log.close()


class _Log:
    """The log file of a rank, read as it grows.

    Attributes:
        sent_s: when a part of it was last read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._at = 0
        self.sent_s = 0.0

    def read(self, max_bytes: int) -> tuple[bytes, int]:
        """Return new bytes, and the number of skipped bytes before them."""
        if self._fd < 0:
            with suppress(OSError):  # there may be no descriptor left
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                descriptors.keep_from_children(self._fd)
        if self._fd < 0:
            return b"", 0
        left_out, size = 0, os.fstat(self._fd).st_size
        if size - self._at > _MAX_LAG_BYTES:
            left_out = size - _KEPT_BYTES - self._at
            self._at += left_out
        data = os.pread(self._fd, max(0, min(max_bytes, size - self._at)), self._at)
        self._at += len(data)
        if data:
            self.sent_s = time.monotonic()
        return data, left_out

    def close(self) -> None:
        if self._fd >= 0:
            descriptors.close(self._fd)
            self._fd = -1

"""Coordinator: supervises one attempt on all nodes, as the supervisor does for the ranks on one machine.

    nodes ── events, readings, logs, outboxes ──> one AttemptReport, over all ranks ──> listeners
          <── interrupts, end of ranks, proposals, stack queries ──

It merges the nodes' reports as if all ranks ran on one machine, so the same code finds the root cause and builds
errors, texts and results. One hang detector watches the progress of all ranks. Silent nodes are handled as in
``nodes/``, by the same :class:`PeerStates`, where this process counts as a node without ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from nblaunch import env, formatting
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.silent_errors import OF_JOB, SilentErrors
from nblaunch.engines.agreements import NodesAgreement
from nblaunch.engines.collectives import AllCalls
from nblaunch.engines.link import LinkWaiter, NodeLink, NodesStacks
from nblaunch.engines.messages import (
    AskStacks,
    AttemptOver,
    CallMarks,
    DevicesUsed,
    EndRanks,
    Happened,
    LogPart,
    OutboxPart,
    Rejected,
    Replies,
    Request,
    Stacks,
    StartRanks,
    StoreOpened,
    Subject,
    Terminate,
)
from nblaunch.errors import LaunchError
from nblaunch.events import (
    UNKNOWN_EXIT,
    DeviceUse,
    Event,
    Exited,
    Failed,
    HostMemory,
    Note,
    Started,
    WorkerState,
)
from nblaunch.host import signal_handlers
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.collective_watch import CollectiveWatch
from nblaunch.launcher.hang_watch import HangWatch
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.logtail import LogTail
from nblaunch.launcher.requests import JobRequests
from nblaunch.nodes.messages import Heartbeat, Node
from nblaunch.nodes.peer_states import PeerStates
from nblaunch.spec import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT
from nblaunch.wire import outbox
from nblaunch.wire.board import SlotReading, create_memory_file
from nblaunch.wire.outbox import RankResult

_TICK_S = 0.1
_INSPECTION_S = 0.5
_LOST_S = 15.0
"""How long nodes may take to end their ranks after a kill."""

_LOST_ADVICE = (
    "Check that machine and the network to it. With max_restarts, the job starts again on the nodes that are "
    "available then."
)


class Coordinator:
    """Watches the ranks of one attempt on all nodes.

    Args:
        attempt: the attempt, with the topology of all ranks.
        links: links to the nodes, by node rank.
        key: key that signs the objects that ranks exchange.
        requests: requests to the job.
        emit: receives every event.
        emit_readings: receives readings of all ranks, 10 times a second.
    """

    def __init__(
        self,
        attempt: Attempt,
        links: Sequence[NodeLink],
        key: bytes,
        requests: JobRequests,
        emit: Callable[[Event], None],
        emit_readings: Callable[[Sequence[SlotReading]], None],
    ) -> None:
        self._attempt = attempt
        self._links = links
        self._key = key
        self._requests = requests
        self._emit = emit
        self._emit_readings = emit_readings
        self._nodes = _places(links)
        self._owner = {
            rank: link for link, node in zip(links, self._nodes, strict=True) for rank in node.ranks
        }
        self._report = AttemptReport(places={rank: node.label for node in self._nodes for rank in node.ranks})
        self._report.remote.advice = _LOST_ADVICE
        self._peers = PeerStates(
            self._nodes,
            time.monotonic(),
            DEFAULT_KEEP_ALIVE_INTERVAL_S,
            DEFAULT_KEEP_ALIVE_INTERVAL_S * DEFAULT_KEEP_ALIVE_MAX_ATTEMPT,
            attempt.number,
        )
        self._first_readings = [SlotReading(rank) for rank in self._owner]
        self._pids: dict[int, int] = {}
        self._outboxes: dict[int, int] = {}
        self._logs = LogCopies(attempt.log, attempt.number, self._owner)
        self._queries: list[NodesStacks] = []
        self._num_queries = 0
        self._agreements: dict[Subject, NodesAgreement] = {}
        self._interrupts_seen = self._terminations_seen = 0
        self._interrupted_s: float | None = None
        self._ends_since: float | None = None
        self._kills_since: float | None = None
        self._next_tick = self._next_inspection = 0.0
        self._rejections: list[tuple[NodeLink, Rejected]] = []
        self._store_port: int | None = None
        self._sent_before_start: list[object] = []
        self._calls = AllCalls(self._ask_calls, self._readings)
        self._collectives = CollectiveWatch(self._calls, attempt, emit)
        self._errors = SilentErrors(list(self._owner), emit, OF_JOB)
        self._waiter = LinkWaiter(requests.fileno())
        self._hangs = HangWatch(attempt, self._readings, requests, emit, self._ask_ranks, self._calls.last)

    # --- from the start to the end -------------------------------------------------------------------------------

    def run(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Start the ranks on all nodes and supervise them until they end; return the report, and the results by rank.

        Raises:
            LaunchError: ranks could not be started on a node.
        """
        try:
            with self._requests.answering():
                self._start()
                while not all(link.is_over for link in self._links):
                    self._turn()
            self._drain()
            self._raise_rejection()
            return self._report, self._collect()
        finally:
            self._logs.close()
            for fd in self._outboxes.values():
                os.close(fd)

    def _start(self) -> None:
        """Have node 0 open the ranks' store, then start the ranks on all nodes."""
        for link in self._links:
            link.is_over = False
        self._order(0, port=0)
        while self._store_port is None and not self._links[0].is_over:
            self._turn()
        if self._store_port is not None:
            for index in range(1, len(self._links)):
                if not self._links[index].is_over:
                    self._order(index, port=self._store_port)
        else:  # the first node can't start its ranks or is lost
            for link in self._links:
                link.is_over = True

    def _order(self, index: int, port: int) -> None:
        node = self._nodes[index]
        topology = replace(
            self._attempt.topology,
            rank=node.first_rank,
            local_rank=0,
            node_rank=node.node_rank,
            local_world_size=node.num_workers,
            num_nodes=len(self._nodes),
            master_addr=self._nodes[0].address,
            master_port=port,
        )
        channel = self._links[index].channel
        channel.send(StartRanks(topology, self._attempt.number, self._key))
        for request in self._sent_before_start:
            channel.send(request)

    def _turn(self) -> None:
        """Wait for the next message or timeout, and handle it."""
        ready = self._waiter.wait(self._links, max(0.0, self._next_tick - time.monotonic()))
        self._requests.acknowledge()
        signal_handlers.run_arrived()  # an exception in the user's handler ends the job here
        for link in ready:
            self._receive(link)
        self._handle_requests()
        if time.monotonic() >= self._next_tick:
            self._tick()
            self._give_up_silent()
        self._judge_hang()
        self._poll_agreements()

    # --- what nodes send -----------------------------------------------------------------------------------------

    def _receive(self, link: NodeLink) -> None:
        if link.loss:
            return
        link.channel.flush()
        for message in link.receive():
            self._handle(link, message)
        if link.loss and not link.is_over:
            self._note_loss(link)

    def _handle(self, link: NodeLink, message: object) -> None:
        if isinstance(message, Happened):
            for event in message.events:
                self._handle_event(link.here(event))
        elif isinstance(message, Heartbeat):
            self._handle_heartbeat(link, message)
        elif isinstance(message, LogPart):
            self._logs.write(message)
        elif isinstance(message, OutboxPart):
            if message.rank not in self._outboxes:
                self._outboxes[message.rank] = create_memory_file(f"nblaunch-outbox-{message.rank}")
            os.pwrite(self._outboxes[message.rank], message.data, message.at)
        elif isinstance(message, DevicesUsed):
            for rank, share in message.shares.items():
                self._emit(DeviceUse(rank, share=share))
        elif isinstance(message, Stacks):
            self._calls.take(link.calls_here(message.calls))
            for query in self._queries:
                query.take(message, link)
        elif isinstance(message, Replies):
            self._begin_agreement(message.subject)  # even after a SIGTERM's grace period on a node
            self._agreements[message.subject].take(message)
        elif isinstance(message, CallMarks):
            self._calls.take_marks(link, message)
        elif isinstance(message, StoreOpened):
            self._store_port = message.port
        elif isinstance(message, Rejected):
            self._rejections.append((link, message))
            link.is_over = True
            self._end_ranks()
        elif isinstance(message, AttemptOver):
            self._conclude(link, message)

    def _handle_event(self, event: Event) -> None:
        self._report.add(event)
        if isinstance(event, Started):
            self._pids[event.rank] = event.pid
        elif isinstance(event, (Failed, Exited)) and event.rank not in self._report.returned:
            self._end_ranks()
        if event.rank >= 0:
            self._hangs.count(event.rank, event)
        self._errors.receive(event)
        self._emit(event)

    def _handle_heartbeat(self, link: NodeLink, heartbeat: Heartbeat) -> None:
        summary = heartbeat.summary
        events, notes = self._peers.update([link.heartbeat_here(heartbeat)], time.monotonic())
        for event in events:
            if isinstance(event, HostMemory):
                self._report.host_memory[event.rank] = event
            self._emit(event)
        for text in notes:
            self._note(text, "warning")
        if summary.stop.is_wanted:
            self._requests.wants_stop = True

    def _conclude(self, link: NodeLink, over: AttemptOver) -> None:
        report = self._report
        report.signalled |= {rank: link.time_here(time_s) for rank, time_s in over.signalled.items()}
        report.unkillable |= over.unkillable
        report.evidence |= over.evidence
        report.hang = report.hang or over.hang
        self._calls.take(link.calls_here(over.calls))
        report.last_readings += [link.reading_here(reading) for reading in over.last_readings]
        link.is_over = True

    def _note_loss(self, link: NodeLink) -> None:
        """Record that a node and all of its ranks are lost."""
        node = self._nodes[self._links.index(link)]
        text = f"{node} was lost: {link.loss}"
        self._report.remote.lost.setdefault(node.first_rank, text)
        now = time.time()
        for rank in node.ranks:
            if rank not in self._report.exits:
                self._report.signalled.setdefault(rank, now)  # the rank is not a cause
                self._report.exits[rank] = (UNKNOWN_EXIT, now)
                self._emit(Exited(rank, now, status=UNKNOWN_EXIT))
            self._report.returned.pop(rank, None)  # its value has not arrived
        link.is_over = True
        self._note(text, "warning")
        self._end_ranks()

    # --- requests ------------------------------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        requests = self._requests
        if requests.terminations > self._terminations_seen:
            self._terminations_seen = requests.terminations
            self._send_all(Terminate(requests.termination_grace_s))
        if requests.is_cancelled and not self._report.cancelled:
            self._report.cancelled = True
            self._kills_since = time.monotonic()
            self._send_all(Request("cancel"))
        while self._interrupts_seen < requests.interrupts:
            self._interrupts_seen += 1
            self._interrupt()
        if requests.wants_stop:
            self._begin_agreement("check")
        for query in requests.take_queries():
            self._hangs.ask(query, self._active_pids())

    def _interrupt(self) -> None:
        report = self._report
        report.interrupted = report.interrupted or not report.is_decided(self._owner)
        self._interrupted_s = self._interrupted_s or time.monotonic()
        if self._interrupts_seen > 1:
            self._kills_since = self._kills_since or time.monotonic()
        elif report.interrupted:
            self._begin_agreement("step")
        self._send_all(Request("interrupt"))

    def _send_all(self, message: object) -> None:
        if self._store_port is None:  # nodes without ranks are not listening yet
            self._sent_before_start.append(message)
        for link in self._links:
            if not link.is_over:
                link.channel.send(message)

    def _end_ranks(self) -> None:
        """Make all nodes end their ranks, after giving other ranks a moment to report their own failures."""
        if self._ends_since is None:
            self._ends_since = time.monotonic()
            self._send_all(EndRanks())

    def _give_up_silent(self) -> None:
        """Abandon nodes that have been silent for too long, or whose ranks are still running after they were killed."""
        now = time.monotonic()
        for text in self._peers.check(now):
            self._note(text, "warning")
        for link, node in zip(self._links, self._nodes, strict=True):
            if link.is_over:
                continue
            if why := self._peers.failures.lost.get(node.first_rank):
                link.lose(why.removeprefix(f"{node} "))
            elif self._kills_since is not None and now - self._kills_since > _LOST_S:
                link.lose(f"its ranks did not end within {_LOST_S:g} s of being killed")
            if link.loss:
                self._note_loss(link)

    # --- what the clock triggers --------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        self._next_tick = now + _TICK_S
        for rank, event in self._logs.read():
            self._hangs.count(rank, event)
            self._emit(event)
        readings = self._readings()
        self._emit_readings(readings)
        if now >= self._next_inspection:
            self._next_inspection = now + _INSPECTION_S
            active = self._active_pids()
            self._hangs.inspect(readings, active)
            self._collectives.compare(self._report, active, self._end_ranks)
            self._errors.collect(active)

    def _readings(self) -> list[SlotReading]:
        return self._peers.merged(self._first_readings)

    def _active_pids(self) -> dict[int, int]:
        """Return the processes, by rank, of the ranks whose function is running or that are still sending states."""
        report = self._report
        over = report.exits.keys() | report.failed.keys() | self._done()
        return {rank: pid for rank, pid in self._pids.items() if rank not in over}

    def _done(self) -> set[int]:
        done = {reading.rank for reading in self._readings() if reading.state is WorkerState.DONE}
        return self._report.delivered | done

    def _judge_hang(self) -> None:
        hang = self._hangs.poll(self._done()) if self._hangs.is_asking else None
        if hang is None or self._attempt.spec.on_hang != "stop" or self._ends_since is not None:
            return
        if running := sorted(self._owner.keys() - self._report.exits.keys() - self._report.returned.keys()):
            self._report.hang = hang.reported(running)
        self._end_ranks()

    def _ask_ranks(self, pids: Mapping[int, int]) -> NodesStacks:
        by_link: dict[NodeLink, list[int]] = {}
        for rank in pids:
            by_link.setdefault(self._owner[rank], []).append(rank)
        return self._ask_nodes(by_link)

    def _ask_calls(self) -> NodesStacks:
        return self._ask_nodes({link: [] for link in self._links})

    def _ask_nodes(self, ranks_of: Mapping[NodeLink, Sequence[int]]) -> NodesStacks:
        self._num_queries += 1
        asked = {link: ranks for link, ranks in ranks_of.items() if not link.is_over}
        for link, ranks in asked.items():
            link.channel.send(AskStacks(self._num_queries, tuple(ranks)))
        query = NodesStacks(self._num_queries, set(asked))
        self._queries = [pending for pending in self._queries if not pending.is_done] + [query]
        return query

    # --- an agreed end -------------------------------------------------------------------------------------------

    def _begin_agreement(self, subject: Subject) -> None:
        if subject not in self._agreements:
            grace_s = self._attempt.spec.interrupt_grace_s
            self._agreements[subject] = NodesAgreement(subject, self._send_all, time.monotonic(), grace_s)

    def _poll_agreements(self) -> None:
        """Poll the agreements on the step at which all ranks end."""
        if not self._agreements:
            return
        report = self._report
        running = self._owner.keys() - report.returned.keys() - report.exits.keys() - report.failed.keys()
        for agreement in self._agreements.values():
            agreement.poll(running, time.monotonic())
        report.stopped_early = "check" in self._agreements and self._agreements["check"].is_settled

    # --- the end -------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read the logs to the end, and emit the last readings."""
        for event in self._logs.read_rest():
            self._emit(event)
        report = self._report
        if report.returned.keys() >= self._owner.keys():
            report.interrupted = False  # the function handled the interrupt and returned
        ended = {reading.rank: reading for reading in report.last_readings}
        report.last_readings = [ended.get(reading.rank, reading) for reading in self._readings()]
        self._emit_readings(report.last_readings)
        self._collectives.conclude(report)
        self._errors.end()
        if self._interrupted_s is not None:
            self._collectives.describe_wait(report, self._interrupted_s)

    def _raise_rejection(self) -> None:
        if self._rejections and not self._report.remote.lost and not self._requests.endings:
            link, rejected = self._rejections[0]
            raise LaunchError(f"{link.label}: {rejected.text}")

    def _collect(self) -> dict[int, RankResult]:
        """Read the ranks' results from the local copies of their outboxes."""
        report = self._report
        results = {}
        for rank, location in report.value_locations.items():
            fd = self._outboxes.get(rank, -1)
            is_empty = location.at < 0 and not report.sent_states.get(rank)
            if fd >= 0:
                results[rank] = outbox.read(fd, location, report.sent_states.get(rank, {}))
            elif is_empty:
                results[rank] = RankResult()
        return results

    def _note(self, text: str, kind: str = "note") -> None:
        self._emit(Note.of_job(text, kind))


class LogCopies:
    """Copies of the ranks' logs in the job's folder, which are read like logs on a single machine.

    Args:
        log: the logs of the job.
        attempt: number of the attempt.
        ranks: ranks on all nodes.
    """

    def __init__(self, log: JobLog, attempt: int, ranks: Iterable[int]) -> None:
        log.make_attempt_folder(attempt, ())
        max_bytes = env.read("NBLAUNCH_LOG_LIMIT_MB") * 1_000_000
        paths = {rank: log.log_path(rank, attempt) for rank in ranks}
        self._log, self._attempt = log, attempt
        self._paths = {rank: str(path) for rank, path in paths.items()}
        self._tails = {rank: LogTail(rank, path, max_bytes) for rank, path in paths.items()}
        self._unread: set[int] = set()

    def write(self, part: LogPart) -> None:
        """Append a part to the copy of a rank's log or stacks. A full disk does not end a job."""
        data = part.data
        if part.left_out:
            gap = (
                f"... {formatting.size(part.left_out)} of output is only in the file on the rank's node ...\n"
            )
            data = b"\n" + gap.encode() + data
        path = self._paths[part.rank]
        if part.is_stacks:
            path = str(self._log.stacks_path(part.rank, self._attempt))
        else:
            self._unread.add(part.rank)
        with suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)

    def read(self) -> Iterator[tuple[int, Event]]:
        """Yield the events for output written since the last call, each with its rank."""
        for rank in sorted(self._unread):
            tail = self._tails[rank]
            for event in tail.read():
                yield rank, event
            if not tail.is_behind:
                self._unread.discard(rank)

    def read_rest(self) -> Iterator[Event]:
        """Yield the events for the unread rest of each log."""
        for tail in self._tails.values():
            yield from tail.read_rest()

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()


def _places(links: Sequence[NodeLink]) -> list[Node]:
    """Return the nodes with their ranks in this attempt."""
    nodes: list[Node] = []
    first_rank = 0
    for node_rank, link in enumerate(links):
        node = link.as_node(node_rank, first_rank)
        nodes.append(node)
        first_rank += node.num_workers
    return nodes


def world_size(links: Sequence[NodeLink]) -> int:
    """Return the number of ranks on these nodes."""
    return sum(link.ready.num_processes for link in links if link.ready is not None)


def describe_nodes(links: Sequence[NodeLink]) -> str:
    """Return the nodes as one line for the table's head: ``0: a (ranks 0-3), 1: b (ranks 4-7)``."""
    parts = [f"{node.node_rank}: {node.host} ({formatting.ranks(node.ranks)})" for node in _places(links)]
    return formatting.first(parts, 8)

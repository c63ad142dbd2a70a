r"""Supervisor: the one wait loop, from the start of an attempt's workers until they have ended.

    event pipes ──┐
    process ends ─┤                ┌──> listeners: events, log lines, board readings
    requests ─────┼──> wait loop ──┤
    store socket ─┤                └──> signals to workers (escalation)
    ticks (10 Hz)─┘

Events, process exits, requests, debugger prompts and failures of other nodes wake the loop at once (exits are
polled if the system has no descriptors for them). Logs, the board, memory, device utilisation and hangs are
checked periodically. When the last process has ended, pipes, logs and outboxes are read to their end before
the outcome is decided.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence, Set
from functools import partial

from nblaunch import formatting
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.silent_errors import EVERYTHING, OF_NODE, SilentErrors
from nblaunch.events import (
    Event,
    Exited,
    ExitStatus,
    Failed,
    InputAwaited,
    Note,
    Returned,
    Started,
    WorkerState,
)
from nblaunch.host import signal_handlers
from nblaunch.launcher.attempt import RunningAttempt, start_failures_as_launch_errors
from nblaunch.launcher.collective_watch import BoardCalls, CollectiveWatch
from nblaunch.launcher.debug_client import DebugClient
from nblaunch.launcher.escalation import Escalation, SendingRanks, Termination, pass_on
from nblaunch.launcher.hang_watch import HangWatch
from nblaunch.launcher.monitor import MemorySampler
from nblaunch.launcher.requests import JobRequests
from nblaunch.launcher.slow_watch import SlowWatch
from nblaunch.launcher.store import StoreHost
from nblaunch.launcher.timeline import SpanRecorder
from nblaunch.start_methods.worker_group import KILL_PATIENCE_S
from nblaunch.wire import outbox
from nblaunch.wire.board import SlotReading
from nblaunch.wire.outbox import RankResult
from nblaunch.wire.stop_agreement import Agreement, Boundary, StopAgreement, on_boundary
from nblaunch.worker.inheritance.queues import UnreadQueues

TICK_S = 0.1
_INSPECTION_S = 0.25
_BUSY_TICK_S = 0.01
"""Seconds between checks while ranks are replying through memory or files, which do not wake the loop."""

_POLL_S = 0.02
"""Seconds between polls if the system can't wake the loop when a process ends."""

_LINGER_S = 60.0
"""How long workers may keep running after their function has returned, for example to upload or write files."""

_LATE_FAILURES_S = 0.3
"""Seconds from the first failure to the end of the job, if the workers are kept."""

_MAX_NAMED = 5
"""Maximum number of processes to name in a note about processes that workers left running."""


class Supervisor:
    """Watches the workers of one attempt until they end.

    Args:
        running: the workers; closed at the end.
        requests: requests to the job.
        emit: receives every event.
        emit_readings: receives readings of the board, one per rank, 10 times a second.
        debugger: client of the debugger in the workers; None = no debugger.
        on_prompts: called while ranks are waiting for input to pdb.
        read_outbox: reads a rank's outbox, as :func:`nblaunch.wire.outbox.read` does.
    """

    def __init__(
        self,
        running: RunningAttempt,
        requests: JobRequests,
        emit: Callable[[Event], None],
        emit_readings: Callable[[Sequence[SlotReading]], None],
        debugger: DebugClient | None = None,
        on_prompts: Callable[[], None] | None = None,
        read_outbox: outbox.Reader = outbox.read,
    ) -> None:
        self._running = running
        self._attempt = attempt = running.attempt
        self._peers = attempt.peers
        self._group, self._board, self._selector = running.group, running.board, running.selector
        self._requests = requests
        self._emit, self._emit_readings = emit, emit_readings
        self._debugger = debugger
        self._on_prompts = on_prompts or _nothing
        self._read_outbox = read_outbox
        self._post_mortem_since_s: float | None = None
        self._report = AttemptReport(memory=running.memory, is_script=attempt.spec.is_script)
        self._sending = SendingRanks(running, self._report)
        self._next_tick = self._next_inspection = 0.0
        self._agreement: Agreement | None = None
        self._boundary: Boundary | None = None
        self._termination: Termination | None = None
        self._escalation: Escalation | None = None
        self._interrupts_seen, self._killed_s = 0, dict[int, float]()
        self._lingering_since: float | None = None
        self._watched_ends, self._started = set[int](), set[int]()
        self._has_end = False
        self._memory_sampler = MemorySampler()
        self._collectives = collectives = CollectiveWatch(BoardCalls(running), attempt, emit)
        self._hangs = HangWatch(attempt, running.board.read, requests, emit, read_calls=collectives.calls)
        self._spans = SpanRecorder(running, SlowWatch(running, emit))
        errors = SilentErrors(attempt.ranks, emit, EVERYTHING if attempt.compares_ranks else OF_NODE)
        self._watchers = (UnreadQueues(running.board, emit), errors, self._spans)

    @property
    def _alive(self) -> set[int]:
        """The ranks whose process has neither ended nor been abandoned."""
        return set(self._attempt.ranks) - self._report.exits.keys()

    @property
    def _stoppable(self) -> set[int]:
        """The ranks that an escalation may signal now."""
        return self._alive - self._spared()

    def _spared(self) -> set[int]:
        """Return the ranks that a first interrupt must not signal, because they are sending values or weights."""
        report = self._report
        if not report.interrupted or self._requests.interrupts > 1 or report.cancelled or report.hang:
            return set()
        return self._sending.find(self._alive)

    def run(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Supervise the workers until they end, in any thread; return the report, and the results by rank.

        Raises:
            LaunchError: the system did not provide a resource that workers need while they run.
        """
        try:
            self._register()
            self._next_tick = time.monotonic() + TICK_S
            with self._requests.answering():
                self._loop()
            self._drain()
            if self._report.returned.keys() >= set(self._attempt.ranks):
                self._report.interrupted = False  # the function handled the interrupt and returned
            if self._ends_with_kept_workers():
                return self._leave_workers()
            rank_results = self._collect()
        except BaseException:
            self.close()
            raise
        self.close()
        return self._report, rank_results

    def _leave_workers(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Return the same as :meth:`run`; keep the running workers until :meth:`end_kept` is called."""
        if not self._running.guardian.is_started:
            self._do_deferred()
        if self._running.store is not None:
            self._running.store.leave_to_kept_workers()
        self._report.kept = sorted(self._alive)
        return self._report, self._collect()

    def end_kept(self) -> None:
        """End the workers that :meth:`run` kept, as after any failure. May be called from any thread."""
        try:
            self._report.kept = []
            self._post_mortem_since_s = None
            self._begin_escalation()
            self._loop()
        finally:
            self.close()

    def close(self) -> None:
        """End running workers, and release the resources of the attempt."""
        self._running.close()
        for watcher in self._watchers:
            watcher.end()
        if processes := self._running.left_running:
            named = formatting.first(processes, _MAX_NAMED)
            self._note(f"killed with the job, although they had left the workers' process groups: {named}")

    def _do_deferred(self) -> None:
        """At the first tick, do work that workers need not wait for and that short jobs can skip."""
        with start_failures_as_launch_errors(self._attempt):
            self._running.guardian.start()
        try:
            self._attempt.log.prune()
        except OSError as error:  # a problem with old logs must not end the job
            self._note(f"logs of earlier jobs could not be removed: {error}", "warning")

    # --- the wait loop -----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._alive and not self._ends_with_kept_workers():
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            signal_handlers.run_arrived()  # an exception in the user's handler ends the job here
            is_tick = time.monotonic() >= self._next_tick
            if self._has_end or is_tick or not self._watched_ends:
                self._reap()  # a system call for each rank
            self._handle_requests()
            self._check_peers()
            if is_tick:
                self._tick()
            self._escalate()
            self._abandon_unkillable()
            self._judge_hang()
            self._poll_agreement()
            if self._debugger is not None and self._debugger.prompts and self._escalation is None:
                self._read_logs()  # output before the prompt comes first
                self._on_prompts()

    def _ends_with_kept_workers(self) -> bool:
        """Return whether the attempt ends but its workers stay for the debugger, because a rank has failed.

        Other ranks get a moment to raise exceptions as well, because the first failure is not always the root cause.
        """
        if self._post_mortem_since_s is None or self._escalation is not None or not self._alive:
            return False
        is_over = time.monotonic() - self._post_mortem_since_s > _LATE_FAILURES_S
        return is_over or self._alive <= self._report.failed.keys()

    # --- what the loop waits for ---------------------------------------------------------------------------------

    def _register(self) -> None:
        self._selector.register(self._requests, selectors.EVENT_READ, self._requests.acknowledge)
        for rank, receiver in self._running.receivers.items():
            self._selector.register(receiver.fd, selectors.EVENT_READ, partial(self._read_pipe, rank))
        if (store := self._running.store) is not None and store.fileno() >= 0:
            self._selector.register(store, selectors.EVENT_READ, partial(self._start_store, store))
        if self._peers is not None:
            self._selector.register(self._peers, selectors.EVENT_READ, self._peers.receive)
        if self._debugger is not None:
            for rank, connection in self._debugger.connections.items():
                receive = partial(self._receive_from_debugger, rank)
                self._selector.register(connection, selectors.EVENT_READ, receive)
        self._watch_ends()

    def _watch_ends(self) -> None:
        """Watch the process descriptors of the group, and no others."""
        wanted = set(self._group.waitables())
        for fd in self._watched_ends - wanted:
            self._selector.unregister(fd)
        for fd in wanted - self._watched_ends:
            self._selector.register(fd, selectors.EVENT_READ, self._note_end)
        self._watched_ends = wanted

    def _note_end(self) -> None:
        self._has_end = True

    def _timeout(self) -> float:
        until = self._next_tick
        if self._escalation is not None:
            step = self._escalation.next_s(self._stoppable, self._has_noticed)
            until = min(until, step) if step is not None else until
        if not self._watched_ends:
            until = min(until, time.monotonic() + _POLL_S)
        agreements = [agreement for agreement in (self._agreement, self._boundary) if agreement is not None]
        if self._hangs.is_asking or not all(agreement.is_settled for agreement in agreements):
            until = min(until, time.monotonic() + _BUSY_TICK_S)
        return max(0.0, until - time.monotonic())

    # --- what happens --------------------------------------------------------------------------------------------

    def _read_pipe(self, rank: int) -> None:
        """Handle the events of a rank; stop waiting for more if its pipe was closed."""
        if self._receive(rank):
            self._selector.unregister(self._running.receivers[rank].fd)

    def _receive(self, rank: int) -> bool:
        """Handle the events of a rank; return whether its pipe was closed."""
        events, is_closed = self._running.receivers[rank].receive()
        for event in events:
            self._handle(rank, event)
        return is_closed

    def _handle(self, rank: int, event: Event) -> None:
        self._report.add(event)
        if isinstance(event, Started):
            self._started.add(event.rank)
            # A forkserver's group may not list the process yet.
            self._running.guardian.watch_only({event.pid, *self._group.process_groups()})
        elif isinstance(event, Failed) and event.rank not in self._report.returned:
            if self._attempt.keeps_workers:
                self._post_mortem_since_s = self._post_mortem_since_s or time.monotonic()
            else:
                self._begin_escalation()
        elif isinstance(event, InputAwaited):
            self._read_logs({rank})
        for watcher in self._watchers:
            watcher.receive(event)
        self._hangs.count(rank, event)
        self._emit(event)

    def _read_pipes(self, ranks: Sequence[int] | None = None) -> None:
        """Handle the events that ranks have sent so far; None = all ranks."""
        receivers = self._running.receivers
        for rank in receivers if ranks is None else ranks:
            if receivers[rank].fd in self._selector.get_map():
                self._read_pipe(rank)

    def _receive_from_debugger(self, rank: int) -> None:
        assert self._debugger is not None, "the loop waits only for connections of a debugger"
        self._debugger.receive_available()
        if rank in self._debugger.gone:
            self._selector.unregister(self._running.commands[rank])  # the client may be closed

    def _start_store(self, store: StoreHost) -> None:
        self._selector.unregister(store)
        store.start()

    def _reap(self) -> None:
        self._has_end = False
        ended = self._group.poll()
        if ended:
            self._watch_ends()
        for rank, status in ended:
            now = time.time()
            self._report.exits[rank] = (status, now)
            self._read_pipes([rank])  # its last events, before its end is judged
            if status.code == 0 and self._report.is_script and rank not in self._report.failed:
                self._handle(rank, Returned(rank, now))  # it called os._exit(0), or became another program
            self._running.guardian.watch_only(self._group.process_groups())
            was_stopped = rank in self._report.signalled
            self._emit(Exited(rank=rank, time_s=now, status=status, was_stopped=was_stopped))
            if rank not in self._report.returned:
                self._begin_escalation()

    def _handle_requests(self) -> None:
        requests = self._requests
        if requests.terminations and self._termination is None:
            self._begin_termination()
        if requests.is_cancelled and not self._report.cancelled:
            self._report.cancelled = True
            self._escalation = Escalation.kill(time.monotonic())
        if requests.interrupts > self._interrupts_seen:
            self._interrupts_seen = requests.interrupts
            if not self._report.cancelled:
                self._interrupt()
        if requests.wants_stop and self._agreement is None:
            slots = {rank: self._board.slot(rank) for rank in self._running.receivers}
            peers, now = self._peers, time.monotonic()
            self._agreement = StopAgreement(slots, now) if peers is None else peers.agreement(slots)
        for signum in requests.take_signals():
            self._note(pass_on(signum, self._active_pids()))
        for query in requests.take_queries():
            if query.subject == "logs":
                self._read_pipes()
                self._read_logs()
                self._emit_readings(self._read_board())
                requests.answer(query, "")
            else:
                self._hangs.ask(query, self._active_pids())

    def _interrupt(self) -> None:
        now = time.monotonic()
        # If there are other machines, the outcome is never decided here.
        is_decided = self._peers is None and self._report.is_decided(self._attempt.ranks)
        self._report.interrupted = self._report.interrupted or not is_decided
        self._collectives.describe_wait(self._report)
        if self._report.interrupted:
            for rank in self._alive:
                self._board.slot(rank).keeps_weights = 1
        if self._requests.interrupts > 1:  # even if both came before this check
            self._escalation = Escalation.kill(now)
        elif self._escalation is not None:
            self._escalation.add_interrupt(now)
        else:
            spec = self._attempt.spec
            # If a session is interrupted while its workers are starting, the interrupt arrives here. No worker notices
            # it, because no user code is running.
            grace_s = 0.0 if spec.is_session else spec.interrupt_grace_s
            running = self._alive - self._report.returned.keys()
            start = on_boundary if self._peers is None else self._peers.boundary
            self._boundary = start({rank: self._board.slot(rank) for rank in running}, now)
            self._report.signalled |= dict.fromkeys(running, time.time())  # some may end at the agreed step
            patience_s = 0.0 if self._boundary is None else min(self._boundary.limit_s, grace_s)
            self._escalate_by(Escalation.after_interrupt(now, grace_s, patience_s))

    def _begin_termination(self) -> None:
        grace_s = self._requests.termination_grace_s
        slots = {rank: self._board.slot(rank) for rank in self._running.receivers}
        self._termination = Termination(self._requests, time.monotonic(), grace_s, self._active_pids(), slots)
        self._note(f"SIGTERM received: ranks have {grace_s:g} s to save their work and return")

    def _poll_termination(self) -> None:
        if self._termination is None:
            return
        if text := self._termination.poll(time.monotonic(), self._active_pids()):
            self._note(text)

    def _note(self, text: str, kind: str = "note") -> None:
        self._emit(Note.of_job(text, kind))

    def _check_peers(self) -> None:
        if self._peers is None:
            return
        if self._peers.is_closed and self._peers in self._selector.get_map():
            self._selector.unregister(self._peers)  # otherwise its end of file would keep waking the loop
        if self._peers.must_end:
            self._begin_escalation()

    def _begin_escalation(self) -> None:
        """Stop all ranks after a failure, a hang or a slow exit, unless they are already being stopped."""
        if self._escalation is None:
            grace_s = self._attempt.spec.interrupt_grace_s
            self._escalate_by(Escalation.after_failure(time.monotonic(), grace_s))

    def _escalate_by(self, escalation: Escalation) -> None:
        """Stop all ranks as ``escalation`` says. Release ranks that are waiting for the debugger at a failure."""
        self._escalation = escalation
        if self._debugger is not None:
            self._debugger.release()

    def _escalate(self) -> None:
        if self._escalation is None:
            return
        now, spared = time.monotonic(), self._spared()
        self._escalation.postpone(now, spared)
        if text := self._sending.describe_wait(spared, self._attempt.spec.interrupt_grace_s):
            self._note(text)
        for rank, signum in self._escalation.due(now, self._alive - spared, self._has_noticed):
            if self._boundary is not None:
                self._boundary.withdraw()
                if signum == signal.SIGINT and self._boundary.has_stopped(rank):
                    continue  # it ended at the agreed step
            self._report.signalled.setdefault(rank, time.time())
            if signum == signal.SIGKILL:
                self._killed_s.setdefault(rank, time.monotonic())
            self._group.signal(rank, signum)

    def _abandon_unkillable(self) -> None:
        """Abandon processes that SIGKILL does not end: a driver or a file system may hold them forever."""
        now = time.monotonic()
        for rank in sorted(self._killed_s.keys() & self._alive):
            if now - self._killed_s[rank] >= KILL_PATIENCE_S:
                self._abandon(rank)

    def _abandon(self, rank: int) -> None:
        pid = self._group.pids().get(rank)
        # A forkserver that blocks before it starts its workers has not reported their pids.
        name, hint = f"rank {rank}", ""
        if pid is not None:
            name = f"{name} (pid {pid})"
            hint = f"; as root, cat /proc/{pid}/stack shows what it is waiting for"
        text = (
            f"{name} did not end within {KILL_PATIENCE_S:g} s of SIGKILL: a device driver or a file system is blocking "
            f"it. The job continued without it. The process keeps its memory and devices until the system ends it{hint}"
        )
        self._group.abandon(rank)
        self._watch_ends()
        self._report.unkillable[rank] = text
        now, status = time.time(), ExitStatus(-signal.SIGKILL)
        self._report.exits[rank] = (status, now)
        self._note(text, "warning")
        self._running.guardian.watch_only(self._group.process_groups())
        self._emit(Exited(rank=rank, time_s=now, status=status, was_stopped=True))

    def _has_noticed(self, rank: int) -> bool:
        return self._board.slot(rank).read(rank).interrupts > 0

    # --- what takes several rounds -------------------------------------------------------------------------------

    def _judge_hang(self) -> None:
        """Continue to collect stacks; if they show a hang and the user has set ``on_hang="stop"``, end the workers."""
        hang = self._hangs.poll(self._done()) if self._hangs.is_asking else None
        if hang is not None and self._attempt.spec.on_hang == "stop" and self._escalation is None:
            # If every function has returned, there is a result, and only the states have yet to arrive.
            if running := sorted(self._alive - self._report.returned.keys()):
                self._report.hang = hang.reported(running)
            self._begin_escalation()

    def _poll_agreement(self) -> None:
        """Continue the agreement on the step at which all ranks leave their loops."""
        if self._agreement is not None and not self._agreement.is_settled:
            self._agreement.poll(self._alive - self._report.returned.keys(), time.monotonic())
            self._report.stopped_early = self._agreement.is_settled
        if self._boundary is not None:
            self._boundary.poll(self._alive - self._report.returned.keys(), time.monotonic())
            if self._boundary.is_withdrawn and self._escalation:
                self._escalation.begin_now(time.monotonic())

    def _active_pids(self) -> dict[int, int]:
        """Return rank -> pid, for the ranks whose function is running or that are still sending states."""
        running = (self._alive & self._started) - self._done() - self._report.failed.keys()
        return {rank: pid for rank, pid in self._group.pids().items() if rank in running}

    def _done(self) -> set[int]:
        """Return the ranks that have sent everything, and a session's idle ranks."""
        done = {reading.rank for reading in self._board.read() if reading.state is WorkerState.DONE}
        return self._report.delivered | done

    # --- what the clock triggers --------------------------------------------------------------------------

    def _tick(self) -> None:
        self._next_tick = time.monotonic() + TICK_S
        if not self._running.guardian.is_started:
            self._do_deferred()
        self._read_logs()
        readings = self._read_board()
        self._emit_readings(readings)
        for event in self._memory_sampler.sample(self._active_pids()):
            self._report.host_memory[event.rank] = event
            self._emit(event)
        for use in self._running.devices.sample():
            self._emit(use)
        self._poll_termination()
        self._inspect(readings)
        for watcher in self._watchers:
            watcher.collect(self._alive)
        self._collectives.compare(self._report, self._active_pids(), self._begin_escalation)
        self._check_lingering()

    def _read_logs(self, asking: Set[int] = frozenset()) -> None:
        """Report new output: complete lines, and everything from ranks that are ``asking`` for input or in pdb."""
        at_prompts = self._debugger.take_arrived() if self._debugger is not None else set()
        for rank, tail in self._running.tails.items():
            for event in tail.read_rest() if rank in at_prompts | asking else tail.read():
                self._hangs.count(rank, event)
                self._emit(event)
        if at_prompts:
            self._emit_readings(self._read_board())
            self._emit(InputAwaited())

    def _inspect(self, readings: Sequence[SlotReading]) -> None:
        """Record host memory, and check the progress of the workers."""
        now = time.monotonic()
        if now < self._next_inspection:
            return
        self._next_inspection = now + _INSPECTION_S
        if self._debugger is not None and self._debugger.prompts:
            self._hangs.begin_anew()  # ranks may be waiting for a rank that is in pdb
            return
        pids = self._active_pids()
        self._running.memory.update()
        self._hangs.inspect(readings, pids)

    def _read_board(self) -> list[SlotReading]:
        readings = self._board.read()
        if self._peers is None:
            return readings
        slots = {rank: self._board.slot(rank) for rank in self._alive - self._report.returned.keys()}
        return self._peers.exchange(readings, self._report, slots)

    def _check_lingering(self) -> None:
        """Kill workers that have returned from the function but do not exit, and emit a note."""
        if self._escalation is not None or not self._alive <= self._report.delivered:
            self._lingering_since = None
            return
        now = time.monotonic()
        if self._lingering_since is None:
            self._lingering_since = now
        elif now - self._lingering_since > _LINGER_S:
            text = (
                f"{formatting.ranks(self._alive)}: the function returned {_LINGER_S:.0f} s ago, but an exit "
                "handler or a thread is still running, so the process is killed. Its result is kept."
            )
            self._note(text)
            self._begin_escalation()

    # --- end -----------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read pipes, logs and the board to their end."""
        for rank in self._running.receivers:
            self._receive(rank)
        for tail in self._running.tails.values():
            for event in tail.read_rest():
                self._emit(event)
        self._spans.collect()
        self._collectives.conclude(self._report)
        self._report.last_readings = self._read_board()
        self._emit_readings(self._report.last_readings)

    def _collect(self) -> dict[int, RankResult]:
        """Read the outboxes of the ranks that returned, or that sent their states after an interrupt."""
        report = self._report
        locations = report.value_locations
        return {
            worker.rank: self._read_outbox(
                worker.outbox_fd, locations[worker.rank], report.sent_states.get(worker.rank, {})
            )
            for worker in self._running.assignments
            if worker.outbox_fd >= 0 and worker.rank in locations
        }


def _nothing() -> None:
    """Do nothing while ranks are waiting for input to pdb."""

"""A launcher's connection to the other nodes: it waits for them, sends summaries and handles heartbeats.

    next_world ──> attempt, run by the supervisor ──> conclude ──> next_world ... until the agent ends
                        │ receive, exchange
                      agent

``agent_client.py`` is the agent's client; ``peer_states.py`` holds the state of the other nodes. The link neither
starts nor signals workers: :class:`NodeRunner` runs a job through it. The agent decides on restarts, together with the
agents of the other nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.root_cause import own_failures
from nblaunch.errors import JobCancelled, LaunchError
from nblaunch.events import Event, Note, ValueLocation
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.plan import replan_start_method
from nblaunch.launcher.requests import JobRequests
from nblaunch.launcher.runner import JobRunner
from nblaunch.nodes import messages, network
from nblaunch.nodes.agent_client import AgentClient
from nblaunch.nodes.messages import (
    Heartbeat,
    Node,
    PeerHeartbeats,
    StopState,
    StopWorkers,
    Summary,
    WorkersEnded,
    WorldFormed,
)
from nblaunch.nodes.peer_states import NodesStopAgreement, PeerStates, replies_of
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.board import Slot, SlotReading
from nblaunch.wire.outbox import RankResult
from nblaunch.wire.stop_agreement import Boundary, on_boundary

_TICK_S = 0.1
_SUMMARY_S = 0.4
"""Seconds between summaries for the other nodes."""

_CAUSE_SLACK_S = 1.5
_FIRST_NOTE_S = 3.0
"""Seconds of waiting after which the user is notified."""

_FINAL_WAIT_S = 2.0
_AGENT_SLACK_S = 30.0
"""Extra seconds for the agent to start on a busy machine, and for torch to detect its timeout."""


class _Counts:
    """Heartbeat counts of the other nodes; a node's count rises as long as the node is alive.

    Heartbeats of earlier launches stay in the store, but their count does not rise.

    Args:
        silence_s: seconds after which a node whose count has not risen is considered silent.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._now_s = 0.0
        self._first: dict[str, int] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def update(self, heartbeats: Iterable[Heartbeat], now_s: float) -> None:
        """Record the last heartbeats."""
        self._now_s = now_s
        for heartbeat in heartbeats:
            self._first.setdefault(heartbeat.id, heartbeat.count)
            if heartbeat.count != self._last.get(heartbeat.id, (-1, 0.0))[0]:
                self._last[heartbeat.id] = heartbeat.count, now_s

    def has_risen(self, heartbeat: Heartbeat) -> bool:
        """Return whether the node has been alive during this launch."""
        return heartbeat.count > self._first[heartbeat.id]

    def is_silent(self, heartbeat: Heartbeat) -> bool:
        """Return whether the node has sent no heartbeat for too long."""
        return self._now_s - self._last[heartbeat.id][1] > self._silence_s


class PeersLink:
    """A launcher's connection to the other nodes of its job; must be closed. Implements ``launcher.attempt.Peers``.

    Args:
        emit_readings: passes readings to the listeners, even without workers, so that the listeners can publish them.

    Raises:
        LaunchError: the rendezvous is impossible here, because the port is in use or the address is unknown.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        num_workers: int,
        log_path: str,
        requests: JobRequests,
        emit: Callable[[Event], None],
        emit_readings: Callable[[Sequence[SlotReading]], None],
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._emit = emit
        self._emit_readings = emit_readings
        self._agent = AgentClient(spec, num_workers, log_path)
        self._readings: list[SlotReading] = []
        self._last_summary = Summary(-1, 0.0)
        self._last_summary_s = 0.0
        self._stop = StopState()
        self._first_rank = 0
        self._restarts_left = spec.max_restarts
        self._counts = _Counts(self._agent.silence_s)
        self._has_met = False
        self._is_finished = False
        self._peers = self._states_of(())

    def close(self) -> None:
        """End the agent, which notifies the other nodes."""
        self._agent.close()

    def _states_of(self, nodes: Sequence[Node], restart_count: int = 0) -> PeerStates:
        agent = self._agent
        return PeerStates(nodes, time.monotonic(), agent.silence_s, agent.patience_s, restart_count)

    # --- between attempts ----------------------------------------------------------------------------------------

    def next_world(self) -> WorldFormed | None:
        """Wait until all nodes have joined; return None if the workers are not started again.

        Raises:
            KeyboardInterrupt: the job was interrupted while it was waiting.
            JobCancelled: the job was cancelled while it was waiting.
            LaunchError: the first rendezvous failed.
        """
        began_s = time.monotonic()
        last_note = ""
        while True:
            wait([self._agent.fileno(), self._requests.fileno()], _TICK_S)
            self.receive()
            self._emit_readings(self._peers.merged(self._readings))
            world = self._agent.take_world()
            if world is not None:
                self._enter(world)
                return world
            if not self._keep_agent():
                return None
            self._counts.update(self._agent.heartbeats, time.monotonic())
            self._check_settings()
            self._handle_requests()
            if self._is_finished:  # other nodes may continue to train as long as their heartbeats arrive
                if reason := self._reason_to_leave():
                    self._agent.leave(reason)
                    return None
                self._pass_on_stop()
                continue
            waited_s = time.monotonic() - began_s
            if waited_s > self._patience_for_agent():
                self._give_up()
                return None
            if waited_s > _FIRST_NOTE_S:
                last_note = self._note_joining(last_note)

    def _reason_to_leave(self) -> str:
        """Return why this node leaves after its ranks have returned, or an empty string while it should wait."""
        for text in self._peers.check(time.monotonic()):
            self._note(text)
        if self._requests.interrupts:
            return "was interrupted"
        # If the agent is taking part in another rendezvous, it will announce another start or an error.
        return "" if self._peers.is_any_expected or self._agent.is_changing else messages.FINISHED

    def _pass_on_stop(self) -> None:
        """Send a stop request made after this node's ranks returned, because ranks on other nodes are still running."""
        is_wanted = self._requests.wants_stop or self._requests.terminations > 0
        if is_wanted and not self._stop.is_wanted and not self._agent.is_changing:
            self._stop.is_wanted = True
            self._agent.send(replace(self._last_summary, stop=replace(self._stop)))

    def _enter(self, world: WorldFormed) -> None:
        node_rank = world.topology.node_rank
        others = [node for node in world.nodes if node.node_rank != node_rank]
        self._peers = self._states_of(others, world.restart_count)
        self._peers.update(self._agent.heartbeats, time.monotonic())
        self._readings = []
        self._stop = StopState()
        self._first_rank = world.topology.rank
        self._has_met = True
        self._is_finished = False

    def _keep_agent(self) -> bool:
        """Return whether there is an agent; replace an agent that has lost the connection to the store."""
        agent = self._agent
        if agent.ended is None and self._has_met and not self._is_finished and agent.is_cut_off():
            agent.end(f"the rendezvous at {agent.rendezvous.endpoint} no longer responds", can_retry=True)
        ended = agent.ended
        if ended is None:
            return True
        if ended.can_retry and self._has_met and self._restarts_left > 0 and not self._is_finished:
            self._note(f"{ended.error}; waiting for the rendezvous to come back")
            self._restarts_left -= 1
            agent.restart(self._restarts_left)
            return True
        self._report_end(ended.error)
        return False

    def _patience_for_agent(self) -> float:
        """Return the timeout in seconds for an agent that may hang because it lost the connection to the store."""
        return self._spec.rendezvous_timeout_s + _AGENT_SLACK_S if self._may_meet else _FINAL_WAIT_S

    @property
    def _may_meet(self) -> bool:
        """Whether a rendezvous may follow: the first, another after a failure, or one that admits more nodes."""
        return not self._has_met or self._spec.max_restarts > 0 or self._agent.is_changing

    def _give_up(self) -> None:
        self._agent.leave("timed out in the rendezvous")
        if self._may_meet:
            where, timeout_s = self._agent.rendezvous.endpoint, self._spec.rendezvous_timeout_s
            error = (
                f"not all nodes joined the rendezvous at {where} within {timeout_s:g} s, "
                "and this node's agent does not respond"
            )
            self._agent.end(error)
            self._report_end(error)

    def _report_end(self, error: str) -> None:
        if not self._has_met:
            raise LaunchError(error or "the rendezvous ended before all nodes had joined")
        if error and not self._is_finished:
            self._note(error)

    def _handle_requests(self) -> None:
        self._requests.acknowledge()
        if self._requests.is_cancelled:
            self._agent.leave("was cancelled")
            raise JobCancelled(f"{self._spec.function_name} was cancelled while waiting for other nodes")
        if (self._requests.interrupts or self._requests.terminations) and not self._is_finished:
            self._agent.leave("was interrupted")
            raise KeyboardInterrupt

    def _check_settings(self) -> None:
        """Raise LaunchError if nodes have different settings: they would wait for each other until the timeout."""
        if self._has_met:
            return
        settings = self._agent.rendezvous.shared_settings
        for heartbeat in self._agent.heartbeats:
            if self._counts.has_risen(heartbeat) and heartbeat.settings != settings:
                self._agent.leave("was launched with different settings")
                raise LaunchError(
                    f"{heartbeat} was launched with {heartbeat.settings}, but this node (node "
                    f"{self._spec.node_rank}) was launched with {settings}; use the same settings on all nodes"
                )

    def _note_joining(self, last_note: str) -> str:
        """Emit a note with the nodes that have joined or ended, if it differs from the last one; return its text."""
        spec, agent, counts = self._spec, self._agent, self._counts
        living = [heartbeat for heartbeat in agent.heartbeats if counts.has_risen(heartbeat)]
        silent = {str(heartbeat) for heartbeat in living if counts.is_silent(heartbeat)}
        joining = [
            str(heartbeat)
            for heartbeat in living
            if heartbeat.state == messages.JOINING and not counts.is_silent(heartbeat)
        ]
        if len(joining) + 1 >= spec.max_nodes:
            return last_note  # torch's rendezvous takes a second or two to complete
        nodes = ", ".join(sorted([f"node {spec.node_rank} (this one)", *joining]))
        text = f"waiting at {agent.rendezvous.endpoint} for {spec.num_nodes} nodes; joined: {nodes}"
        if lost := ", ".join(sorted(silent.difference(joining))):
            text += f"; no longer there: {lost} (no heartbeat for {agent.silence_s:g} s). Launch again on that machine"
        if text != last_note:
            self._note(text, "note")
        return text

    @property
    def last_error(self) -> str:
        """Why the last rendezvous failed; empty if it succeeded."""
        return self._agent.ended.error if self._agent.ended is not None else ""

    # --- while workers run ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the agent sends a message."""
        return self._agent.fileno()

    def worker_settings(self, topology: Topology) -> dict[str, str | None]:
        """Return environment variables that this node's workers need in addition to their topology."""
        return network.worker_settings(topology, self._agent.address)

    def receive(self) -> None:
        """Handle new messages from the agent."""
        for message in self._agent.receive():
            self._handle(message)
        if self._is_alone and not self._has_lost_agent and self._peers.failures.labels:
            self._peers.blame_silent(time.monotonic())

    @property
    def is_closed(self) -> bool:
        """Whether the agent has closed its connection."""
        return self._agent.is_closed

    def _handle(self, message: Event) -> None:
        if isinstance(message, PeerHeartbeats):
            events, notes = self._peers.update(message.heartbeats, time.monotonic())
            for event in events:
                self._emit(event)
            for text in notes:
                self._note(text)
        elif isinstance(message, Note):
            self._emit(message)
        elif isinstance(message, StopWorkers):
            self._peers.failures.wants_restart = True
            self._note(message.reason)

    @property
    def must_end(self) -> bool:
        """Whether the workers of this node must stop because of other nodes."""
        return self._is_alone or self._peers.must_end

    @property
    def _is_alone(self) -> bool:
        """Whether the agent has failed, so that no more heartbeats arrive."""
        ended = self._agent.ended
        return ended is not None and not ended.is_success

    @property
    def _has_lost_agent(self) -> bool:
        """Whether the agent has ended and will not be replaced, so that silence from other nodes means nothing."""
        ended = self._agent.ended
        return ended is not None and bool(ended.error) and not ended.can_retry

    def agreement(self, slots: Mapping[int, Slot]) -> NodesStopAgreement:
        """Start an agreement with the other nodes on the step at which all ranks leave their loops."""
        peers = self._peers
        return NodesStopAgreement(slots, self._stop, peers.stop_states, peers.failures)

    def boundary(self, slots: Mapping[int, Slot], now_s: float) -> Boundary | None:
        """Start an agreement among the ranks on this machine, because only its launcher was interrupted."""
        return on_boundary(slots, now_s)

    def exchange(
        self, readings: Sequence[SlotReading], report: AttemptReport, running: Mapping[int, Slot]
    ) -> list[SlotReading]:
        """Send the state of this node's ranks to the other nodes, and return the readings of all ranks.

        Args:
            report: facts about the attempt; updated with failures on other nodes.
            running: rank -> slot, for ranks of this node whose function has not returned.
        """
        now = time.monotonic()
        self._stop.replies = replies_of(running)
        if any(other.is_wanted for other in self._peers.stop_states.values()):
            self._requests.wants_stop = True
        self._stop.is_wanted = self._requests.wants_stop
        summary_s = _TICK_S / 2 if self._stop.is_wanted else _SUMMARY_S
        if not self._has_lost_agent:
            for text in self._peers.check(now):
                self._note(text)
        report.remote = self._peers.failures
        if now - self._last_summary_s >= summary_s:
            self._last_summary_s = now
            self._agent.send_if_ready(self._summary(readings, report))
        self._readings = list(readings)
        return self._peers.merged(readings)

    def conclude(self, report: AttemptReport) -> None:
        """Report to the agent how this node's workers ended; if the cause is on another node, wait for it."""
        report.remote = self._peers.failures
        # Report the interrupt even if the function has handled it on this node, because ranks on other nodes have not.
        if self._requests.interrupts:
            self._agent.leave("was interrupted")
            return
        if report.cancelled:
            self._agent.leave("was cancelled")
            return
        self._last_summary = summary = self._summary(self._readings, report)
        self._is_finished = report.is_success
        self._agent.send(WorkersEnded(is_success=report.is_success, summary=summary))
        if not report.is_success and not own_failures(report):
            self._wait_for_cause()
            if not report.remote.has_cause and self.last_error:
                report.remote.lost[self._first_rank] = self.last_error

    def _wait_for_cause(self) -> None:
        """If workers failed because another node did not respond, wait until heartbeats show which node has failed."""
        deadline = time.monotonic() + self._agent.silence_s + _CAUSE_SLACK_S
        peers = self._peers
        while peers.can_be_waited_for and not peers.must_end and time.monotonic() < deadline:
            if self._requests.interrupts or self._requests.is_cancelled or self._has_lost_agent:
                return
            # The closed descriptor of an agent that has ended is always readable.
            open_ones = [] if self._agent.is_closed else [self._agent.fileno()]
            wait([self._requests.fileno(), *open_ones], _TICK_S)
            self._requests.acknowledge()
            self.receive()
            for text in peers.check(time.monotonic()):
                self._note(text)
            peers.blame_silent(time.monotonic())
            self._emit_readings(peers.merged(self._readings))

    def _summary(self, readings: Sequence[SlotReading], report: AttemptReport) -> Summary:
        remote = report.remote.labels
        causes = own_failures(report)
        return Summary(
            readings=tuple(messages.for_peers(reading) for reading in readings if reading.rank not in remote),
            # Pickled exceptions and results stay on this machine.
            failed={
                cause.rank: replace(cause.failed, exception=None)
                for cause in causes
                if cause.failed is not None
            },
            exits={cause.rank: (cause.status, cause.time_s) for cause in causes if cause.status is not None},
            returned={
                rank: replace(returned, value_location=ValueLocation(), sends=())
                for rank, returned in report.returned.items()
            },
            epochs=tuple(report.epochs),
            host_memory=tuple(report.host_memory.values()),
            stop=replace(self._stop),
        )

    def _note(self, text: str, kind: str = "warning") -> None:
        self._emit(Note.of_job(text, kind))


class NodeRunner(JobRunner):
    """Runs this node's ranks in a job on several machines, until the agents announce no further attempts."""

    _link: PeersLink | None = None
    _restart_count = 0

    def _start_job(self) -> None:
        """Prepare to start the workers; :meth:`_finish` starts them, because all nodes must join first."""
        self._prepare_starts()

    def _join(self) -> PeersLink:
        """Wait until all nodes have joined, and start this node's workers.

        Raises:
            KeyboardInterrupt: the job was interrupted while it was waiting for other nodes.
            JobCancelled: the job was cancelled while it was waiting for other nodes.
            LaunchError: the nodes did not find each other, or workers could not be started.
        """
        log_path = str(self.log.new_file("agent.log"))
        self._link = link = PeersLink(
            self.spec, self.plan.num_processes, log_path, self.requests, self.emit, self.emit_readings
        )
        self._launch_settled.set()  # a cell need not wait for other machines
        world = link.next_world()
        assert world is not None, "an agent that ends before the first rendezvous has an error"
        self.plan = replan_start_method(self.plan, self.spec)
        self._start_in_world(world)
        return link

    def _start_in_world(self, world: WorldFormed) -> None:
        self.topology, self._restart_count = world.topology, world.restart_count
        self._announce_attempt()
        self._start_attempt()

    def _make_attempt(self) -> Attempt:
        return replace(super()._make_attempt(), restart_count=self._restart_count, peers=self._link)

    def _finish_attempts(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Run attempts as long as the agent announces new ones.

        Raises:
            LaunchError: workers could not be started again.
        """
        link = self._join()
        report, rank_results = self._finish_attempt(link)
        # Nodes whose ranks have returned remain in the job: after SIGTERM, others may still be saving a checkpoint.
        while (report.is_success or not self._must_not_restart(report)) and (world := link.next_world()):
            self._next_attempt()
            self._start_in_world(world)
            report, rank_results = self._finish_attempt(link)
        if link.last_error not in ("", *report.remote.lost.values()) and not report.is_success:
            self.past_failures.append(link.last_error)
        self._leave()
        return report, rank_results

    def _finish_attempt(self, link: PeersLink) -> tuple[AttemptReport, dict[int, RankResult]]:
        report, rank_results = self._supervise()
        link.conclude(report)
        is_change = report.remote.wants_restart and not report.remote.has_cause
        failed = not (report.is_success or self._must_not_restart(report) or is_change)
        if failed and self.spec.max_restarts:
            self.emit(Note.of_job(self._record_failure(report), "warning"))
        return report, rank_results

    def _leave(self) -> None:
        """End the agent, which notifies the other nodes."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _release(self) -> None:
        self._leave()
        super()._release()

"""This node among others: what they are told of it while its workers run, and what it heeds of their news.

    course ──> next_world ──> attempt, watched by the supervisor ──> conclude ──> next_world ... until the agent is done
                                  │ hear, exchange
                                agent

Never starts or signals a worker. The agent is ``agent_line.py``'s, the wait for other nodes ``node_wait.py``'s, what
is known of them ``neighbours.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nblaunch import env
from nblaunch.events import Event, Note
from nblaunch.launch import network
from nblaunch.launch.agent_line import AgentLine
from nblaunch.launch.common_stop import CommonStop
from nblaunch.launch.diagnosis.report import AttemptReport
from nblaunch.launch.diagnosis.root_cause import own_failures
from nblaunch.launch.neighbours import Neighbours
from nblaunch.launch.node_wait import NodeWait
from nblaunch.launch.requests import StopRequests
from nblaunch.nodes import messages
from nblaunch.nodes.messages import (
    PeerHeartbeats,
    StopState,
    StopWorkers,
    StoreHosted,
    Summary,
    WorkersEnded,
    WorldFormed,
)
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire.board import Sample, Slot
from nblaunch.wire.polling import wait_until_readable

_TICK_S = 0.1
_SUMMARY_S = 0.4
"""Between two summaries for the other nodes."""

_CAUSE_SLACK_S = 1.5


class NodeLink:
    """A launcher's connection to the other nodes of its job. Use it as a context manager.

    Args:
        spec: what is launched.
        num_workers: of this node.
        log_path: file for what the agent prints.
        requests: what people ask of the job.
        tell: takes every event, for the listeners.
        show: takes samples; called while there are no workers, too, so that what was told is shown.

    Raises:
        LaunchError: the nodes can't meet from here: the port is taken, the address unknown.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        num_workers: int,
        log_path: str,
        requests: StopRequests,
        tell: Callable[[Event], None],
        show: Callable[[Sequence[Sample]], None],
    ) -> None:
        self._requests = requests
        self._tell = tell
        self._show = show
        self._line = AgentLine(spec, num_workers, log_path)
        self._wait = NodeWait(spec, self._line, requests, self._note)
        self._samples: list[Sample] = []
        self._last_summary_s = 0.0
        self._stopping = StopState()
        self._leads = False
        self._first_rank = 0
        self._is_finished = False
        self._neighbours = self._neighbours_of(())

    def __enter__(self) -> NodeLink:
        return self

    def __exit__(self, *details: object) -> None:
        self._line.close()

    def _neighbours_of(self, members: Sequence[messages.Node], start: int = 0) -> Neighbours:
        line = self._line
        return Neighbours(members, time.monotonic(), line.silence_s, line.patience_s, start)

    # --- between attempts ----------------------------------------------------------------------------------------

    def first_world(self) -> WorldFormed:
        """Wait until all nodes have met; raises what :meth:`next_world` raises."""
        formed = self.next_world()
        assert formed is not None, "an agent that ends before the first meeting says why"
        return formed

    def next_world(self) -> WorldFormed | None:
        """Wait until all nodes have met; None when the agent says that there is nothing more to do.

        Raises:
            KeyboardInterrupt: a person did not want to wait.
            JobCancelled: likewise.
            LaunchError: the nodes did not find each other, and never had before.
        """
        formed = self._wait.until_met(self._look, self._is_finished)
        if formed is not None:
            self._enter(formed)
        return formed

    def _look(self) -> bool:
        self.hear()
        self._show(self._neighbours.merged(self._samples))
        return self._neighbours.is_anybody_expected

    def _enter(self, formed: WorldFormed) -> None:
        own = formed.topology.node_rank
        others = [member for member in formed.nodes if member.node_rank != own]
        self._neighbours = self._neighbours_of(others, formed.restart_count)
        self._neighbours.learn(self._line.news, time.monotonic())
        self._samples = []
        self._stopping = StopState()
        self._leads = own == 0
        self._first_rank = formed.topology.rank
        self._is_finished = False

    @property
    def last_error(self) -> str:
        """Why the nodes could not meet once more; empty where that is not so."""
        return self._line.over.error if self._line.over is not None else ""

    # --- while workers run ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when the agent has something to say."""
        return self._line.fileno()

    def worker_settings(self, place: Topology, restart_count: int) -> dict[str, str | None]:
        """Environment of this node's workers beyond what their topology says."""
        chosen = network.interface_settings(network.interface_of(self._line.address))
        given = env.snapshot()
        own = {name: value for name, value in chosen.items() if place.num_nodes > 1 and name not in given}
        return {**own, "TORCHELASTIC_RESTART_COUNT": str(restart_count)}

    def tell_port(self, port: int) -> None:
        """This launcher hosts the workers' store, and listens on ``port``."""
        self._line.send(StoreHosted(-1, time.time(), port=port))

    def hear(self) -> None:
        """Take in what the agent has said."""
        for message in self._line.hear():
            self._handle(message)
        if self._is_alone and self._neighbours.elsewhere.places:
            self._neighbours.blame_silent(time.monotonic())

    @property
    def is_closed(self) -> bool:
        """Whether the agent will say nothing more."""
        return self._line.is_closed

    def _handle(self, message: Event) -> None:
        if isinstance(message, PeerHeartbeats):
            events, notes = self._neighbours.learn(message.heartbeats, time.monotonic())
            for event in events:
                self._tell(event)
            for text in notes:
                self._note(text)
        elif isinstance(message, Note):
            self._tell(message)
        elif isinstance(message, StopWorkers):
            self._neighbours.elsewhere.wants_restart = True
            self._note(message.reason)

    @property
    def must_stop(self) -> bool:
        """Whether the workers of this node have to end, because of what happened elsewhere."""
        return self._is_alone or self._neighbours.must_stop

    @property
    def _is_alone(self) -> bool:
        """Whether the agent has failed, so that nothing is heard of other nodes any more."""
        over = self._line.over
        return over is not None and not over.is_success

    def agreement(self, slots: Mapping[int, Slot]) -> CommonStop:
        """Agree with the others on the step at which all ranks leave their loops."""
        return CommonStop(slots, self._leads, self._stopping, self._neighbours.stopping, time.monotonic())

    def exchange(
        self, samples: Sequence[Sample], report: AttemptReport, answers: Mapping[int, tuple[int, int]]
    ) -> list[Sample]:
        """Tell the others about this node's ranks, and return what is known of all.

        Args:
            samples: of the board.
            report: how the attempt goes; gets what is known of other nodes.
            answers: as in :class:`nblaunch.nodes.messages.StopState`.
        """
        now = time.monotonic()
        self._stopping.answers = answers
        if any(other.is_wanted for other in self._neighbours.stopping.values()):
            self._requests.wants_stop = True
        self._stopping.is_wanted = self._requests.wants_stop
        summary_s = _TICK_S / 2 if self._stopping.is_wanted else _SUMMARY_S
        for text in self._neighbours.look(now):
            self._note(text)
        report.elsewhere = self._neighbours.elsewhere
        if now - self._last_summary_s >= summary_s:
            self._last_summary_s = now
            self._line.send_if_ready(self._summary(samples, report))
        self._samples = list(samples)
        return self._neighbours.merged(samples)

    def conclude(self, report: AttemptReport) -> None:
        """The workers of this node have ended: tell the agent, and find out why if the reason is not here."""
        report.elsewhere = self._neighbours.elsewhere
        if report.interrupted or report.cancelled:
            self._line.leave("was interrupted" if report.interrupted else "was cancelled")
            return
        summary = self._summary(self._samples, report)
        self._is_finished = report.is_success
        self._line.send(WorkersEnded(-1, time.time(), is_success=report.is_success, summary=summary))
        if not report.is_success and not own_failures(report):
            self._wait_for_cause()
            if not report.elsewhere.has_cause and self.last_error:
                report.elsewhere.lost[self._first_rank] = self.last_error

    def _wait_for_cause(self) -> None:
        """Workers ended because others did not answer: wait until it is known who, as long as that may take."""
        deadline = time.monotonic() + self._line.silence_s + _CAUSE_SLACK_S
        neighbours = self._neighbours
        while neighbours.can_be_waited_for and not neighbours.must_stop and time.monotonic() < deadline:
            if self._requests.interrupts or self._requests.is_cancelled:
                return
            wait_until_readable([self._line.fileno(), self._requests.fileno()], _TICK_S)
            self._requests.acknowledge()
            self.hear()
            for text in neighbours.look(time.monotonic()):
                self._note(text)
            neighbours.blame_silent(time.monotonic())
            self._show(neighbours.merged(self._samples))

    def _summary(self, samples: Sequence[Sample], report: AttemptReport) -> Summary:
        elsewhere = report.elsewhere.places
        own = own_failures(report)
        return Summary(
            -1,
            time.time(),
            samples=tuple(sample for sample in samples if sample.rank not in elsewhere),
            failed={
                cause.rank: messages.failed_for_peers(cause.failed)
                for cause in own
                if cause.failed is not None
            },
            exits={cause.rank: (cause.status, cause.time_s) for cause in own if cause.status is not None},
            finished={
                rank: messages.finished_for_peers(finished) for rank, finished in report.finished.items()
            },
            stop=replace(self._stopping),
        )

    def _note(self, text: str, kind: str = "warning") -> None:
        self._tell(Note.of_job(text, kind))

"""This node among others: its agent, what it knows of the other nodes, and the worlds that come to be one by one.

    job ──> next_world ──> attempt, watched by the supervisor ──> conclude ──> next_world ... until the agent is done
                                  │ hear, exchange
                                agent

Owns the agent's process and everything about other nodes. Never starts or signals a worker.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from nblaunch import env
from nblaunch.engines.elastic import AgentProcess, Meeting, Orders
from nblaunch.errors import JobCancelled, LaunchError
from nblaunch.events import Event, Note
from nblaunch.launch import network
from nblaunch.launch.common_stop import CommonStop
from nblaunch.launch.diagnosis.report import AttemptReport
from nblaunch.launch.diagnosis.root_cause import own_failures
from nblaunch.launch.neighbours import Neighbours
from nblaunch.launch.rendezvous import RendezvousHost
from nblaunch.launch.requests import StopRequests
from nblaunch.spec import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT, LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire import nodes
from nblaunch.wire.board import Sample, Slot
from nblaunch.wire.nodes import (
    Ended,
    Formed,
    Hosting,
    Leave,
    News,
    NodeNews,
    Over,
    Stopping,
    StopWorkers,
    Summary,
)

_TICK_S = 0.1
_SUMMARY_S = 0.4
"""Between two summaries for the other nodes."""

_FIRST_WORD_S = 3.0
"""How long nodes may look for each other before somebody is told about it."""

_CAUSE_SLACK_S = 1.5
_LAST_WORD_S = 2.0
_AGENT_SLACK_S = 15.0
"""For an agent's own start, and for torch to notice that its time is over."""


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
        self._spec = spec
        self._num_workers = num_workers
        self._log_path = log_path
        self._requests = requests
        self._tell = tell
        self._show = show
        conf = spec.rdzv_conf or {}
        self._silence_s = float(conf.get("keep_alive_interval", DEFAULT_KEEP_ALIVE_INTERVAL_S))
        max_attempt = float(conf.get("keep_alive_max_attempt", DEFAULT_KEEP_ALIVE_MAX_ATTEMPT))
        self._patience_s = self._silence_s * max_attempt
        self._restarts_left = spec.max_restarts
        self._formed: Formed | None = None
        self._over: Over | None = None
        self._news: tuple[NodeNews, ...] = ()
        self._first_beats: dict[str, int] = {}
        self._samples: list[Sample] = []
        self._last_summary_s = 0.0
        self._stopping = Stopping()
        self._leads = False
        self._first_rank = 0
        self._is_finished = False
        self._has_met = False
        self.is_closed = False
        self._neighbours = self._neighbours_of(())
        self._open_agent(spec.max_restarts)

    def __enter__(self) -> NodeLink:
        return self

    def __exit__(self, *details: object) -> None:
        if self._over is None:
            self.leave("went away")
        self._agent.close()

    def _open_agent(self, max_restarts: int) -> None:
        spec = self._spec
        name, port = spec.rendezvous_address
        host = network.resolve(name, port)
        listener = self._listen(host, port)
        listen_fd = listener.fileno() if listener is not None else -1
        try:
            self.address = host if listener is not None else network.address_towards(host, port)
            meeting = Meeting(
                backend=spec.rdzv_backend, host=host, port=port, listen_fd=listen_fd, run_id=spec.rdzv_id,
                node_rank=spec.node_rank, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes,
                timeout_s=spec.rendezvous_timeout_s, conf=dict(spec.rdzv_conf or {}),
            )  # fmt: skip
            make = partial(
                _orders, meeting, self._num_workers, max_restarts, spec, self.address, self._log_path
            )
            self._agent = AgentProcess(make, listen_fd)
        finally:
            if listener is not None:
                listener.close()
        self._meeting = meeting
        self._over = None
        self._last_news_s = time.monotonic() + spec.rendezvous_timeout_s  # it need not have any before

    def _listen(self, host: str, port: int) -> RendezvousHost | None:
        """The socket of the store, where this node is the one to host it."""
        wanted = (self._spec.rdzv_conf or {}).get("is_host")
        if self._spec.rdzv_backend == "static":
            wanted = self._spec.node_rank == 0
        return None if wanted is False else network.listen(host, port, is_optional=wanted is None)

    def _neighbours_of(self, members: Sequence[nodes.Member], start: int = 0) -> Neighbours:
        return Neighbours(members, time.monotonic(), self._silence_s, self._patience_s, start)

    # --- between attempts ----------------------------------------------------------------------------------------

    def first_world(self) -> Formed:
        """Wait until all nodes have met; raises what :meth:`next_world` raises."""
        formed = self.next_world()
        assert formed is not None, "an agent that ends before the first meeting says why"
        return formed

    def next_world(self) -> Formed | None:
        """Wait until all nodes have met; None when the agent says that there is nothing more to do.

        Raises:
            KeyboardInterrupt: a person did not want to wait.
            JobCancelled: likewise.
            LaunchError: the nodes did not find each other, and never had before.
        """
        began_s = time.monotonic()
        patience_s = self._patience_for_agent()
        said = ""
        while True:
            select.select([self._agent.fileno(), self._requests.fileno()], [], [], _TICK_S)
            self.hear()
            self._show(self._neighbours.merged(self._samples))
            if self._formed is not None:
                formed, self._formed = self._formed, None
                return self._enter(formed)
            if self._over is None and self._is_agent_cut_off():
                text = f"the rendezvous at {self._meeting.where} does not answer any more"
                self._over = Over(-1, time.time(), error=text, can_retry=True)
            if self._over is not None and not self._try_again(self._over):
                self._end(self._over)
                return None
            self._check_terms()
            self._heed_requests()
            if self._is_finished and not self._neighbours.is_anybody_expected:
                self.leave(nodes.FINISHED)
                return None
            if time.monotonic() - began_s > patience_s:
                self._give_up()
                return None
            if not self._is_finished and time.monotonic() - began_s > _FIRST_WORD_S:
                said = self._say_who_is_here(said)

    def _enter(self, formed: Formed) -> Formed:
        own = formed.place.node_rank
        others = [member for member in formed.members if member.node_rank != own]
        self._neighbours = self._neighbours_of(others, formed.restart_count)
        self._neighbours.learn(self._news, time.monotonic())
        self._samples = []
        self._stopping = Stopping()
        self._leads = own == 0
        self._first_rank = formed.place.rank
        self._is_finished = False
        self._has_met = True
        return formed

    def _patience_for_agent(self) -> float:
        """Seconds in which the agent must have come to something. One that is cut off from the store may never do."""
        if self._is_finished:
            return math.inf  # others may train on for as long as they are heard of
        if self._has_met and not self._spec.max_restarts:
            return _LAST_WORD_S
        return self._spec.rendezvous_timeout_s + _AGENT_SLACK_S

    def _give_up(self) -> None:
        self.leave("gave up")
        if not self._has_met or self._spec.max_restarts:
            timeout_s = self._spec.rendezvous_timeout_s
            error = f"the nodes did not meet at {self._meeting.where} within {timeout_s:g} s"
            self._over = Over(-1, time.time(), error=error)
            self._end(self._over)

    def _end(self, over: Over) -> None:
        if not self._has_met:
            raise LaunchError(over.error or "the rendezvous was ended before all nodes had met")
        if over.error and not self._is_finished:
            self._note(over.error)

    @property
    def last_error(self) -> str:
        """Why the nodes could not meet once more; empty where that is not so."""
        return self._over.error if self._over is not None else ""

    def _try_again(self, over: Over) -> bool:
        """The node that hosts the store is lost. If that comes back, and restarts are left, so does the job."""
        if not (over.can_retry and self._has_met and self._restarts_left > 0) or self._is_finished:
            return False
        self._note(f"{over.error}; waiting for it to come back")
        self._agent.close(0.0)  # at once, or it may come to, and meet the others for this node once more
        self._restarts_left -= 1
        self._open_agent(self._restarts_left)
        return True

    def _is_agent_cut_off(self) -> bool:
        """Whether it has been waiting for the store for so long that it will not hear of it again by itself.

        The system goes on for a quarter of an hour before it tells a process that a connection leads nowhere.
        """
        is_due = self._has_met and not self._is_finished
        return is_due and time.monotonic() - self._last_news_s > self._patience_s + self._silence_s

    def _heed_requests(self) -> None:
        self._requests.acknowledge()
        if self._requests.is_cancelled:
            self.leave("was cancelled")
            raise JobCancelled(f"{self._spec.function_name} was cancelled while it waited for other nodes")
        if (self._requests.interrupts or self._requests.terminations) and not self._is_finished:
            self.leave("was interrupted")
            raise KeyboardInterrupt

    def _check_terms(self) -> None:
        """Nodes that were launched for different rendezvous would wait for each other until the time is up."""
        if self._has_met:
            return
        for page in self._news:
            # The page of a node that has gone, and was launched anew with other settings, does not change any more.
            is_alive = page.beat > self._first_beats.setdefault(page.id, page.beat)
            if is_alive and page.terms != self._meeting.terms:
                self.leave("was launched with other settings")
                raise LaunchError(
                    f"{page} was launched with {page.terms}, but this one (node "
                    f"{self._spec.node_rank}) with {self._meeting.terms}: launch all nodes with the same"
                )

    def _say_who_is_here(self, said: str) -> str:
        here = [str(news) for news in self._news if news.state == nodes.JOINING]
        spec = self._spec
        if len(here) + 1 >= spec.max_nodes:
            return said  # torch's rendezvous takes a second or two to see that all are here
        own = f"node {spec.node_rank} (this one)"
        text = f"waiting at {self._meeting.where} for {spec.num_nodes} nodes; here: {', '.join(sorted([own, *here]))}"
        if text != said:
            self._note(text, "note")
        return text

    def leave(self, reason: str) -> None:
        """Take no further part, and tell the others why."""
        self._agent.send(Leave(-1, time.time(), reason=reason))
        self._over = Over(-1, time.time())

    # --- while workers run ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when the agent has something to say."""
        return self._agent.fileno()

    def worker_settings(self, place: Topology, restart_count: int) -> dict[str, str | None]:
        """Environment of this node's workers beyond what their topology says."""
        chosen = network.interface_settings(network.interface_of(self.address))
        given = env.snapshot()
        own = {name: value for name, value in chosen.items() if place.num_nodes > 1 and name not in given}
        return {**own, "TORCHELASTIC_RESTART_COUNT": str(restart_count)}

    def tell_port(self, port: int) -> None:
        """This launcher hosts the workers' store, and listens on ``port``."""
        self._agent.send(Hosting(-1, time.time(), port=port))

    def hear(self) -> None:
        """Take in what the agent has said."""
        messages, self.is_closed = self._agent.receive()
        for message in messages:
            self._heed(message)
        if self.is_closed and self._over is None:
            self._over = Over(
                -1,
                time.time(),
                error=f"the process that meets the other nodes has died; its log: {self._log_path}",
            )
        if self._over is not None and not self._over.is_success and self._neighbours.elsewhere.places:
            self._neighbours.blame_silent(time.monotonic())

    def _heed(self, message: Event) -> None:
        if isinstance(message, News):
            self._news = message.nodes
            self._last_news_s = time.monotonic()
            events, notes = self._neighbours.learn(message.nodes, time.monotonic())
            for event in events:
                self._tell(event)
            for text in notes:
                self._note(text)
        elif isinstance(message, Formed):
            self._formed = message
        elif isinstance(message, StopWorkers):
            self._neighbours.elsewhere.wants_restart = True
            self._note(message.reason)
        elif isinstance(message, Over):
            self._over = message

    @property
    def must_stop(self) -> bool:
        """Whether the workers of this node have to end, because of what happened elsewhere."""
        is_alone = self._over is not None and not self._over.is_success
        return is_alone or self._neighbours.must_stop

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
            answers: as in :class:`nblaunch.wire.nodes.Stopping`.
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
            self._agent.send_if_heard(self._summary(samples, report))
        self._samples = list(samples)
        return self._neighbours.merged(samples)

    def conclude(self, report: AttemptReport) -> None:
        """The workers of this node have ended: tell the agent, and find out why if the reason is not here."""
        report.elsewhere = self._neighbours.elsewhere
        if report.interrupted or report.cancelled:
            self.leave("was interrupted" if report.interrupted else "was cancelled")
            return
        summary = self._summary(self._samples, report)
        self._is_finished = report.is_success
        self._agent.send(Ended(-1, time.time(), is_success=report.is_success, summary=summary))
        if not report.is_success and not own_failures(report):
            self._wait_for_cause()
            if not report.elsewhere.has_cause and self.last_error:
                report.elsewhere.lost[self._first_rank] = self.last_error

    def _wait_for_cause(self) -> None:
        """Workers ended because others did not answer: wait until it is known who, as long as that may take."""
        deadline = time.monotonic() + self._silence_s + _CAUSE_SLACK_S
        neighbours = self._neighbours
        while neighbours.can_be_waited_for and not neighbours.must_stop and time.monotonic() < deadline:
            if self._requests.interrupts or self._requests.is_cancelled:
                return
            select.select([self._agent.fileno(), self._requests.fileno()], [], [], _TICK_S)
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
                cause.rank: nodes.without_large_exception(cause.failed)
                for cause in own
                if cause.failed is not None
            },
            exits={cause.rank: (cause.status, cause.time_s) for cause in own if cause.status is not None},
            finished=dict(report.finished),
            stopping=replace(self._stopping),
        )

    def _note(self, text: str, kind: str = "warning") -> None:
        self._tell(Note.of_job(text, kind))


def _orders(
    meeting: Meeting, num_workers: int, max_restarts: int, spec: LaunchSpec, address: str, log_path: str,
    reading_fd: int, writing_fd: int,
) -> Orders:  # fmt: skip
    return Orders(
        meeting=meeting,
        num_workers=num_workers,
        max_restarts=max_restarts,
        monitor_interval_s=spec.monitor_interval_s,
        address=address,
        host_name=socket.gethostname(),
        reading_fd=reading_fd,
        writing_fd=writing_fd,
        log_path=log_path,
    )

"""The launcher's client to its node's agent, and the wait until all nodes of a job have joined.

The client owns the agent's process. What heartbeats of other nodes mean is concluded in ``peers.py``.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable

from nblaunch.errors import JobCancelled, LaunchError
from nblaunch.events import Event
from nblaunch.launcher.rendezvous import RendezvousHost
from nblaunch.launcher.requests import StopRequests
from nblaunch.nodes import messages, network
from nblaunch.nodes.agent_process import AgentConfig, AgentProcess, RendezvousConfig
from nblaunch.nodes.messages import AgentEnded, Heartbeat, Leave, PeerHeartbeats, WorldFormed
from nblaunch.spec import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT, LaunchSpec
from nblaunch.wire.polling import wait_until_readable

_TICK_S = 0.1
_FIRST_NOTE_S = 3.0
"""Seconds in a rendezvous before the user gets a note about it."""

_FINAL_WAIT_S = 2.0
_AGENT_SLACK_S = 15.0
"""For an agent's own start, and for torch to notice that its time is over."""


class AgentClient:
    """The connection of a launcher to its agent.

    Args:
        spec: what is launched.
        num_workers: of this node.
        log_path: file for what the agent prints.

    Attributes:
        address: of this node, as the others reach it.
        rendezvous: where the nodes meet.
        silence_s: seconds without a heartbeat after which the user gets a note about a node.
        patience_s: seconds without a heartbeat after which a node is given up.
        heartbeats: the last ones of all other nodes.
        ended: how the agent has ended; None: it has not.
        is_closed: the agent has closed its end of the connection; it will send nothing more.

    Raises:
        LaunchError: the nodes can't meet from here: the port is taken, the address unknown.
    """

    def __init__(self, spec: LaunchSpec, num_workers: int, log_path: str) -> None:
        self._spec = spec
        self._num_workers = num_workers
        self._log_path = log_path
        conf = spec.rdzv_conf or {}
        self.silence_s = float(conf.get("keep_alive_interval", DEFAULT_KEEP_ALIVE_INTERVAL_S))
        max_attempt = float(conf.get("keep_alive_max_attempt", DEFAULT_KEEP_ALIVE_MAX_ATTEMPT))
        self.patience_s = self.silence_s * max_attempt
        self.heartbeats: tuple[Heartbeat, ...] = ()
        self.ended: AgentEnded | None = None
        self.is_closed = False
        self._world: WorldFormed | None = None
        self._open(spec.max_restarts)

    def _open(self, max_restarts: int) -> None:
        spec = self._spec
        name, port = spec.rendezvous_address
        host = network.resolve(name, port)
        listener = self._listen(host, port)
        listen_fd = listener.fileno() if listener is not None else -1
        try:
            self.address = host if listener is not None else network.address_towards(host, port)
            self.rendezvous = RendezvousConfig(
                backend=spec.rdzv_backend, host=host, port=port, listen_fd=listen_fd, run_id=spec.rdzv_id,
                node_rank=spec.node_rank, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes,
                timeout_s=spec.rendezvous_timeout_s, conf=dict(spec.rdzv_conf or {}),
            )  # fmt: skip
            config = AgentConfig(
                rendezvous=self.rendezvous,
                num_workers=self._num_workers,
                max_restarts=max_restarts,
                monitor_interval_s=spec.monitor_interval_s,
                address=self.address,
                host_name=socket.gethostname(),
                log_path=self._log_path,
            )
            self._agent = AgentProcess(config)
        finally:
            if listener is not None:
                listener.close()
        self.ended = None
        self._last_heartbeats_s = time.monotonic() + spec.rendezvous_timeout_s  # there need not be any before

    def _listen(self, host: str, port: int) -> RendezvousHost | None:
        """Return the socket of the store, where this node is the one to host it."""
        wanted = (self._spec.rdzv_conf or {}).get("is_host")
        if self._spec.rdzv_backend == "static":
            wanted = self._spec.node_rank == 0
        return None if wanted is False else network.listen(host, port, is_optional=wanted is None)

    def restart(self, max_restarts: int) -> None:
        """Start another agent in the place of this one."""
        self._agent.close(0.0)  # at once, or it may recover, and join once more for this node
        self._open(max_restarts)

    def close(self) -> None:
        """End the agent; it sends the other nodes that this one leaves."""
        if self.ended is None:
            self.leave("went away")
        self._agent.close()

    def fileno(self) -> int:
        """Readable when the agent has sent something."""
        return self._agent.fileno()

    def receive(self) -> list[Event]:
        """Return the agent's messages since the last call; updates the attributes."""
        received, self.is_closed = self._agent.receive()
        for message in received:
            if isinstance(message, PeerHeartbeats):
                self.heartbeats = message.heartbeats
                self._last_heartbeats_s = time.monotonic()
            elif isinstance(message, WorldFormed):
                self._world = message
            elif isinstance(message, AgentEnded):
                self.ended = message
        if self.is_closed and self.ended is None:
            self.end(f"the process that meets the other nodes has died; its log: {self._log_path}")
        return received

    def take_world(self) -> WorldFormed | None:
        """Return the world that was formed since the last call; None: none was."""
        world, self._world = self._world, None
        return world

    def is_cut_off(self) -> bool:
        """Return whether the agent has waited for the store for so long that it will not recover by itself.

        The system needs a quarter of an hour before it reports to a process that a connection leads nowhere.
        """
        return time.monotonic() - self._last_heartbeats_s > self.patience_s + self.silence_s

    def send(self, event: Event) -> None:
        """Send a message."""
        self._agent.send(event)

    def send_if_ready(self, event: Event) -> None:
        """Send a message that may be left out: nothing is sent while the pipe is full."""
        self._agent.send_if_ready(event)

    def leave(self, reason: str) -> None:
        """Take no further part, and send the others the reason."""
        self.send(Leave(-1, time.time(), reason=reason))
        self.ended = AgentEnded(-1, time.time())

    def end(self, error: str, can_retry: bool = False) -> AgentEnded:
        """Expect nothing more of the agent; :attr:`ended` gets the error."""
        self.ended = AgentEnded(-1, time.time(), error=error, can_retry=can_retry)
        return self.ended


class RendezvousWait:
    """The wait until all nodes have joined: before a job's first start, and before each that follows.

    Args:
        spec: what is launched.
        agent: of this node.
        requests: stop requests of the job.
        note: takes a text for the user, and its kind.
    """

    def __init__(
        self, spec: LaunchSpec, agent: AgentClient, requests: StopRequests, note: Callable[[str, str], None]
    ) -> None:
        self._spec = spec
        self._agent = agent
        self._requests = requests
        self._note = note
        self._restarts_left = spec.max_restarts
        self._first_counts: dict[str, int] = {}
        self._has_met = False
        self._is_finished = False

    def wait(self, receive: Callable[[], bool], is_finished: bool) -> WorldFormed | None:
        """Wait until all nodes have joined; None when the agent has nothing more to do.

        Args:
            receive: handles and shows what has arrived; returns whether any other node may still have to restart.
            is_finished: this node's own workers have succeeded.

        Raises:
            KeyboardInterrupt: the job was interrupted meanwhile.
            JobCancelled: the job was cancelled meanwhile.
            LaunchError: the nodes did not find each other, and never had before.
        """
        self._is_finished = is_finished
        began_s = time.monotonic()
        patience_s = self._patience_for_agent()
        last_note = ""
        while True:
            wait_until_readable([self._agent.fileno(), self._requests.fileno()], _TICK_S)
            is_any_expected = receive()
            world = self._agent.take_world()
            if world is not None:
                self._has_met = True
                return world
            if self._agent.ended is None and self._is_agent_cut_off():
                where = self._agent.rendezvous.endpoint
                self._agent.end(f"the rendezvous at {where} does not answer any more", can_retry=True)
            ended = self._agent.ended
            if ended is not None and not self._try_again(ended):
                self._report_end(ended)
                return None
            self._check_settings()
            self._handle_requests()
            if is_finished and not is_any_expected:
                self._agent.leave(messages.FINISHED)
                return None
            if time.monotonic() - began_s > patience_s:
                self._give_up()
                return None
            if not is_finished and time.monotonic() - began_s > _FIRST_NOTE_S:
                last_note = self._note_joining(last_note)

    def _patience_for_agent(self) -> float:
        """Return the seconds in which the agent must reach a result; one that is cut off from the store may never."""
        if self._is_finished:
            return math.inf  # others may train on for as long as their heartbeats arrive
        if self._has_met and not self._spec.max_restarts:
            return _FINAL_WAIT_S
        return self._spec.rendezvous_timeout_s + _AGENT_SLACK_S

    def _give_up(self) -> None:
        self._agent.leave("gave up")
        if not self._has_met or self._spec.max_restarts:
            timeout_s = self._spec.rendezvous_timeout_s
            where = self._agent.rendezvous.endpoint
            self._report_end(self._agent.end(f"the nodes did not meet at {where} within {timeout_s:g} s"))

    def _report_end(self, ended: AgentEnded) -> None:
        if not self._has_met:
            raise LaunchError(ended.error or "the rendezvous was ended before all nodes had met")
        if ended.error and not self._is_finished:
            self._note(ended.error, "warning")

    def _try_again(self, ended: AgentEnded) -> bool:
        """Start another agent if the store was lost and restarts are left; the job goes on if its node comes back."""
        if not (ended.can_retry and self._has_met and self._restarts_left > 0) or self._is_finished:
            return False
        self._note(f"{ended.error}; waiting for it to come back", "warning")
        self._restarts_left -= 1
        self._agent.restart(self._restarts_left)
        return True

    def _is_agent_cut_off(self) -> bool:
        return self._has_met and not self._is_finished and self._agent.is_cut_off()

    def _handle_requests(self) -> None:
        self._requests.acknowledge()
        if self._requests.is_cancelled:
            self._agent.leave("was cancelled")
            raise JobCancelled(f"{self._spec.function_name} was cancelled while it waited for other nodes")
        if (self._requests.interrupts or self._requests.terminations) and not self._is_finished:
            self._agent.leave("was interrupted")
            raise KeyboardInterrupt

    def _check_settings(self) -> None:
        """Refuse nodes that were launched for another rendezvous: they would wait for each other until the timeout."""
        if self._has_met:
            return
        own = self._agent.rendezvous.shared_settings
        for heartbeat in self._agent.heartbeats:
            # That of a node that has gone, and was launched anew with other settings, does not change any more.
            is_alive = heartbeat.count > self._first_counts.setdefault(heartbeat.id, heartbeat.count)
            if is_alive and heartbeat.settings != own:
                self._agent.leave("was launched with other settings")
                raise LaunchError(
                    f"{heartbeat} was launched with {heartbeat.settings}, but this one (node {self._spec.node_rank}) "
                    f"with {own}: launch all nodes with the same"
                )

    def _note_joining(self, last_note: str) -> str:
        """Send a note with the nodes that have joined, unless it is the last one again; return it."""
        joining = [
            str(heartbeat) for heartbeat in self._agent.heartbeats if heartbeat.state == messages.JOINING
        ]
        spec = self._spec
        if len(joining) + 1 >= spec.max_nodes:
            return last_note  # torch's rendezvous takes a second or two to see that all are here
        nodes = ", ".join(sorted([f"node {spec.node_rank} (this one)", *joining]))
        text = f"waiting at {self._agent.rendezvous.endpoint} for {spec.num_nodes} nodes; here: {nodes}"
        if text != last_note:
            self._note(text, "note")
        return text

"""A launcher's line to its node's agent, the process that meets the other nodes: what it is told, what it has said.

Owns that process. What the other nodes' news mean is ``neighbours.py``'s, when to wait for them ``node_wait.py``'s
business.
"""

from __future__ import annotations

import socket
import time

from nblaunch.events import Event
from nblaunch.launch import network
from nblaunch.launch.rendezvous import RendezvousHost
from nblaunch.nodes.agent_process import AgentConfig, AgentProcess, RendezvousConfig
from nblaunch.nodes.messages import AgentEnded, Heartbeat, Leave, PeerHeartbeats, WorldFormed
from nblaunch.spec import LaunchSpec
from nblaunch.spec_nodes import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT


class AgentLine:
    """The agent, as its launcher knows it.

    Args:
        spec: what is launched.
        num_workers: of this node.
        log_path: file for what the agent prints.

    Attributes:
        address: of this node, as the others reach it.
        meeting: where nodes meet, and what for.
        silence_s: after so long without news of a node somebody is told.
        patience_s: after so long without news it is given up.
        news: the last ones of all other nodes.
        over: how the agent has ended; None: it has not.
        is_closed: its end of the line is; it will say nothing more.

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
        self.news: tuple[Heartbeat, ...] = ()
        self.over: AgentEnded | None = None
        self.is_closed = False
        self._formed: WorldFormed | None = None
        self._open(spec.max_restarts)

    def _open(self, max_restarts: int) -> None:
        spec = self._spec
        name, port = spec.rendezvous_address
        host = network.resolve(name, port)
        listener = self._receive_all(host, port)
        listen_fd = listener.fileno() if listener is not None else -1
        try:
            self.address = host if listener is not None else network.address_towards(host, port)
            rendezvous = RendezvousConfig(
                backend=spec.rdzv_backend, host=host, port=port, listen_fd=listen_fd, run_id=spec.rdzv_id,
                node_rank=spec.node_rank, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes,
                timeout_s=spec.rendezvous_timeout_s, conf=dict(spec.rdzv_conf or {}),
            )  # fmt: skip
            config = AgentConfig(
                rendezvous=rendezvous,
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
        self.rendezvous = rendezvous
        self.over = None
        self._last_news_s = time.monotonic() + spec.rendezvous_timeout_s  # it need not have any before

    def _receive_all(self, host: str, port: int) -> RendezvousHost | None:
        """The socket of the store, where this node is the one to host it."""
        wanted = (self._spec.rdzv_conf or {}).get("is_host")
        if self._spec.rdzv_backend == "static":
            wanted = self._spec.node_rank == 0
        return None if wanted is False else network.listen(host, port, is_optional=wanted is None)

    def restart(self, max_restarts: int) -> None:
        """Have another agent in the place of this one."""
        self._agent.close(0.0)  # at once, or it may come to, and meet the others for this node once more
        self._open(max_restarts)

    def close(self) -> None:
        """End the agent; the other nodes hear of it."""
        if self.over is None:
            self.leave("went away")
        self._agent.close()

    def fileno(self) -> int:
        """Readable when the agent has something to say."""
        return self._agent.fileno()

    def hear(self) -> list[Event]:
        """Take in what the agent has said since the last time, and return it."""
        messages, self.is_closed = self._agent.receive()
        for message in messages:
            if isinstance(message, PeerHeartbeats):
                self.news = message.heartbeats
                self._last_news_s = time.monotonic()
            elif isinstance(message, WorldFormed):
                self._formed = message
            elif isinstance(message, AgentEnded):
                self.over = message
        if self.is_closed and self.over is None:
            self.end(f"the process that meets the other nodes has died; its log: {self._log_path}")
        return messages

    def take_formed(self) -> WorldFormed | None:
        """The world that has come to be since the last call; None: none has."""
        formed, self._formed = self._formed, None
        return formed

    def is_cut_off(self) -> bool:
        """Whether the agent has waited for the store for so long that it will not hear of it again by itself.

        The system goes on for a quarter of an hour before it tells a process that a connection leads nowhere.
        """
        return time.monotonic() - self._last_news_s > self.patience_s + self.silence_s

    def send(self, event: Event) -> None:
        """Tell the agent something."""
        self._agent.send(event)

    def send_if_ready(self, event: Event) -> None:
        """Tell the agent something that may as well be left out, where it does not listen right now."""
        self._agent.send_if_ready(event)

    def leave(self, reason: str) -> None:
        """Take no further part, and tell the others why."""
        self.send(Leave(-1, time.time(), reason=reason))
        self.over = AgentEnded(-1, time.time())

    def end(self, error: str, can_retry: bool = False) -> AgentEnded:
        """Expect nothing more of the agent, which is what :attr:`over` says from now on."""
        self.over = AgentEnded(-1, time.time(), error=error, can_retry=can_retry)
        return self.over

"""The launcher's client for its node's agent: starts the process, and sends and receives messages."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

from nblaunch import env
from nblaunch.errors import LaunchError
from nblaunch.events import Event
from nblaunch.host import descriptors
from nblaunch.host.descriptors import is_writable
from nblaunch.launcher.store import StoreHost
from nblaunch.nodes import network
from nblaunch.nodes.messages import (
    LINGER_S,
    AgentConfig,
    AgentEnded,
    Heartbeat,
    Leave,
    PeerHeartbeats,
    RendezvousConfig,
    StopWorkers,
    WorldFormed,
)
from nblaunch.spec import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT, LaunchSpec
from nblaunch.start_methods.spawn import start_program
from nblaunch.start_methods.worker_group import kill_and_reap
from nblaunch.wire.channel import EventReceiver, EventSender

_EXIT_S = LINGER_S + 2.0
_EXIT_POLL_S = 0.05


class AgentClient:
    """The agent of the launcher's node: its process, and the connection to it.

    Args:
        log_path: file for the agent's output.

    Attributes:
        address: address at which the other nodes reach this node.
        rendezvous: configuration of the rendezvous.
        silence_s: seconds without a heartbeat from a node after which the user is notified.
        patience_s: seconds without a heartbeat after which a node is considered lost.
        heartbeats: last heartbeat of each other node.
        ended: outcome of the agent; None while it runs.
        is_changing: the agent has asked the launcher to stop the workers because the set of nodes is changing.
        is_closed: the agent has closed its end of the connection.

    Raises:
        LaunchError: the rendezvous is impossible here, because the port is in use or the address is unknown; or the
        system did not allow the agent's process to start.
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
        self.is_changing = False
        self.is_closed = False
        self._world: WorldFormed | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._open(spec.max_restarts)

    def _open(self, max_restarts: int) -> None:
        spec = self._spec
        name, port = spec.rendezvous_address
        host = network.resolve(name, port, is_shared=spec.max_nodes > 1)
        listener = self._listen(host, port)
        listen_fd = listener.fileno() if listener is not None else -1
        try:
            self.address = host if listener is not None else network.address_towards(host, port)
            self.rendezvous = RendezvousConfig(
                backend=spec.rdzv_backend, host=host, port=port, listen_fd=listen_fd, run_id=spec.rdzv_id,
                node_rank=spec.node_rank, min_nodes=spec.min_nodes, max_nodes=spec.max_nodes,
                timeout_s=spec.rendezvous_timeout_s, conf=dict(spec.rdzv_conf or {}),
            )  # fmt: skip
            self._start_process(max_restarts)
        finally:
            if listener is not None:
                listener.close()
        self.ended = None
        self._last_heartbeats_s = time.monotonic() + spec.rendezvous_timeout_s  # none are expected earlier

    def _listen(self, host: str, port: int) -> StoreHost | None:
        """Open the store's socket if this node hosts it; return None otherwise."""
        wanted = (self._spec.rdzv_conf or {}).get("is_host")
        if self._spec.rdzv_backend == "static":
            wanted = self._spec.node_rank == 0
        return (
            None
            if wanted is not None and not wanted
            else network.listen(host, port, is_optional=wanted is None)
        )

    def _start_process(self, max_restarts: int) -> None:
        agent_reads, self._writing = os.pipe()
        self._reading, agent_writes = os.pipe()
        descriptors.keep_from_children(self._writing, self._reading)
        config = AgentConfig(
            rendezvous=self.rendezvous,
            num_workers=self._num_workers,
            max_restarts=max_restarts,
            address=self.address,
            host_name=socket.gethostname(),
            log_path=self._log_path,
            reading_fd=agent_reads,
            writing_fd=agent_writes,
        )
        try:
            self._process = _start(config)
        except BaseException:
            descriptors.close(self._writing, self._reading)
            raise
        finally:
            os.close(agent_reads)
            os.close(agent_writes)
        self._sender = EventSender(self._writing)
        self._receiver = EventReceiver(self._reading)

    def restart(self, max_restarts: int) -> None:
        """Replace the agent with a new one."""
        # Kill it immediately: otherwise it could recover and also join the rendezvous for this node.
        self._end_process(0.0)
        self._open(max_restarts)

    def close(self) -> None:
        """End the agent, which notifies the other nodes."""
        if self.ended is None:
            self.leave("went away")
        self._end_process(_EXIT_S)

    def _end_process(self, patience_s: float) -> None:
        """Wait up to ``patience_s`` seconds for the agent to exit; kill it if it has not."""
        process, self._process = self._process, None
        if process is None:  # a restart ended it but could not start another one
            return
        deadline = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < deadline:
            self._receiver.receive()  # otherwise the agent could block on a full pipe
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_POLL_S)
        if process.poll() is None:
            kill_and_reap([process.pid])
            process.poll()  # otherwise the process would seem to be still running
        descriptors.close(self._writing, self._reading)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the agent sends a message or ends."""
        return self._reading

    def receive(self) -> list[Event]:
        """Update the attributes from the agent's messages since the last call, and return these messages."""
        received, self.is_closed = self._receiver.receive()
        for message in received:
            if isinstance(message, PeerHeartbeats):
                self.heartbeats = message.heartbeats
                self._last_heartbeats_s = time.monotonic()
            elif isinstance(message, WorldFormed):
                self._world = message
                self.is_changing = False
            elif isinstance(message, StopWorkers):
                self.is_changing = True
            elif isinstance(message, AgentEnded):
                self.ended = message
        if self.is_closed and self.ended is None:
            self.end(f"this node's agent has died; its log: {self._log_path}")
        return received

    def take_world(self) -> WorldFormed | None:
        """Return the world that has formed since the last call; None if there is none."""
        world, self._world = self._world, None
        return world

    def is_cut_off(self) -> bool:
        """Return whether the agent has waited for the store for so long that it can't recover.

        Linux takes about a quarter of an hour to report that a TCP connection is dead.
        """
        return time.monotonic() - self._last_heartbeats_s > self.patience_s + self.silence_s

    def send(self, message: Event) -> None:
        """Send a message. If the agent has died, :meth:`receive` reports that; this method does not."""
        self._sender.send(message)

    def send_if_ready(self, message: Event) -> None:
        """Send a message unless the pipe is full."""
        if is_writable(self._writing):
            self.send(message)

    def leave(self, reason: str) -> None:
        """Leave the job, and send the reason to the other nodes."""
        self.send(Leave(reason=reason))
        self.ended = AgentEnded()

    def end(self, error: str, can_retry: bool = False) -> None:
        """Set :attr:`ended` to a failure of the agent."""
        self.ended = AgentEnded(error=error, can_retry=can_retry)


def _start(config: AgentConfig) -> subprocess.Popen[bytes]:
    descriptors_of_agent = [config.reading_fd, config.writing_fd, config.rendezvous.listen_fd]
    changes = {
        "OMP_NUM_THREADS": "1",
        # Without this variable, torch's handler would open a store for workers on all interfaces.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    try:
        # The agent inherits the set of blocked signals: a batch system signals all processes in a job, but only the
        # launcher decides what to do.
        return start_program(
            "nblaunch.nodes.agent",
            config,
            inherited=[fd for fd in descriptors_of_agent if fd >= 0],
            environment={**env.snapshot(), **changes},
        )
    except OSError as error:
        raise LaunchError(
            f"this node's agent, which joins the rendezvous, could not be started ({sys.executable}): {error}"
        ) from error

"""The launcher's side of the agent of its node, and the wait until all nodes of a job have joined."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from nblaunch import env
from nblaunch.errors import JobCancelled, LaunchError
from nblaunch.events import Event
from nblaunch.host import descriptors
from nblaunch.host.descriptors import is_writable
from nblaunch.launcher.requests import JobRequests
from nblaunch.launcher.store import StoreHost
from nblaunch.nodes import messages, network
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
from nblaunch.start_methods.interpreter import start_program
from nblaunch.start_methods.worker_group import kill_and_reap
from nblaunch.wire.channel import EventReceiver, EventSender

_TICK_S = 0.1
_FIRST_NOTE_S = 3.0
"""Seconds of waiting before the user is notified."""

_FINAL_WAIT_S = 2.0
_EXIT_S = LINGER_S + 2.0
_AGENT_SLACK_S = 15.0
"""Extra seconds for the start of the agent, and for torch to detect its timeout."""


class AgentClient:
    """The agent of a launcher's node: its process, and the connection with it.

    Args:
        log_path: file for the output of the agent.

    Attributes:
        address: of this node, as the others reach it.
        rendezvous: configuration of the rendezvous.
        silence_s: seconds without a heartbeat of a node after which the user is notified.
        patience_s: seconds without a heartbeat after which a node is lost.
        heartbeats: last heartbeat of each other node.
        ended: outcome of the agent; None while it runs.
        is_changing: the agent has asked for the end of the workers, as another set of nodes follows.
        is_closed: the agent has closed its end of the connection.

    Raises:
        LaunchError: the rendezvous is not possible here: the port is in use, or the address unknown; or the system
            refused the process.
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
        self._last_heartbeats_s = time.monotonic() + spec.rendezvous_timeout_s  # none are expected before

    def _listen(self, host: str, port: int) -> StoreHost | None:
        """Open the socket of the store if this node hosts it, else return None."""
        wanted = (self._spec.rdzv_conf or {}).get("is_host")
        if self._spec.rdzv_backend == "static":
            wanted = self._spec.node_rank == 0
        return None if wanted is False else network.listen(host, port, is_optional=wanted is None)

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
        """Replace the agent by a new one."""
        # At once, because it could recover and join the rendezvous for this node as well.
        self._end_process(0.0)
        self._open(max_restarts)

    def close(self) -> None:
        """End the agent, which notifies the other nodes."""
        if self.ended is None:
            self.leave("went away")
        self._end_process(_EXIT_S)

    def _end_process(self, patience_s: float) -> None:
        """Wait at most ``patience_s`` seconds until the agent exits, then kill it."""
        process, self._process = self._process, None
        if process is None:  # it was ended by a restart, which could not start another
            return
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            kill_and_reap([process.pid])
            process.poll()  # or it would be taken for one that still runs
        descriptors.close(self._writing, self._reading)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the agent has sent a message or has ended."""
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
            self.end(f"the agent of this node has died; its log: {self._log_path}")
        return received

    def take_world(self) -> WorldFormed | None:
        """Return the world that was formed since the last call, or None."""
        world, self._world = self._world, None
        return world

    def is_cut_off(self) -> bool:
        """Return whether the agent has waited for the store for too long to recover.

        Linux reports a dead TCP connection to a process only after about a quarter of an hour.
        """
        return time.monotonic() - self._last_heartbeats_s > self.patience_s + self.silence_s

    def send(self, message: Event) -> None:
        """Send a message. If the agent has died, :meth:`receive` reports it, not this method."""
        self._sender.send(message)

    def send_if_ready(self, message: Event) -> None:
        """Send a message unless the pipe is full."""
        if is_writable(self._writing):
            self.send(message)

    def leave(self, reason: str) -> None:
        """Leave the job, and notify the other nodes of the reason."""
        self.send(Leave(-1, time.time(), reason=reason))
        self.ended = AgentEnded(-1, time.time())

    def end(self, error: str, can_retry: bool = False) -> AgentEnded:
        """Set :attr:`ended` to a failure of the agent."""
        self.ended = AgentEnded(-1, time.time(), error=error, can_retry=can_retry)
        return self.ended


def _start(config: AgentConfig) -> subprocess.Popen[bytes]:
    descriptors_of_agent = [config.reading_fd, config.writing_fd, config.rendezvous.listen_fd]
    changes = {
        "OMP_NUM_THREADS": "1",
        # Without it torch's handler would open a store for workers on all interfaces.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    try:
        # The agent keeps those signals blocked that are blocked at its start: a batch system signals all processes of
        # a job, and the launcher decides what to do.
        return start_program(
            "nblaunch.nodes.agent",
            config,
            inherited=[fd for fd in descriptors_of_agent if fd >= 0],
            environment={**env.snapshot(), **changes},
        )
    except OSError as error:
        raise LaunchError(
            f"the agent of this node, which joins the rendezvous, could not be started ({sys.executable}): {error}"
        ) from error


class RendezvousWait:
    """The wait until all nodes have joined, before each start of the workers.

    Args:
        note: emits a text for the user, with the kind of the note.
    """

    def __init__(
        self, spec: LaunchSpec, agent: AgentClient, requests: JobRequests, note: Callable[[str, str], None]
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
        """Wait until all nodes have joined; return None when no further start follows.

        Args:
            receive: handles new messages; returns whether another node may still have to restart.
            is_finished: the workers of this node have succeeded.

        Raises:
            KeyboardInterrupt: the job was interrupted meanwhile.
            JobCancelled: the job was cancelled meanwhile.
            LaunchError: the first rendezvous failed.
        """
        self._is_finished = is_finished
        began_s = time.monotonic()
        last_note = ""
        while True:
            wait([self._agent.fileno(), self._requests.fileno()], _TICK_S)
            is_any_expected = receive()
            world = self._agent.take_world()
            if world is not None:
                self._has_met = True
                return world
            is_needed = self._has_met and not is_finished
            if self._agent.ended is None and is_needed and self._agent.is_cut_off():
                where = self._agent.rendezvous.endpoint
                self._agent.end(f"the rendezvous at {where} no longer responds", can_retry=True)
            ended = self._agent.ended
            if ended is not None and not self._try_again(ended):
                self._report_end(ended)
                return None
            self._check_settings()
            self._handle_requests()
            if is_finished and not is_any_expected:
                self._agent.leave(messages.FINISHED)
                return None
            if time.monotonic() - began_s > self._patience_for_agent():
                self._give_up()
                return None
            if not is_finished and time.monotonic() - began_s > _FIRST_NOTE_S:
                last_note = self._note_joining(last_note)

    def _patience_for_agent(self) -> float:
        """Return the timeout in seconds for the agent, which may hang when it has lost the connection to the store."""
        if self._is_finished:
            return math.inf  # other nodes may continue to train as long as their heartbeats arrive
        return self._spec.rendezvous_timeout_s + _AGENT_SLACK_S if self._may_meet else _FINAL_WAIT_S

    @property
    def _may_meet(self) -> bool:
        """Return whether nodes may still meet: for the first time, after a failure, or because others have joined."""
        return not self._has_met or self._spec.max_restarts > 0 or self._agent.is_changing

    def _give_up(self) -> None:
        self._agent.leave("timed out in the rendezvous")
        if self._may_meet:
            timeout_s = self._spec.rendezvous_timeout_s
            where = self._agent.rendezvous.endpoint
            self._report_end(
                self._agent.end(f"not all nodes joined the rendezvous at {where} within {timeout_s:g} s")
            )

    def _report_end(self, ended: AgentEnded) -> None:
        if not self._has_met:
            raise LaunchError(ended.error or "the rendezvous ended before all nodes had joined")
        if ended.error and not self._is_finished:
            self._note(ended.error, "warning")

    def _try_again(self, ended: AgentEnded) -> bool:
        """Start another agent if the connection to the store was lost and restarts are left; return whether."""
        if not (ended.can_retry and self._has_met and self._restarts_left > 0) or self._is_finished:
            return False
        self._note(f"{ended.error}; waiting for it to come back", "warning")
        self._restarts_left -= 1
        self._agent.restart(self._restarts_left)
        return True

    def _handle_requests(self) -> None:
        self._requests.acknowledge()
        if self._requests.is_cancelled:
            self._agent.leave("was cancelled")
            raise JobCancelled(f"{self._spec.function_name} was cancelled while it waited for other nodes")
        if (self._requests.interrupts or self._requests.terminations) and not self._is_finished:
            self._agent.leave("was interrupted")
            raise KeyboardInterrupt

    def _check_settings(self) -> None:
        """Raise LaunchError if nodes have different settings: they would wait for each other until the timeout."""
        if self._has_met:
            return
        own = self._agent.rendezvous.shared_settings
        for heartbeat in self._agent.heartbeats:
            # Heartbeats of earlier launches stay on the store, but their count does not rise.
            is_alive = heartbeat.count > self._first_counts.setdefault(heartbeat.id, heartbeat.count)
            if is_alive and heartbeat.settings != own:
                self._agent.leave("was launched with other settings")
                raise LaunchError(
                    f"{heartbeat} was launched with {heartbeat.settings}, but this one (node {self._spec.node_rank}) "
                    f"with {own}: launch all nodes with the same"
                )

    def _note_joining(self, last_note: str) -> str:
        """Emit a note with the nodes that have joined, if it differs from the last one; return its text."""
        joining = [
            str(heartbeat) for heartbeat in self._agent.heartbeats if heartbeat.state == messages.JOINING
        ]
        spec = self._spec
        if len(joining) + 1 >= spec.max_nodes:
            return last_note  # torch's rendezvous takes a second or two to complete
        nodes = ", ".join(sorted([f"node {spec.node_rank} (this one)", *joining]))
        text = f"waiting at {self._agent.rendezvous.endpoint} for {spec.num_nodes} nodes; joined: {nodes}"
        if text != last_note:
            self._note(text, "note")
        return text

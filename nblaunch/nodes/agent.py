"""The agent of one node: torch's elastic agent, in a process of its own, with workers that its launcher starts.

    launcher (kernel) <── pipes ──> agent (fresh interpreter): main thread    torch's SimpleElasticAgent
        │ fork                                                 launcher       receives the launcher's messages
        └──> workers                                           heartbeats     of all nodes, twice a second

torch's agent decides when to rendezvous, which node gets which ranks, whether to restart, and when a node that returns
joins. Its abstract methods about workers (start, monitor, stop) send messages to the launcher, which owns the workers.
The agent of node 0 hosts the store through which the workers of all nodes form their process group.
:func:`main` is called with the descriptor of an inherited memory file, which holds the configuration.
"""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from nblaunch.errors import LaunchError
from nblaunch.events import Event
from nblaunch.launcher.store import StoreHost
from nblaunch.nodes import messages
from nblaunch.nodes.heartbeats import HeartbeatExchange
from nblaunch.nodes.messages import (
    AgentConfig,
    AgentEnded,
    Leave,
    Node,
    RendezvousConfig,
    StopWorkers,
    Summary,
    WorkersEnded,
    WorldFormed,
)
from nblaunch.nodes.rendezvous import is_connection_error, make_handler, open_store
from nblaunch.topology import Topology
from nblaunch.wire import schema
from nblaunch.wire.channel import EventReceiver, EventSender
from nblaunch.worker import output

_MONITOR_INTERVAL_S = 0.1
"""Seconds between two looks of torch's agent at the workers, of which the launcher informs it."""

_EXIT_BARRIER_S = 7 * 24 * 3600.0
"""Seconds for which an agent waits for workers of other nodes: torch's 300 s would end those that still write files.

The launcher ends the wait for nodes that are lost. torch's store takes no more than 24 days."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run an agent; the argument is the descriptor of a memory file with its pickled :class:`AgentConfig`."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        config: AgentConfig = pickle.load(file)
    output.capture(config.log_path)
    exit_code = 1
    try:
        NodeAgent(config).run()
        exit_code = 0
    finally:
        output.flush()
        os._exit(exit_code)


class NodeAgent:
    """The agent of one node, from opening the rendezvous store to the last heartbeat."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        sender = EventSender(config.writing_fd)
        id = f"{config.host_name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._heartbeats = HeartbeatExchange(config, id, sender.send)
        self._launcher = LauncherClient(sender, config.reading_fd, self._heartbeats, self._leave)

    def run(self) -> None:
        """Run torch's agent until it ends, and send the outcome to the launcher."""
        self._launcher.start()
        rendezvous = self._config.rendezvous
        try:
            store = open_store(rendezvous)
            self._heartbeats.start()
            if rendezvous.backend == "static":
                self._heartbeats.check_rank_is_free()
            handler = make_handler(rendezvous, store, self._heartbeats.id, self._config.host_name)
            agent = TorchAgent(self._config, handler, store, self._heartbeats, self._launcher)
            result: RunResult | None = agent.run()
            is_success = result is not None and not result.is_failed()
            self._heartbeats.publish(messages.DONE if is_success else messages.FAILED)
            if is_success:
                self._heartbeats.wait_for_final()
            self._launcher.send(AgentEnded(-1, time.time(), is_success=is_success))
            handler.shutdown()
        except Exception as error:
            traceback.print_exc()
            text = describe(error, rendezvous, self._heartbeats)
            self._heartbeats.publish(messages.FAILED, reason="could not continue")
            self._launcher.send(AgentEnded(-1, time.time(), error=text, can_retry=is_connection_error(error)))
        self._heartbeats.linger()

    def _leave(self, reason: str) -> NoReturn:
        """Publish the reason to the other nodes, then exit this process from any thread."""
        self._heartbeats.publish(messages.LEFT, reason)
        self._heartbeats.linger()
        output.flush()
        os._exit(0)


class LauncherClient:
    """The agent's connection to its launcher.

    Args:
        leave: ends this process, with a reason for the other nodes.

    Attributes:
        workers_ended: how the workers ended; None while they run.
    """

    def __init__(
        self,
        sender: EventSender,
        reading_fd: int,
        heartbeats: HeartbeatExchange,
        leave: Callable[[str], None],
    ) -> None:
        self.send: Callable[[Event], None] = sender.send
        self._reading_fd = reading_fd
        self._heartbeats = heartbeats
        self._leave = leave
        self._changed = threading.Condition()
        self.workers_ended: WorkersEnded | None = None

    def start(self) -> None:
        """Start the daemon thread that receives."""
        threading.Thread(target=self._receive_all, name="launcher", daemon=True).start()

    def _receive_all(self) -> None:
        """Handle each message of the launcher; leave the job when the launcher has died."""
        receiver = EventReceiver(self._reading_fd)
        while True:
            wait([receiver.fd])
            received, is_closed = receiver.receive()
            for message in received:
                self._handle(message)
            if is_closed:
                self._leave("ended: its launching process was killed")

    def _handle(self, message: Event) -> None:
        if isinstance(message, Leave):
            self._leave(message.reason)
        elif isinstance(message, Summary):
            self._heartbeats.update_summary(message)
        elif isinstance(message, WorkersEnded):
            self._heartbeats.update_summary(message.summary)
            with self._changed:
                self.workers_ended = message
                self._changed.notify_all()

    def expect_workers(self) -> None:
        """Reset the state of the workers before a new start."""
        with self._changed:
            self.workers_ended = None

    def wait_for_end(self) -> None:
        """Wait until the workers have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.workers_ended is not None)
            self.workers_ended = None


class TorchAgent(SimpleElasticAgent):
    """torch's elastic agent, with workers that a launcher starts."""

    def __init__(
        self,
        config: AgentConfig,
        handler: Any,
        store: Any,
        heartbeats: HeartbeatExchange,
        launcher: LauncherClient,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=config.num_workers,
            rdzv_handler=handler,
            entrypoint="nblaunch",
            max_restarts=config.max_restarts,
            monitor_interval=_MONITOR_INTERVAL_S,
            local_addr=config.address,
        )
        super().__init__(spec, exit_barrier_timeout=_EXIT_BARRIER_S)
        self._config = config
        self._job_store = store
        self._heartbeats = heartbeats
        self._launcher = launcher
        self._are_running = False
        self._workers_store: StoreHost | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._heartbeats.publish(messages.JOINING)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Exchange addresses with the other nodes, and request that the launcher starts the workers."""
        store: Any = worker_group.store
        nodes = self._exchange_nodes(worker_group)
        topology = _topology(worker_group, nodes)
        self._launcher.expect_workers()
        self._heartbeats.enter_world(nodes)
        self._heartbeats.publish(messages.RUNNING, node_rank=topology.node_rank)
        if self._workers_store is not None:  # of the start before
            self._workers_store.close()
            self._workers_store = None
        if topology.node_rank == 0:
            port = self._host_store(topology.master_addr)  # first: where it fails, nothing was started
            num_starts = int(self._job_store.add(f"{self._config.rendezvous.run_id}/starts", 1))
            store.set("nblaunch/start", f"{port} {num_starts - 1}")
        port, restart_count = (int(part) for part in store.get("nblaunch/start").split())
        self._heartbeats.reset_summary(restart_count)
        topology = replace(topology, master_port=port)
        self._launcher.send(WorldFormed(-1, time.time(), topology, nodes, restart_count))
        self._are_running = True
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _host_store(self, address: str) -> int:
        """Start the store of the workers of all nodes; return its port."""
        self._workers_store = StoreHost(address, None)
        self._workers_store.start()
        return self._workers_store.port

    def _exchange_nodes(self, worker_group: WorkerGroup) -> tuple[Node, ...]:
        """Write this node to the store of the current round; return all nodes of the round, by node rank."""
        store: Any = worker_group.store
        own = Node(
            id=self._heartbeats.id,
            node_rank=worker_group.group_rank or 0,
            host=self._config.host_name,
            address=self._config.address,
            first_rank=worker_group.workers[0].global_rank,
            num_workers=len(worker_group.workers),
        )
        store.set(f"nblaunch/node/{own.node_rank}", schema.dump(own))
        keys = [f"nblaunch/node/{rank}" for rank in range(worker_group.group_world_size or 1)]
        return tuple(schema.load(Node, value) for value in store.multi_get(keys))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._launcher.workers_ended
        if ended is None:
            return RunResult(state=WorkerState.HEALTHY)
        self._are_running = False
        if not ended.is_success:
            return RunResult(state=WorkerState.FAILED)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        if self._are_running:
            self._are_running = False
            self._heartbeats.refresh()  # nodes that wait for a restart have published whether they failed
            reason = "the set of nodes changes, so all workers restart"
            self._launcher.send(StopWorkers(-1, time.time(), reason=reason))
            self._launcher.wait_for_end()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the launcher stops its workers when it receives :class:`AgentEnded`."""


def _topology(worker_group: WorkerGroup, nodes: Sequence[Node]) -> Topology:
    """Return the topology of the first worker of this node."""
    first = worker_group.workers[0]
    return Topology(
        rank=first.global_rank,
        local_rank=0,
        node_rank=worker_group.group_rank or 0,
        world_size=first.world_size,
        local_world_size=len(worker_group.workers),
        num_nodes=worker_group.group_world_size or 1,
        master_addr=nodes[0].address,
    )


def describe(error: Exception, rendezvous: RendezvousConfig, heartbeats: HeartbeatExchange) -> str:
    """Return a message about a failed rendezvous: the cause, the missing nodes, and what to do."""
    if isinstance(error, LaunchError):
        return str(error)
    if isinstance(error, RendezvousTimeoutError):
        return _describe_timeout(str(error), rendezvous, heartbeats.joining_nodes())
    if isinstance(error, RendezvousClosedError):
        return (
            f"the rendezvous {rendezvous.run_id!r} at {rendezvous.endpoint} is closed: another node has failed or "
            "finished. Launch again on all nodes."
        )
    if not is_connection_error(error):
        return f"the rendezvous at {rendezvous.endpoint} failed: {type(error).__name__}: {error}"
    if not heartbeats.has_published:
        first = "node 0 is missing" if rendezvous.backend == "static" else "the node that hosts it is missing"
        return (
            f"node {rendezvous.node_rank} can't reach the rendezvous at {rendezvous.endpoint} "
            f"({rendezvous.timeout_s:g} s): {first}. Check that it is launched, that this is its address, and that no "
            f"firewall blocks the port. ({_first_line(error)})"
        )
    return f"the rendezvous at {rendezvous.endpoint} is gone ({_first_line(error)})"


def _describe_timeout(missing: str, rendezvous: RendezvousConfig, joining: list[str]) -> str:
    lack = f"{missing} did not join" if missing else f"{rendezvous.min_nodes - len(joining)} more must join"
    return (
        f"not all nodes joined the rendezvous at {rendezvous.endpoint} within {rendezvous.timeout_s:g} s: {lack}; "
        f"joined ({len(joining)} of {rendezvous.min_nodes}): {', '.join(joining)}. Launch the others with the same "
        "address, or allow more time with rdzv_timeout_s."
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]

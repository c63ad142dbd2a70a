"""The agent of a node: it takes part in the rendezvous in its own process; the launcher starts the workers.

    launcher          <── pipes ──> agent (fresh interpreter): main thread    from one rendezvous to the next
        │ start                                                launcher       receives the launcher's messages
        └──> workers                                           heartbeats     of all nodes, twice a second

    rendezvous ──> workers run ──> returned on all nodes: done
        ^               ├──> failed, with restarts left
        └───────────────┴──> other nodes wait (they failed, joined or came back): workers here stop, too

torch's rendezvous handler decides which nodes belong together, and in which order. The agent of node 0 hosts the store
through which the workers of all nodes form their process group. The launcher calls :func:`main` with the descriptor of
an inherited memory file that holds the configuration.
"""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from multiprocessing.connection import wait
from queue import Empty, Queue
from typing import NoReturn

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)

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

_POLL_S = 0.2
"""Seconds between checks for waiting nodes."""


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
        self._workers_store: StoreHost | None = None

    def run(self) -> None:
        """Take part in each rendezvous until the workers end without a restart; send the outcome to the launcher."""
        self._launcher.start()
        rendezvous = self._config.rendezvous
        try:
            store = open_store(rendezvous)
            self._heartbeats.start()
            if rendezvous.backend == "static":
                self._heartbeats.check_rank_is_free()
            handler = make_handler(rendezvous, store, self._heartbeats.id, self._config.host_name)
            is_success = self._run_workers(handler, store)
            self._heartbeats.publish(messages.DONE if is_success else messages.FAILED)
            if is_success:
                self._heartbeats.wait_for_final()
            self._launcher.send(AgentEnded(is_success=is_success))
            handler.shutdown()
        except Exception as error:
            traceback.print_exc()
            text = describe(error, rendezvous, self._heartbeats)
            self._heartbeats.publish(messages.FAILED, reason="could not continue")
            self._launcher.send(AgentEnded(error=text, can_retry=is_connection_error(error)))
        self._heartbeats.linger()

    def _leave(self, reason: str) -> NoReturn:
        """Publish the reason to the other nodes, then exit this process from any thread."""
        self._heartbeats.publish(messages.LEFT, reason)
        self._heartbeats.linger()
        output.flush()
        os._exit(0)

    # --- from one rendezvous to the next -------------------------------------------------------------------------

    def _run_workers(self, handler: RendezvousHandler, store: Store) -> bool:
        """Have the launcher start the workers after each rendezvous; return whether all nodes' workers returned."""
        restarts_left = self._config.max_restarts
        while True:
            self._heartbeats.publish(messages.JOINING)
            self._heartbeats.refresh()  # nodes that wait for others have published whether they failed
            world = handler.next_rendezvous()
            self._start_workers(world, store)
            ended = self._wait_for_workers(handler)
            if ended is None:
                continue  # not a failure, so it does not count as a restart
            if not ended.is_success:
                if restarts_left == 0:
                    return False
                restarts_left -= 1
            elif self._wait_for_others(world, handler):
                return True

    def _wait_for_workers(self, handler: RendezvousHandler) -> WorkersEnded | None:
        """Wait for the workers to end; return None if they stopped because other nodes are waiting."""
        while (ended := self._launcher.ended_within(_POLL_S)) is None:
            if self._must_meet_again(handler):
                self._launcher.ended_within(None)
                return None
        return ended

    def _wait_for_others(self, world: RendezvousInfo, handler: RendezvousHandler) -> bool:
        """Wait until all nodes' workers have returned; return False if they restart because nodes are waiting to join.

        If nodes fail or are lost, the launcher, which knows about them, makes the agent leave.
        """
        # If the store is lost, the results of this node's workers are still valid.
        with suppress(RuntimeError, RendezvousError):
            num_finished = world.store.add("nblaunch/finished", 1)
            while num_finished < world.world_size:
                if self._must_meet_again(handler):
                    return False
                time.sleep(_POLL_S)
                num_finished = world.store.add("nblaunch/finished", 0)
        return True

    def _must_meet_again(self, handler: RendezvousHandler) -> bool:
        """Return whether other nodes are waiting for the next rendezvous; if so, the launcher stops the workers."""
        if handler.num_nodes_waiting() == 0:
            return False
        self._heartbeats.refresh()
        reason = "the set of nodes changed, so all workers restart"
        self._launcher.send(StopWorkers(reason=reason))
        return True

    # --- the start of the workers --------------------------------------------------------------------------------

    def _start_workers(self, world: RendezvousInfo, store: Store) -> None:
        """Exchange addresses with the other nodes, and ask the launcher to start the workers."""
        # Once all nodes have written their addresses, they reset their failures, so read the failures now.
        self._heartbeats.refresh()
        nodes = self._exchange_nodes(world)
        this_node = nodes[world.rank]
        self._heartbeats.enter_world(nodes)
        self._heartbeats.publish(messages.RUNNING, node_rank=this_node.node_rank)
        if self._workers_store is not None:  # the store of the previous start
            self._workers_store.close()
            self._workers_store = None
        if this_node.node_rank == 0:
            self._workers_store = StoreHost(this_node.address, None)
            self._workers_store.start()  # first, so that nothing has been started if this fails
            num_starts = store.add(f"{self._config.rendezvous.run_id}/starts", 1)
            world.store.set("nblaunch/start", f"{self._workers_store.port} {num_starts - 1}")
        port, restart_count = (int(part) for part in world.store.get("nblaunch/start").split())
        self._heartbeats.reset_summary(restart_count)
        topology = Topology(
            rank=this_node.first_rank,
            local_rank=0,
            node_rank=this_node.node_rank,
            world_size=sum(node.num_workers for node in nodes),
            local_world_size=this_node.num_workers,
            num_nodes=len(nodes),
            master_addr=nodes[0].address,
            master_port=port,
        )
        self._launcher.send(WorldFormed(topology=topology, nodes=nodes, restart_count=restart_count))

    def _exchange_nodes(self, world: RendezvousInfo) -> tuple[Node, ...]:
        """Write this node to the store of the current round; return all nodes of the round, by node rank."""
        this_node = Node(
            id=self._heartbeats.id,
            node_rank=world.rank,
            host=self._config.host_name,
            address=self._config.address,
            first_rank=0,  # computed below, from the numbers of workers of all nodes
            num_workers=self._config.num_workers,
        )
        world.store.set(f"nblaunch/node/{this_node.node_rank}", schema.dump(this_node).decode())
        values = world.store.multi_get([f"nblaunch/node/{rank}" for rank in range(world.world_size)])
        nodes = [schema.load(Node, value) for value in values]
        first_ranks = accumulate((node.num_workers for node in nodes), initial=0)
        return tuple(replace(node, first_rank=rank) for node, rank in zip(nodes, first_ranks, strict=False))


class LauncherClient:
    """The agent's connection to its launcher.

    Args:
        leave: ends this process, with a reason for the other nodes.
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
        self._ended: Queue[WorkersEnded] = Queue()

    def start(self) -> None:
        """Start the daemon thread that receives the launcher's messages."""
        threading.Thread(target=self._receive_all, name="launcher", daemon=True).start()

    def _receive_all(self) -> None:
        """Handle each message from the launcher; leave the job if the launcher dies."""
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
            self._ended.put(message)

    def ended_within(self, timeout_s: float | None) -> WorkersEnded | None:
        """Wait until the workers of the last start have ended; return None if they run longer than ``timeout_s``."""
        with suppress(Empty):
            return self._ended.get(timeout=timeout_s)
        return None


def describe(error: Exception, rendezvous: RendezvousConfig, heartbeats: HeartbeatExchange) -> str:
    """Return a message about a failed rendezvous: the cause, the missing nodes, and what to do."""
    if isinstance(error, LaunchError):
        return str(error)
    if isinstance(error, RendezvousTimeoutError):
        return _describe_timeout(str(error), rendezvous, heartbeats.joining_nodes())
    if isinstance(error, (RendezvousClosedError, RendezvousGracefulExitError)):
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
            f"({rendezvous.timeout_s:g} s): {first}. Check that it has been launched, that this is its address, and "
            f"that no firewall blocks the port. ({_first_line(error)})"
        )
    return f"the rendezvous at {rendezvous.endpoint} ended ({_first_line(error)})"


def _describe_timeout(missing: str, rendezvous: RendezvousConfig, joining: list[str]) -> str:
    absent = f"{missing} did not join" if missing else f"{rendezvous.min_nodes - len(joining)} more must join"
    return (
        f"not all nodes joined the rendezvous at {rendezvous.endpoint} within {rendezvous.timeout_s:g} s: "
        f"{absent}; joined ({len(joining)} of {rendezvous.min_nodes}): {', '.join(joining)}. Launch the "
        "missing nodes with the same address, or raise rdzv_timeout_s."
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]

"""Heartbeats: each node publishes its state to the rendezvous store and reads the states of all others.

    <prefix>/num_nodes        number of nodes that have ever published
    <prefix>/node/<n>         id of the n-th node
    <prefix>/heartbeat/<id>   last heartbeat of that node, compressed
    <prefix>/pulse/<id>       its count, and its version, which rises with each urgent change

A thread of the agent publishes and reads twice a second, or immediately if a change is urgent. Each time, it sends six
requests, whatever the number of nodes. It reads all pulses (a few bytes each) to see which nodes are alive. It reads
only the heartbeats that have a new version, plus two others in rotation, so that traffic grows with the number of nodes
rather than with its square. Heartbeats of nodes that have ended stay in the store, but their count no longer rises.
Values are plain data (``wire/schema.py``); the agent ignores values that were not written by a node of this job.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nblaunch.errors import LaunchError
from nblaunch.events import Event, Note
from nblaunch.nodes import messages
from nblaunch.nodes.messages import LINGER_S, AgentConfig, Heartbeat, Node, PeerHeartbeats, Summary
from nblaunch.nodes.rendezvous import connect
from nblaunch.wire import schema

_HEARTBEAT_S = 0.5
"""Seconds between heartbeats."""

_URGENT_HEARTBEAT_S = 0.1
"""Seconds between heartbeats while other nodes wait for them: when this node ends, or during a stop agreement."""

_NUM_IN_TURN = 2
"""Number of heartbeats that a node reads each time even if their version is unchanged, to get new steps and losses."""

_NUM_TURNS = 20
"""Number of rounds in which a node reads every heartbeat at least once; together, they take ten seconds."""

_MAX_BYTES = 4 << 20
_RECONNECT_S = 5.0
_GATHER_S = 1.0
_FINAL = (messages.DONE, messages.FAILED, messages.LEFT)
_GONE_S = 2.5
"""Seconds without a heartbeat after which other nodes stop waiting for a node."""


class HeartbeatStore:
    """One node's access to the heartbeats in the store. Not thread-safe.

    Args:
        store: a separate connection to the rendezvous store, so that blocking requests do not block the agent.
        prefix: prefix of all keys; the name of the job.
        warn: receives one warning about each value that is not a heartbeat of a node.
    """

    def __init__(self, store: Any, prefix: str, id: str, warn: Callable[[str], None] = print) -> None:
        self._store = store
        self._prefix = prefix
        self._id = id
        self._warn = warn
        self._unreadable: set[str] = set()
        self._is_listed = False
        self._num_known = 0
        self._others: list[str] = []
        self._with_pulse: set[str] = set()
        self._last: dict[str, Heartbeat] = {}
        self._turn = 0

    def exchange(self, heartbeat: Heartbeat, *, reads_all: bool = False) -> tuple[Heartbeat, ...]:
        """Publish ``heartbeat`` and return the last heartbeat of every other node, with that node's current count.

        Args:
            heartbeat: heartbeat of this node.
            reads_all: read all heartbeats now, not only those whose version has changed.

        Raises:
            RuntimeError: the connection to the store is lost.
        """
        self._store.set(f"{self._prefix}/heartbeat/{self._id}", zlib.compress(schema.dump(heartbeat), 1))
        # Written after the heartbeat: a node that sees the pulse reads a heartbeat that is at least as new.
        self._store.set(f"{self._prefix}/pulse/{self._id}", f"{heartbeat.count} {heartbeat.version}")
        if not self._is_listed:
            number = self._store.add(f"{self._prefix}/num_nodes", 1)
            self._store.set(f"{self._prefix}/node/{number}", self._id)
            self._is_listed = True
        self._find_others()
        if not self._others:
            return ()
        pulses = self._read_pulses()
        due = self._others if reads_all else self._due(pulses)
        values = self._store.multi_get([f"{self._prefix}/heartbeat/{id}" for id in due]) if due else []
        for id, value in zip(due, values, strict=True):
            latest = self._read(id, value)
            if latest is not None:
                self._last[id] = latest
            else:
                self._last.pop(id, None)
        return tuple(
            replace(last, count=max(last.count, pulses.get(id, (0, 0))[0])) for id, last in self._last.items()
        )

    def _read_pulses(self) -> dict[str, tuple[int, int]]:
        """Return the count and version of each node, by id."""
        for id in self._others:
            if id not in self._with_pulse and self._store.check([f"{self._prefix}/pulse/{id}"]):
                self._with_pulse.add(id)
        ids = [id for id in self._others if id in self._with_pulse]
        if not ids:
            return {}
        pulses = {}
        for id, value in zip(
            ids, self._store.multi_get([f"{self._prefix}/pulse/{id}" for id in ids]), strict=True
        ):
            count, _, version = value[:64].decode(errors="replace").partition(" ")
            if count.isdecimal() and version.isdecimal():
                pulses[id] = int(count), int(version)
        return pulses

    def _due(self, pulses: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return the nodes whose heartbeats must be read now."""
        num_in_turn = max(_NUM_IN_TURN, -(-len(self._others) // _NUM_TURNS))
        in_turn = {
            self._others[(self._turn + index) % len(self._others)]
            for index in range(min(num_in_turn, len(self._others)))
        }
        self._turn += num_in_turn
        return [id for id in self._others if id in in_turn or self._is_new(id, pulses)]

    def _is_new(self, id: str, pulses: Mapping[str, tuple[int, int]]) -> bool:
        last = self._last.get(id)
        return last is None or id not in pulses or pulses[id][1] != last.version

    def _read(self, id: str, value: bytes) -> Heartbeat | None:
        try:
            if not value.startswith(b"{"):
                value = zlib.decompressobj().decompress(value, _MAX_BYTES)
            heartbeat = schema.load(Heartbeat, value)
            if heartbeat.id != id:
                raise ValueError(f"it belongs to {heartbeat.id!r:.80}")
        except (ValueError, zlib.error) as error:
            if id not in self._unreadable:
                self._unreadable.add(id)
                self._warn(
                    f"the heartbeat of {id!r:.80} at the rendezvous was not written by a node of this job "
                    f"and is ignored ({error}). Other processes can reach the rendezvous: use a private "
                    "network, and the same version of nblaunch on all nodes"
                )
            return None
        return heartbeat

    def _find_others(self) -> None:
        num_nodes = self._store.add(f"{self._prefix}/num_nodes", 0)
        while self._num_known < num_nodes:
            key = f"{self._prefix}/node/{self._num_known + 1}"
            if not self._store.check([key]):
                return  # the node is counted, but has not written its id; get() would block
            self._num_known += 1
            id = self._store.get(key).decode(errors="replace")
            if id != self._id and id not in self._others:
                self._others.append(id)


class HeartbeatExchange:
    """Publishes this node's heartbeat and reads the heartbeats of other nodes. All methods are thread-safe.

    Args:
        emit: receives the heartbeats of the other nodes each time they have been read.
    """

    def __init__(self, config: AgentConfig, id: str, emit: Callable[[Event], None]) -> None:
        self.id = id
        self._rendezvous = config.rendezvous
        self._emit = emit
        self._changed = threading.Condition()
        self._own = Heartbeat(
            id,
            0,
            config.rendezvous.node_rank,
            config.host_name,
            messages.JOINING,
            settings=config.rendezvous.shared_settings,
        )
        self._others: tuple[Heartbeat, ...] = ()
        self._nodes: tuple[Node, ...] = ()
        self._last_changes: dict[str, tuple[int, float]] = {}
        self._known: tuple[object, ...] = ()
        self._published = 0
        self._wanted = 0
        self._is_store_lost = False

    def start(self) -> None:
        """Start the daemon thread that publishes this node's heartbeats and reads the other nodes' heartbeats."""
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    @property
    def has_published(self) -> bool:
        """Whether this node has published a heartbeat."""
        return self._own.count > 0

    # --- this node's heartbeat -----------------------------------------------------------------------------------

    def publish(self, state: str, reason: str = "", node_rank: int | None = None) -> None:
        """Set the state of this node and publish it immediately."""
        with self._changed:
            rank = self._own.node_rank if node_rank is None else node_rank
            if self._own.state != messages.LEFT:
                self._own = replace(self._own, state=state, reason=reason, node_rank=rank)
            self._changed.notify_all()

    def reset_summary(self, restart_count: int) -> None:
        """Reset the summary when the workers start again."""
        with self._changed:
            self._own = replace(self._own, restart_count=restart_count, summary=Summary(-1, 0.0))

    def update_summary(self, summary: Summary) -> None:
        """Set the state of this node's workers for subsequent heartbeats."""
        with self._changed:
            self._own = replace(self._own, summary=summary)
            self._changed.notify_all()

    def enter_world(self, nodes: tuple[Node, ...]) -> None:
        """Set the nodes of the current world."""
        with self._changed:
            self._nodes = nodes

    # --- heartbeats of the others --------------------------------------------------------------------------------

    def check_rank_is_free(self) -> None:
        """Check that no other machine was launched with the rank of this node.

        The heartbeat of a dead node may have the same rank, but its count does not rise.

        Raises:
            LaunchError: another node has the rank.
        """
        self.refresh(_RECONNECT_S)
        with self._changed:
            first = {other.id: other.count for other in self._with_same_rank()}
            self._changed.wait_for(lambda: not first or self._rivals(first), 3 * _HEARTBEAT_S)
            rivals = self._rivals(first)
        if rivals:
            raise LaunchError(
                f"node_rank={self._own.node_rank} is already used by a node on host {rivals[0].host}; give "
                "each machine its own rank"
            )

    def _rivals(self, first: dict[str, int]) -> list[Heartbeat]:
        """Return heartbeats with this node's rank whose count has risen since ``first``."""
        return [other for other in self._with_same_rank() if other.count > first.get(other.id, other.count)]

    def _with_same_rank(self) -> list[Heartbeat]:
        node_rank = self._own.node_rank
        return [other for other in self._others if other.node_rank == node_rank and other.state not in _FINAL]

    def refresh(self, timeout_s: float = _GATHER_S) -> None:
        """Read the heartbeats of all nodes now, and send them to the launcher."""
        with self._changed:
            wanted = self._own.count + 1
            self._wanted = wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._published >= wanted or self._is_store_lost, timeout_s)

    def wait_for_final(self) -> None:
        """Wait up to :data:`LINGER_S` seconds for the final heartbeats of all nodes in the current world.

        The final tables show the last losses and readings that these heartbeats contain.
        """
        with self._changed:
            ids = {node.id for node in self._nodes}
            self._changed.wait_for(
                lambda: (
                    self._is_store_lost
                    or all(other.state in _FINAL for other in self._others if other.id in ids)
                ),
                LINGER_S,
            )

    def linger(self) -> None:
        """Wait until the last heartbeat is in the store or, on the store's host, until all live nodes have read it."""
        with self._changed:
            final = self._own.count + 1
            self._changed.wait_for(lambda: self._is_received(final), LINGER_S)

    def _is_received(self, count: int) -> bool:
        if self._is_store_lost or not self._others:
            return True
        if self._rendezvous.listen_fd < 0:
            # This node must send one more heartbeat after the first in its final state: it acknowledges the last
            # heartbeat of the node that hosts the store.
            return self._published > count
        return self._published >= count and all(self._has_received(other, count) for other in self._others)

    def _has_received(self, other: Heartbeat, count: int) -> bool:
        silent_s = time.monotonic() - self._last_changes[other.id][1]
        is_ending = other.state in _FINAL
        return other.received.get(self.id, -1) >= count or silent_s > (_GATHER_S if is_ending else _GONE_S)

    def joining_nodes(self) -> list[str]:
        """Return the nodes that are in the rendezvous now, including this one."""
        with self._changed:
            now = time.monotonic()
            return sorted(
                str(heartbeat)
                for heartbeat in (self._own, *self._others)
                if heartbeat.state == messages.JOINING
                and (heartbeat.id == self.id or now - self._last_changes[heartbeat.id][1] < _GONE_S)
            )

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        store: HeartbeatStore | None = None
        while True:
            try:
                store = store or HeartbeatStore(
                    connect(self._rendezvous, _RECONNECT_S), self._rendezvous.run_id, self.id, self._warn
                )
                self._exchange(store)
            except Exception as error:
                # The connection to the store is lost; the launcher notices the missing heartbeats.
                print(f"no heartbeat: {type(error).__name__}: {error}", flush=True)
                store = None
                with self._changed:
                    self._is_store_lost = True
                    self._changed.notify_all()
                time.sleep(_HEARTBEAT_S)
            self._wait_for_next()

    def _warn(self, text: str) -> None:
        self._emit(Note.of_job(text, "warning"))

    def _wait_for_next(self) -> None:
        with self._changed:
            published = self._urgent_state()
            is_urgent = self._own.state in _FINAL or self._own.summary.stop.is_wanted
            self._changed.wait_for(
                lambda: self._urgent_state() != published or self._wanted > self._published,
                _URGENT_HEARTBEAT_S if is_urgent else _HEARTBEAT_S,
            )

    def _urgent_state(self) -> tuple[object, ...]:
        """Return the values whose changes are published immediately instead of with the next heartbeat."""
        summary = self._own.summary
        stop = summary.stop
        replies = [reply for _, reply in stop.replies.values()]
        urgent = stop.is_wanted, stop.proposal, stop.decision, replies
        return self._own.state, summary.failed, summary.exits, summary.returned, urgent

    def _exchange(self, store: HeartbeatStore) -> None:
        with self._changed:
            # Only a node that is ending waits until the others have received its last message.
            received = {other.id: other.count for other in self._others if other.state in _FINAL}
            state = (*self._urgent_state(), received.keys(), self._own.node_rank, self._own.restart_count)
            if state != self._known:
                self._known = state
                self._own = replace(self._own, version=self._own.version + 1)
            self._own = replace(self._own, count=self._own.count + 1, received=received)
            heartbeat = self._own
            is_agreeing = any(other.summary.stop.is_wanted for other in (heartbeat, *self._others))
            reads_all = is_agreeing or heartbeat.state in _FINAL or self._wanted > self._published
        others = store.exchange(heartbeat, reads_all=reads_all)
        # Emit the heartbeats before waiting threads wake up and send messages that must not overtake them.
        self._emit(PeerHeartbeats(heartbeats=others))
        with self._changed:
            self._others, self._published, self._is_store_lost = others, heartbeat.count, False
            for other in others:
                if self._last_changes.get(other.id, (-1, 0.0))[0] != other.count:
                    self._last_changes[other.id] = (other.count, time.monotonic())
            self._changed.notify_all()

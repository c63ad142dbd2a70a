"""The nodes' rendezvous: its store, and torch's handlers that use the store.

The store listens on the configured address only. torch's ``c10d`` and ``static`` handlers would open a store on all
interfaces, so nblaunch passes this store to them. torch also keeps the state of a ``c10d`` rendezvous in the store as a
pickle, which any process that reaches the store could replace; nblaunch stores plain data.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from contextlib import suppress
from dataclasses import astuple
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nblaunch.errors import chain_of
from nblaunch.launcher.store import store_behind
from nblaunch.nodes.messages import RendezvousConfig
from nblaunch.spec import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT

_READ_TIMEOUT_S = 60.0
_LAST_CALL_S = 30.0
_POLL_S = 0.2
"""Seconds between checks for missing nodes."""


def open_store(config: RendezvousConfig) -> TCPStore:
    """Start the store on the listening socket, or connect to another node's store.

    Raises:
        RuntimeError: the store did not respond in time.
    """
    store = (
        store_behind(config.listen_fd, config.host, config.port)
        if config.listen_fd >= 0
        else connect(config, config.timeout_s)
    )
    store.set_timeout(timedelta(seconds=config.conf.get("read_timeout", _READ_TIMEOUT_S)))
    return store


def connect(config: RendezvousConfig, timeout_s: float) -> TCPStore:
    """Open another connection to the store.

    Raises:
        RuntimeError: the store did not respond in time.
    """
    return TCPStore(
        config.host, config.port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False
    )


def make_handler(config: RendezvousConfig, store: TCPStore, id: str, host_name: str) -> RendezvousHandler:
    """Return torch's rendezvous handler for the configured backend."""
    if config.backend == "static":
        return StaticRendezvous(config, store, id)
    names = ("last_call_timeout", "close_timeout", "heartbeat_timeout")
    conf = {name: math.ceil(config.conf[name]) for name in names if name in config.conf}
    # Time in which more nodes may join once the minimum number has joined: torch's 30 s, but at most half of the whole
    # timeout.
    conf.setdefault("last_call_timeout", math.ceil(min(_LAST_CALL_S, config.timeout_s / 2)))
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=config.endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        # torch sorts nodes by these addresses, so they begin with the requested node rank.
        local_addr=f"{config.node_rank:06d}.{host_name}",
        join_timeout=math.ceil(config.timeout_s),
        keep_alive_interval=math.ceil(config.conf.get("keep_alive_interval", DEFAULT_KEEP_ALIVE_INTERVAL_S)),
        keep_alive_max_attempt=math.ceil(
            config.conf.get("keep_alive_max_attempt", DEFAULT_KEEP_ALIVE_MAX_ATTEMPT)
        ),
        **conf,
    )
    return create_handler(store, PlainBackend(store, config.run_id), parameters)


def _to_plain(state: _RendezvousState) -> bytes:
    """Return torch's state as JSON: a list of its entries, with times in ISO 8601."""
    return json.dumps(
        [
            state.round,
            state.complete,
            state.closed,
            state.deadline.isoformat() if state.deadline is not None else None,
            [[*astuple(node), rank] for node, rank in state.participants.items()],
            [astuple(node) for node in state.wait_list],
            [astuple(node) for node in state.redundancy_list],
            [[*astuple(node), time.isoformat()] for node, time in state.last_heartbeats.items()],
        ]
    ).encode()


def _from_plain(plain: bytes) -> _RendezvousState:
    """Return the state from which :func:`_to_plain` made ``plain``.

    Raises:
        ValueError, TypeError, OverflowError, RecursionError: ``plain`` does not come from :func:`_to_plain`.
    """
    round, complete, closed, deadline, participants, waiting, redundant, heartbeats = json.loads(plain)
    state = _RendezvousState()
    state.round, state.complete, state.closed = int(round), bool(complete), bool(closed)
    state.deadline = datetime.fromisoformat(deadline) if deadline is not None else None
    state.participants = {_node(*node): int(rank) for *node, rank in participants}
    state.wait_list = {_node(*node) for node in waiting}
    state.redundancy_list = {_node(*node) for node in redundant}
    state.last_heartbeats = {_node(*node): datetime.fromisoformat(time) for *node, time in heartbeats}
    return state


def _node(addr: Any, pid: Any, local_id: Any) -> _NodeDesc:
    return _NodeDesc(str(addr), int(pid), int(local_id))


class PlainBackend(RendezvousBackend):
    """torch's ``c10d`` backend with plain data in the store; it uses pickles only within this process."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._backend = C10dRendezvousBackend(store, run_id)

    @property
    def name(self) -> str:
        """The name of torch's backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the pickled state and its version; None if there is none yet."""
        stored = self._backend.get_state()
        return (_pickled(stored[0]), stored[1]) if stored is not None else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write ``state`` if the version is still ``token``; return the stored state, and whether it was written."""
        plain = _to_plain(pickle.loads(state))  # pickled by torch in this process
        stored = self._backend.set_state(plain, token)
        return (_pickled(stored[0]), *stored[1:]) if stored is not None else None


def _pickled(plain: bytes) -> bytes:
    try:
        return pickle.dumps(_from_plain(plain))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RendezvousStateError(
            f"the state of the rendezvous was not written by a node of this job ({error}). Other processes "
            "can reach the rendezvous: use a private network, and the same version of nblaunch on all nodes"
        ) from error


class StaticRendezvous(StaticTCPRendezvous):
    """A static rendezvous with rounds, which lets all nodes restart together.

    torch's static rendezvous has a single round: after a restart, a node would read values from the previous round.
    """

    def __init__(self, config: RendezvousConfig, store: TCPStore, id: str) -> None:
        super().__init__(
            config.host, config.port, config.node_rank, config.max_nodes, config.run_id,
            math.ceil(config.timeout_s),
        )  # fmt: skip
        self._config = config
        self._store: TCPStore = store
        self._id = id
        self._closed = f"{config.run_id}/closed"
        self._round = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the first round that this rank has not joined yet, and wait for all other ranks."""
        self._round = self._arrive()
        deadline = time.monotonic() + self._config.timeout_s
        while missing := self._missing(self._round):
            if self._store.check([self._closed]):
                raise RendezvousClosedError
            if self._num_arrived(self._round + 1):  # another node has restarted in the meantime
                self._round = self._arrive()
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(", ".join(f"node {rank}" for rank in missing))
            time.sleep(_POLL_S)
        return RendezvousInfo(
            PrefixStore(f"{self.run_id}.{self._round}", self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that are waiting for the next round because they came back or failed."""
        return self._num_arrived(self._round + 1)

    def shutdown(self) -> bool:
        """Close the rendezvous: this node will not come back, so others need not wait for it."""
        with suppress(RuntimeError):  # the node that hosts the store may be gone
            self._store.set(self._closed, "1")
        return True

    def _arrive(self) -> int:
        last = f"{self.run_id}/last_round"
        number = max(self._round + 1, self._store.add(last, 0))
        while self._store.compare_set(self._key(str(self.rank), number), "", self._id) != self._id.encode():
            number += 1
        # Increment the number of the last round before the arrival becomes visible, so that no node joins a round that
        # others have left.
        latest = b"0"
        while int(latest) < number:
            latest = self._store.compare_set(last, latest.decode(), str(number))
        self._store.add(self._key("arrivals", number), 1)
        return number

    def _num_arrived(self, number: int) -> int:
        return int(self._store.add(self._key("arrivals", number), 0))

    def _missing(self, number: int) -> list[int]:
        return [
            rank for rank in range(self.world_size) if not self._store.check([self._key(str(rank), number)])
        ]

    def _key(self, name: str, number: int) -> str:
        return f"{self.run_id}/round/{number}/{name}"


def is_connection_error(error: BaseException | None) -> bool:
    """Return whether the error means that the connection to the store failed."""
    kinds = (RendezvousConnectionError, DistNetworkError, DistStoreError, ConnectionError)
    return any(isinstance(cause, kinds) for cause in chain_of(error))

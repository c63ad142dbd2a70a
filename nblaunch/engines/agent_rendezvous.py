"""Where nodes meet: the store of the rendezvous, and torch's handlers on it.

The store listens on the address that was given and on no other. torch's own ``c10d`` and ``static`` handlers would
open theirs on all interfaces of the machine, so they are given one here; what they do with it is theirs.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nblaunch.engines.elastic import Meeting
from nblaunch.spec_nodes import DEFAULT_KEEP_ALIVE_INTERVAL_S, DEFAULT_KEEP_ALIVE_MAX_ATTEMPT

_READ_TIMEOUT_S = 60.0
_LAST_CALL_S = 30.0
_LOOK_S = 0.2
"""Between looks for nodes that have not arrived."""


def open_store(meeting: Meeting) -> TCPStore:
    """Start the store behind the listening socket, or connect to the one of another node.

    Raises:
        RuntimeError: it did not answer in time.
    """
    store = (
        TCPStore(
            meeting.host, meeting.port, None, True, wait_for_workers=False, master_listen_fd=meeting.listen_fd
        )
        if meeting.listen_fd >= 0
        else connect(meeting, meeting.timeout_s)
    )
    store.set_timeout(timedelta(seconds=meeting.conf.get("read_timeout", _READ_TIMEOUT_S)))
    return store


def connect(meeting: Meeting, timeout_s: float) -> TCPStore:
    """One more connection to the store.

    Raises:
        RuntimeError: it did not answer in time.
    """
    return TCPStore(
        meeting.host, meeting.port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False
    )


def make_handler(meeting: Meeting, store: TCPStore, id: str, host_name: str) -> RendezvousHandler:
    """torch's handler for the meeting's backend.

    Args:
        meeting: what to meet for.
        store: of the rendezvous.
        id: of this node.
        host_name: of this machine.
    """
    if meeting.backend == "static":
        return StaticRendezvous(meeting, store, id)
    known = ("last_call_timeout", "close_timeout", "heartbeat_timeout")
    conf = {name: math.ceil(meeting.conf[name]) for name in known if name in meeting.conf}
    # How long enough nodes wait for more: torch's 30 s, which a shorter time to meet in would never come to.
    conf.setdefault("last_call_timeout", math.ceil(min(_LAST_CALL_S, meeting.timeout_s / 2)))
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=meeting.where,
        run_id=meeting.run_id,
        min_nodes=meeting.min_nodes,
        max_nodes=meeting.max_nodes,
        # The rendezvous ranks nodes in the order of these names: those that were asked for come first.
        local_addr=f"{meeting.node_rank:06d}.{host_name}",
        join_timeout=math.ceil(meeting.timeout_s),
        keep_alive_interval=math.ceil(meeting.conf.get("keep_alive_interval", DEFAULT_KEEP_ALIVE_INTERVAL_S)),
        keep_alive_max_attempt=math.ceil(
            meeting.conf.get("keep_alive_max_attempt", DEFAULT_KEEP_ALIVE_MAX_ATTEMPT)
        ),
        **conf,
    )
    return create_handler(store, C10dRendezvousBackend(store, meeting.run_id), parameters)


class StaticRendezvous(StaticTCPRendezvous):
    """A fixed set of nodes, each known by its rank; in rounds, so that all can start again together.

    torch's own knows one round: a node that started again would read what the round before has left on the store.

    Args:
        meeting: what to meet for.
        store: of the rendezvous.
        id: of this node.
    """

    def __init__(self, meeting: Meeting, store: TCPStore, id: str) -> None:
        super().__init__(
            meeting.host, meeting.port, meeting.node_rank, meeting.max_nodes, meeting.run_id,
            math.ceil(meeting.timeout_s),
        )  # fmt: skip
        self._meeting = meeting
        self._store: TCPStore = store
        self._id = id
        self._round = 0
        self._looked_s = 0.0
        self._num_waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Arrive in the first round that this rank has not been in, and wait for all other ranks there."""
        self._round = self._arrive()
        deadline = time.monotonic() + self._meeting.timeout_s
        while missing := self._missing(self._round):
            if self._num_arrived(self._round + 1):  # by one that has started again meanwhile
                self._round = self._arrive()
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(", ".join(f"node {rank}" for rank in missing))
            time.sleep(_LOOK_S)
        return RendezvousInfo(
            PrefixStore(f"{self.run_id}.{self._round}", self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def num_nodes_waiting(self) -> int:
        """Nodes that have come back, or have failed, and wait in the next round."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self._num_waiting = self._num_arrived(self._round + 1)
        return self._num_waiting

    def _arrive(self) -> int:
        last = f"{self.run_id}/last_round"
        number = max(self._round + 1, self._store.add(last, 0))
        while self._store.compare_set(self._key(str(self.rank), number), "", self._id) != self._id.encode():
            number += 1
        # Before the arrival can be seen, and never back: or a node that comes now would join a round that others left.
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
    """Whether the store did not answer, rather than anything else being wrong."""
    while error is not None:
        names = {cls.__name__ for cls in type(error).__mro__}
        if names & {"RendezvousConnectionError", "DistNetworkError", "DistStoreError", "ConnectionError"}:
            return True
        error = error.__cause__ or error.__context__
    return False

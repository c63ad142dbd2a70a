"""Rendezvous and heartbeats of nodes over a store without a network; each node is a thread."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState
from torch.torch_version import TorchVersion

from nblaunch.events import WorkerState
from nblaunch.nodes import heartbeats, messages
from nblaunch.nodes.heartbeats import HeartbeatExchange, HeartbeatStore
from nblaunch.nodes.messages import AgentConfig, Heartbeat, Node, RendezvousConfig, Summary
from nblaunch.nodes.rendezvous import PlainBackend, StaticRendezvous, is_connection_error, open_store
from nblaunch.wire import schema
from nblaunch.wire.board import SlotReading

pytestmark = pytest.mark.usefixtures("first_store")


def config(rank: int, num_nodes: int = 2, timeout_s: float = 20.0) -> RendezvousConfig:
    return RendezvousConfig("static", "127.0.0.1", 29500, -1, "job", rank, num_nodes, num_nodes, timeout_s)


def handler(store: Any, rank: int, id: str = "", **settings: Any) -> StaticRendezvous:
    return StaticRendezvous(config(rank, **settings), store, id or f"node-{rank}")


def meet(*handlers: StaticRendezvous) -> list[Any]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers))


@pytest.mark.parametrize("version", [torch.__version__, TorchVersion("2.7.1")])
def test_the_node_that_hosts_the_store_gives_it_an_open_socket(
    version: TorchVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        fd = listening.detach()
    hosting = replace(config(0), port=port, listen_fd=fd)
    store = open_store(hosting)
    assert store.libuvBackend == (version >= "2.8"), "up to torch 2.7 that server takes no open socket"
    open_store(replace(hosting, listen_fd=-1)).set("key", "value")
    assert store.get("key") == b"value"


def test_static_rounds_order_nodes_and_share_no_values() -> None:
    store = HashStore()
    pair = handler(store, 0), handler(store, 1)
    first = meet(*pair)
    assert [(info.rank, info.world_size) for info in first] == [(0, 2), (1, 2)]
    first[0].store.set("key", "old")
    assert first[1].store.get("key") == b"old"
    second = meet(*pair)
    assert not second[1].store.check(["key"])


def test_missing_nodes_are_named() -> None:
    store = HashStore()
    lone = handler(store, 1, num_nodes=4, timeout_s=0.3)
    with pytest.raises(RendezvousTimeoutError, match="node 0, node 2, node 3"):
        lone.next_rendezvous()


def test_ended_nodes_are_not_awaited() -> None:
    store = HashStore()
    pair = handler(store, 0), handler(store, 1)
    meet(*pair)
    pair[1].shutdown()
    with pytest.raises(RendezvousClosedError):
        pair[0].next_rendezvous()


def test_restarted_nodes_wait_for_the_next_round() -> None:
    store = HashStore()
    stayer, leaver = handler(store, 0), handler(store, 1)
    meet(stayer, leaver)
    assert stayer.num_nodes_waiting() == 0
    comer = handler(store, 1, id="node-1-again")
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(comer.next_rendezvous)
        while not stayer.num_nodes_waiting():
            assert not coming.done()
        stayer.next_rendezvous()
        coming.result(180)
    assert stayer.num_nodes_waiting() == 0


def test_dead_nodes_do_not_join_a_round() -> None:
    """The others wait in a round that it joined; its successor makes them move on to the next round."""
    store = HashStore()
    handler(store, 1, num_nodes=3, id="dead")._arrive()
    early, alive, late = (handler(store, rank, num_nodes=3, id=f"alive-{rank}") for rank in range(3))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(early.next_rendezvous), pool.submit(alive.next_rendezvous)]
        # The last node completes the dead node's round if it comes before the dead node's successor.
        while not late._num_arrived(late._round + 2):
            assert not any(future.done() for future in waiting)
        infos = [late.next_rendezvous(), *(future.result(180) for future in waiting)]
    infos[0].store.set("key", "new")
    assert all(info.store.check(["key"]) for info in infos)


class Interrupted(HashStore):
    """A store that runs other code right after the first call of ``method`` for a key with this ending."""

    def __init__(self, method: str, key_end: str) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None
        self._when = method, key_end

    def add(self, key: str, amount: int) -> int:
        number = super().add(key, amount)
        if amount:
            self._happened("add", key)
        return number

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = super().compare_set(key, expected, desired)
        self._happened("compare_set", key)
        return found

    def _happened(self, method: str, key: str) -> None:
        if self.meanwhile is not None and method == self._when[0] and key.endswith(self._when[1]):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


def test_late_node_joins_the_visible_round() -> None:
    store = Interrupted("add", "/round/2/arrivals")
    handler(store, 1, num_nodes=3, id="dead")._arrive()
    rounds: list[int] = []
    store.meanwhile = lambda: rounds.append(handler(store, 2, num_nodes=3)._arrive())
    assert handler(store, 1, num_nodes=3, id="alive")._arrive() == 2
    assert rounds == [2]


def test_slow_node_does_not_reopen_a_round() -> None:
    store = Interrupted("compare_set", "/round/1/0")
    handler(store, 1, num_nodes=3, id="dead")._arrive()
    store.meanwhile = lambda: handler(store, 1, num_nodes=3, id="alive")._arrive()
    assert handler(store, 0, num_nodes=3)._arrive() == 1
    assert handler(store, 2, num_nodes=3)._arrive() == 2


def test_every_node_reads_the_heartbeats_of_all_others() -> None:
    store = HashStore()
    stores = {id: HeartbeatStore(store, "job", id) for id in ("a", "b", "c")}

    def exchange(id: str, count: int) -> dict[str, int]:
        read = stores[id].exchange(Heartbeat(id, count, 0, "host", messages.RUNNING))
        return {heartbeat.id: heartbeat.count for heartbeat in read}

    assert exchange("a", 1) == {}
    assert exchange("b", 1) == {"a": 1}
    assert exchange("c", 5) == {"a": 1, "b": 1}
    assert exchange("a", 2) == {"b": 1, "c": 5}


class Counting:
    """A store that counts nodes' requests and read bytes."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.num_requests = self.num_heartbeats = self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        self.num_requests += 1
        return getattr(self.store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.num_requests += 1
        values: list[bytes] = self.store.multi_get(keys)
        self.num_heartbeats += sum("/heartbeat/" in key for key in keys)
        self.num_bytes += sum(map(len, values))
        return values


class Crowd:
    """Nodes with eight training ranks each."""

    def __init__(self, num_nodes: int) -> None:
        self.counting = Counting()
        self.ids = [f"machine-{number:03}-4711-0123abcd" for number in range(num_nodes)]
        self.nodes = [HeartbeatStore(self.counting, "job", id) for id in self.ids]
        self.versions = [0] * num_nodes
        self.count = 0

    def beat(self) -> list[dict[str, Heartbeat]]:
        """Let each node publish and read once; return what each node has read."""
        self.count += 1
        return [{other.id: other for other in self._exchange(number)} for number in range(len(self.nodes))]

    def _exchange(self, number: int) -> tuple[Heartbeat, ...]:
        readings = tuple(
            SlotReading(
                8 * number + local,
                WorkerState.TRAINING,
                17 * self.count + local,
                4000,
                1,
                loss=0.7 / self.count,
            )
            for local in range(8)
        )
        summary = Summary(-1, 0.0, readings=readings)
        own = Heartbeat(
            self.ids[number],
            self.count,
            number,
            f"machine-{number:03}",
            messages.RUNNING,
            0,
            "",
            summary,
            version=self.versions[number],
        )
        return self.nodes[number].exchange(own)

    def per_second(self) -> tuple[float, float, float]:
        """Return per second a node's requests, the heartbeats that it reads, and the bytes that all nodes read."""
        self.beat()
        self.beat()
        before = self.counting.num_requests, self.counting.num_heartbeats, self.counting.num_bytes
        for _ in range(4):
            self.beat()
        after = self.counting.num_requests, self.counting.num_heartbeats, self.counting.num_bytes
        seconds, num_nodes = 4 * heartbeats._HEARTBEAT_S, len(self.nodes)
        requests, read, num_bytes = (b - a for a, b in zip(before, after, strict=True))
        return requests / seconds / num_nodes, read / seconds / num_nodes, num_bytes / seconds


def test_heartbeat_traffic_grows_linearly() -> None:
    requests_8, read_8, bytes_8 = Crowd(8).per_second()
    requests_64, read_64, bytes_64 = Crowd(64).per_second()
    assert requests_8 == requests_64 == 10
    assert (read_8, read_64) == (4, 8)
    assert bytes_64 < 24 * bytes_8
    assert bytes_64 < 1e6, "of 36 MB when each read all"


def test_nodes_learn_changes_at_once_and_progress_soon() -> None:
    crowd = Crowd(32)
    crowd.beat()
    crowd.beat()
    crowd.versions[20] += 1
    seen = [read[crowd.ids[20]] for read in crowd.beat()[21:]]
    assert {one.version for one in seen} == {1}
    assert {one.summary.readings[0].step for one in seen} == {17 * crowd.count}
    for _ in range(heartbeats._NUM_TURNS):
        read = crowd.beat()[7]
    assert {one.count for id, one in read.items()} <= {crowd.count, crowd.count - 1}, "all live"
    oldest = min(one.summary.readings[0].step for one in read.values())
    assert oldest >= 17 * (crowd.count - heartbeats._NUM_TURNS - 1)


def test_a_constant_pulse_marks_an_ended_node() -> None:
    crowd = Crowd(3)
    crowd.beat()
    crowd.nodes.pop()
    assert [crowd.beat()[0][crowd.ids[2]].count for _ in range(3)] == [1, 1, 1]


def test_the_last_heartbeat_of_a_slow_node_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slower than the limit for heartbeats that are only gathered."""
    monkeypatch.setattr(heartbeats, "_GATHER_S", 0.0)
    shared = HashStore()
    own, other = (HeartbeatStore(shared, "job", id) for id in ("a", "b"))
    emitted: list[Any] = []
    exchange = HeartbeatExchange(AgentConfig(config(0), 1, 0, "", "", ""), "a", emitted.append)
    exchange.enter_world((Node("b", 1, "host", "", 1, 1),))

    def publish(count: int, state: str) -> None:
        other.exchange(Heartbeat("b", count, 1, "host", state))
        exchange._exchange(own)

    publish(1, messages.RUNNING)
    late = threading.Timer(0.1, publish, (2, messages.DONE))
    late.start()
    exchange.wait_for_final()
    assert [heartbeat.state for heartbeat in emitted[-1].heartbeats] == [messages.DONE]
    late.join()


unpickled: list[str] = []


class Witness:
    """An object that leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickled.append, ("this ran",)


def test_foreign_heartbeats_are_named_once_and_ignored() -> None:
    store = HashStore()
    warnings: list[str] = []
    own = HeartbeatStore(store, "job", "a", warnings.append)
    other = HeartbeatStore(store, "job", "b")
    own.exchange(Heartbeat("a", 1, 0, "host", messages.RUNNING))
    store.set(f"job/node/{store.add('job/num_nodes', 1)}", "the attacker")
    store.set("job/heartbeat/the attacker", "{}")
    other.exchange(Heartbeat("b", 1, 1, "host", messages.RUNNING))
    for _ in range(2):
        store.set("job/heartbeat/b", pickle.dumps(Witness()).decode("latin-1"))
        assert own.exchange(Heartbeat("a", 2, 0, "host", messages.RUNNING)) == ()
    assert unpickled == []
    assert [text.partition(" was not written by a node of this job")[0] for text in warnings] == [
        "the heartbeat of 'the attacker' at the rendezvous",
        "the heartbeat of 'b' at the rendezvous",
    ]
    of_another = schema.dump(Heartbeat("a", 9, 0, "host", messages.RUNNING))
    store.set("job/heartbeat/b", of_another)
    assert own.exchange(Heartbeat("a", 3, 0, "host", messages.RUNNING)) == ()
    other.exchange(Heartbeat("b", 2, 1, "host", messages.RUNNING))
    assert [found.count for found in own.exchange(Heartbeat("a", 4, 0, "host", messages.RUNNING))] == [2]


def test_the_rendezvous_state_is_plain_data() -> None:
    store = HashStore()
    first, second = PlainBackend(store, "job"), PlainBackend(store, "job")
    assert first.get_state() is None
    now = datetime.now(timezone.utc)
    state = _RendezvousState()
    alpha, beta = _NodeDesc("alpha", 1, 0), _NodeDesc("beta", 2, 0)
    state.round, state.deadline, state.participants = 3, now, {alpha: 0}
    state.wait_list, state.last_heartbeats = {beta}, {alpha: now}
    written = first.set_state(pickle.dumps(state))
    assert written is not None
    assert written[2] is True
    found = second.get_state()
    assert found is not None
    assert vars(pickle.loads(found[0])) == vars(state)
    state.round = 4
    for token, is_written in ((b"another version", False), (found[1], True)):
        written = second.set_state(pickle.dumps(state), token)
        assert written is not None
        assert written[2] is is_written
    json.loads(b64decode(store.get("torch.rendezvous.job")))

    store.set("torch.rendezvous.job", b64encode(pickle.dumps(Witness())).decode())
    with pytest.raises(RendezvousStateError, match="was not written by a node of this job"):
        second.get_state()
    assert unpickled == []


def test_connection_errors_are_recognised() -> None:
    wrapped = RendezvousConnectionError("failed")
    wrapped.__cause__ = DistNetworkError("refused")
    assert is_connection_error(wrapped)
    assert is_connection_error(DistNetworkError("refused"))
    assert not is_connection_error(ValueError("wrong"))

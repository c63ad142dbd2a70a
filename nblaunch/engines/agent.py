"""The agent of one node: torch's elastic agent, in a process of its own, with workers that its launcher starts.

    launcher (kernel) <── pipes ──> agent (fresh interpreter): main thread    torch's SimpleElasticAgent
        │ fork                                                 reader         what the launcher says
        └──> workers                                           bulletin       news of all nodes, twice a second

torch's agent decides: when to meet, who gets which ranks, whether to restart, when a node that came back is let in. Its
four abstract methods are answered here by messages: "start", "are they well", "stop". The agent never touches a worker.
:func:`main` is called with the number of an inherited memory file.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from nblaunch.engines.agent_rendezvous import connect, is_connection_error, make_handler, open_store
from nblaunch.engines.bulletin import Bulletin
from nblaunch.engines.elastic import LINGER_S, Orders
from nblaunch.events import Event
from nblaunch.topology import Topology
from nblaunch.wire import nodes
from nblaunch.wire.channel import EventReceiver, EventSender
from nblaunch.wire.nodes import (
    Ended,
    Formed,
    Hosting,
    Leave,
    Member,
    News,
    NodeNews,
    Over,
    StopWorkers,
    Summary,
)
from nblaunch.worker import stdio

BEAT_S = 0.5
"""Between two pages of news."""

_URGENT_BEATS_S = 0.1
"""The same while others may be waiting for a word: once this node is at its end, or while all agree on one."""

_RECONNECT_S = 5.0
_GATHER_S = 1.0
_FINAL = (nodes.DONE, nodes.FAILED, nodes.LEFT)
_GONE_S = 2.5
"""A node that has not been heard of for so long need not be waited for any more."""


def main(arguments: Sequence[str]) -> NoReturn:
    with os.fdopen(int(arguments[0]), "rb") as file:
        orders: Orders = pickle.load(file)
    stdio.capture(orders.log_path)
    exit_code = 1
    try:
        NodeAgent(orders).live()
        exit_code = 0
    finally:
        stdio.flush()
        os._exit(exit_code)


class RankTakenError(Exception):
    """Another node has the rank that this one was given."""


class NodeAgent:
    """What the three threads share, under one lock."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.id = f"{orders.host_name}-{os.getpid()}-{secrets.token_hex(4)}"
        self.launcher = EventSender(orders.writing_fd)
        self.changed = threading.Condition()
        meeting = orders.meeting
        self.news = NodeNews(
            self.id, 0, meeting.node_rank, orders.host_name, nodes.JOINING, terms=meeting.terms
        )
        self.others: tuple[NodeNews, ...] = ()
        self.members: tuple[Member, ...] = ()
        self.hosting: Hosting | None = None
        self.ended: Ended | None = None
        self._last_changes: dict[str, tuple[int, float]] = {}
        self._published = 0
        self._wanted = 0
        self._is_store_lost = False
        self._store: Any = None

    def live(self) -> None:
        """Run torch's agent to its end; every outcome is told to the launcher."""
        threading.Thread(target=self._listen, name="reader", daemon=True).start()
        try:
            self._store = open_store(self.orders.meeting)
            threading.Thread(target=self._keep_bulletin, name="bulletin", daemon=True).start()
            if self.orders.meeting.backend == "static":
                self._refuse_taken_rank()
            handler = make_handler(self.orders.meeting, self._store, self.id, self.orders.host_name)
            result = self._run(handler)
            is_success = result is not None and not result.is_failed()
            self.tell_all(nodes.DONE if is_success else nodes.FAILED)
            if is_success:
                self._gather_last_news()
            self._send(Over(-1, time.time(), is_success=is_success))
            handler.shutdown()
        except Exception as error:
            traceback.print_exc()
            story = self._story(error)
            self.tell_all(nodes.FAILED, reason="could not go on")
            self._send(Over(-1, time.time(), error=story, can_retry=is_connection_error(error)))
        self._linger()

    def _run(self, handler: Any) -> RunResult | None:
        spec = WorkerSpec(
            role="default",
            local_world_size=self.orders.num_workers,
            rdzv_handler=handler,
            entrypoint="nblaunch",
            max_restarts=self.orders.max_restarts,
            monitor_interval=self.orders.monitor_interval_s,
            local_addr=self.orders.address,
        )
        result: RunResult | None = _TorchAgent(spec, self).run()
        return result

    def tell_all(self, state: str, reason: str = "", node_rank: int | None = None) -> None:
        """Change what the next page of news says about this node, and have it published at once."""
        with self.changed:
            rank = self.news.node_rank if node_rank is None else node_rank
            if self.news.state != nodes.LEFT:
                self.news = replace(self.news, state=state, reason=reason, node_rank=rank)
            self.changed.notify_all()

    def begin(self, start: int) -> None:
        """From now on, news are about this start of the workers."""
        with self.changed:
            self.news = replace(self.news, start=start, summary=Summary(-1, 0.0))

    def count_start(self) -> int:
        """How often the workers of this job were started before."""
        return int(self._store.add(f"{self.orders.meeting.run_id}/starts", 1)) - 1

    def _send(self, event: Event) -> None:
        self.launcher.send(event)

    # --- the launcher --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take in what the launcher says. If it is gone, so is this node."""
        receiver = EventReceiver(self.orders.reading_fd)
        while True:
            select.select([receiver.fd], [], [])
            messages, is_closed = receiver.receive()
            for message in messages:
                self._heed(message)
            if is_closed:
                self._leave("ended: its launching process was killed")

    def _heed(self, message: Event) -> None:
        if isinstance(message, Leave):
            self._leave(message.reason)
        with self.changed:
            if isinstance(message, Hosting):
                self.hosting = message
            elif isinstance(message, Ended):
                self.ended = message
                self.news = replace(self.news, summary=message.summary)
            elif isinstance(message, Summary):
                self.news = replace(self.news, summary=message)
            self.changed.notify_all()

    def _leave(self, reason: str) -> NoReturn:
        """End this process, whatever its main thread waits for, once the others have heard of it."""
        self.tell_all(nodes.LEFT, reason)
        self._linger()
        stdio.flush()
        os._exit(0)

    def wait_for(self, name: str) -> Any:
        """Wait until the launcher has told ``hosting`` or ``ended``, and take it."""
        with self.changed:
            self.changed.wait_for(lambda: getattr(self, name) is not None)
            told = getattr(self, name)
            setattr(self, name, None)
            return told

    # --- the other nodes -----------------------------------------------------------------------------------------

    def _keep_bulletin(self) -> None:
        bulletin: Bulletin | None = None
        while True:
            try:
                bulletin = bulletin or Bulletin(
                    connect(self.orders.meeting, _RECONNECT_S), self.orders.meeting.run_id, self.id
                )
                self._exchange(bulletin)
            except Exception as error:
                # The store is gone, or does not answer: silence is what the launchers understand.
                print(f"no news: {type(error).__name__}: {error}", flush=True)
                bulletin = None
                with self.changed:
                    self._is_store_lost = True
                    self.changed.notify_all()
                time.sleep(BEAT_S)
            self._wait_for_news()

    def _wait_for_news(self) -> None:
        with self.changed:
            told = self._worth_telling()
            is_urgent = self.news.state in _FINAL or self.news.summary.stopping.is_wanted
            beat_s = _URGENT_BEATS_S if is_urgent else BEAT_S
            self.changed.wait_for(
                lambda: self._worth_telling() != told or self._wanted > self._published, beat_s
            )

    def _worth_telling(self) -> tuple[object, ...]:
        """What is told at once when it changes, rather than with the next beat."""
        summary = self.news.summary
        stop = summary.stopping
        replies = [reply for _, reply in stop.answers.values()]
        urgent = stop.is_wanted, stop.proposal, stop.decision, replies
        return self.news.state, summary.failed, summary.exits, summary.finished, urgent

    def _refuse_taken_rank(self) -> None:
        """Where ranks are given by people, two machines may have got the same.

        The page of a node that has died says the same rank, but its beat stands still.
        """
        self.refresh(_RECONNECT_S)
        with self.changed:
            first = {other.id: other.beat for other in self._with_same_rank()}
            self.changed.wait_for(lambda: not first or self._rivals(first), 3 * BEAT_S)
            rivals = self._rivals(first)
        if rivals:
            raise RankTakenError(
                f"node_rank={self.news.node_rank} is taken by a node on host {rivals[0].host} already; give each "
                "machine a rank of its own"
            )

    def _rivals(self, first: dict[str, int]) -> list[NodeNews]:
        """Those with this node's rank that have been heard of since their ``first`` beat."""
        return [other for other in self._with_same_rank() if other.beat > first.get(other.id, other.beat)]

    def _with_same_rank(self) -> list[NodeNews]:
        own = self.news.node_rank
        return [other for other in self.others if other.node_rank == own and other.state not in _FINAL]

    def refresh(self, timeout_s: float = _GATHER_S) -> None:
        """Have the launcher hear what all nodes say now."""
        with self.changed:
            wanted = self.news.beat + 1
            self._wanted = wanted
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._published >= wanted or self._is_store_lost, timeout_s)

    def _exchange(self, bulletin: Bulletin) -> None:
        with self.changed:
            heard = {other.id: other.beat for other in self.others}
            self.news = replace(self.news, beat=self.news.beat + 1, heard=heard, clock_s=time.monotonic())
            own = self.news
        others = bulletin.exchange(own)
        with self.changed:
            self.others, self._published, self._is_store_lost = others, own.beat, False
            for other in others:
                if self._last_changes.get(other.id, (-1, 0.0))[0] != other.beat:
                    self._last_changes[other.id] = (other.beat, time.monotonic())
            self.changed.notify_all()
        self._send(News(-1, time.time(), nodes=others))

    def _gather_last_news(self) -> None:
        """All nodes are done: wait a moment for what each says at its end."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._is_store_lost or all(other.state in _FINAL for other in self._companions),
                _GATHER_S,
            )

    @property
    def _companions(self) -> list[NodeNews]:
        ids = {member.id for member in self.members}
        return [other for other in self.others if other.id in ids]

    def _linger(self) -> None:
        """Stay until the last news are on the store; the node that has it, until all that live have read them."""
        with self.changed:
            final = self.news.beat + 1
            self.changed.wait_for(lambda: self._is_heard(final), LINGER_S)

    def _is_heard(self, beat: int) -> bool:
        if self._is_store_lost or not self.others:
            return True
        if self.orders.meeting.listen_fd < 0:
            # By then whoever hosts the store has been told, too, that this one heard of it.
            return self._published > beat
        return self._published >= beat and all(self._has_heard(other, beat) for other in self.others)

    def _has_heard(self, other: NodeNews, beat: int) -> bool:
        silent_s = time.monotonic() - self._last_changes[other.id][1]
        is_ending = other.state in _FINAL
        return other.heard.get(self.id, -1) >= beat or silent_s > (_GATHER_S if is_ending else _GONE_S)

    def _story(self, error: Exception) -> str:
        """What went wrong with the rendezvous, who is missing, and what to do."""
        meeting = self.orders.meeting
        if isinstance(error, RankTakenError):
            return str(error)
        if isinstance(error, RendezvousTimeoutError):
            return self._who_is_missing(str(error))
        if isinstance(error, RendezvousClosedError):
            return (
                f"the rendezvous {meeting.run_id!r} at {meeting.where} is closed: another node has given up or "
                "finished. Launch again on all nodes."
            )
        if not is_connection_error(error):
            return f"the rendezvous at {meeting.where} failed: {type(error).__name__}: {error}"
        if not self.news.beat:
            first = (
                "node 0 is missing" if meeting.backend == "static" else "the node that hosts it is missing"
            )
            return (
                f"node {meeting.node_rank} can't reach the rendezvous at {meeting.where} "
                f"({meeting.timeout_s:g} s): {first}. Is it launched, is that its address, and does no firewall close "
                f"the port? ({_first_line(error)})"
            )
        return f"the rendezvous at {meeting.where} is gone ({_first_line(error)})"

    def _who_is_missing(self, missing: str) -> str:
        meeting = self.orders.meeting
        with self.changed:
            now = time.monotonic()
            here = sorted(
                str(news)
                for news in (self.news, *self.others)
                if news.state == nodes.JOINING
                and (news.id == self.id or now - self._last_changes[news.id][1] < _GONE_S)
            )
        lack = f"{missing} did not come" if missing else f"{meeting.min_nodes - len(here)} more must come"
        return (
            f"the nodes did not find each other at {meeting.where} within {meeting.timeout_s:g} s: {lack}; here "
            f"{'is' if len(here) == 1 else 'are'} {', '.join(here)} of {meeting.min_nodes}. Launch it there with the "
            "same address, or allow more time with rdzv_timeout_s."
        )


class _TorchAgent(SimpleElasticAgent):
    """torch's agent, whose workers are the launcher's."""

    def __init__(self, spec: WorkerSpec, node: NodeAgent) -> None:
        super().__init__(spec)
        self._node = node
        self._are_running = False

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._node.tell_all(nodes.JOINING)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Agree with the other nodes on where the workers' own store is, and have the launcher start them."""
        store: Any = worker_group.store
        members = self._introduce(worker_group)
        place = _place(worker_group, members)
        node = self._node
        with node.changed:
            node.ended = node.hosting = None
            node.members = members
        node.tell_all(nodes.RUNNING, node_rank=place.node_rank)
        if place.node_rank == 0:
            restart_count = node.count_start()
            node.begin(restart_count)
            node.launcher.send(Formed(-1, time.time(), place, members, restart_count))
            port = node.wait_for("hosting").port
            store.set("nblaunch/start", f"{port} {restart_count}")
        else:
            port, restart_count = (int(part) for part in store.get("nblaunch/start").split())
            place = replace(place, master_port=port)
            node.begin(restart_count)
            node.launcher.send(Formed(-1, time.time(), place, members, restart_count))
        self._are_running = True
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _introduce(self, worker_group: WorkerGroup) -> tuple[Member, ...]:
        store: Any = worker_group.store
        own = Member(
            id=self._node.id,
            node_rank=worker_group.group_rank or 0,
            host=self._node.orders.host_name,
            address=self._node.orders.address,
            first_rank=worker_group.workers[0].global_rank,
            num_workers=len(worker_group.workers),
        )
        store.set(f"nblaunch/member/{own.node_rank}", pickle.dumps(own))
        keys = [f"nblaunch/member/{rank}" for rank in range(worker_group.group_world_size or 1)]
        return tuple(pickle.loads(page) for page in store.multi_get(keys))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._node.ended
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
            self._node.refresh()  # whoever waits for another start has said before whether it failed
            reason = "the set of nodes changes, so all workers start again"
            self._node.launcher.send(StopWorkers(-1, time.time(), reason=reason))
            self._node.wait_for("ended")

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """The launcher ends its workers by itself when it hears that the agent is done."""


def _place(worker_group: WorkerGroup, members: Sequence[Member]) -> Topology:
    """Where the first worker of this node stands."""
    first = worker_group.workers[0]
    return Topology(
        rank=first.global_rank,
        local_rank=0,
        node_rank=worker_group.group_rank or 0,
        world_size=first.world_size,
        local_world_size=len(worker_group.workers),
        num_nodes=worker_group.group_world_size or 1,
        master_addr=members[0].address,
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]

"""torch's elastic agent with workers that a launcher starts: its abstract methods, answered by messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from nblaunch.engines.agent_news import NewsExchange
from nblaunch.engines.elastic import Orders
from nblaunch.engines.launcher_line import LauncherLine
from nblaunch.topology import Topology
from nblaunch.wire import nodes, schema
from nblaunch.wire.nodes import Formed, Member, StopWorkers


class TorchAgent(SimpleElasticAgent):
    """torch's agent, whose workers are the launcher's.

    Args:
        orders: of the agent.
        handler: torch's, for the rendezvous.
        store: of the rendezvous.
        news: of this node and the others.
        launcher: starts the workers.
    """

    def __init__(
        self, orders: Orders, handler: Any, store: Any, news: NewsExchange, launcher: LauncherLine
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=orders.num_workers,
            rdzv_handler=handler,
            entrypoint="nblaunch",
            max_restarts=orders.max_restarts,
            monitor_interval=orders.monitor_interval_s,
            local_addr=orders.address,
        )
        super().__init__(spec)
        self._orders = orders
        self._job_store = store
        self._news = news
        self._launcher = launcher
        self._are_running = False

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._news.tell_all(nodes.JOINING)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Agree with the other nodes on where the workers' own store is, and have the launcher start them."""
        store: Any = worker_group.store
        members = self._introduce(worker_group)
        place = _place(worker_group, members)
        self._launcher.expect_workers()
        self._news.enter(members)
        self._news.tell_all(nodes.RUNNING, node_rank=place.node_rank)
        if place.node_rank == 0:
            restart_count = self._count_start()
            self._news.begin(restart_count)
            self._launcher.send(Formed(-1, time.time(), place, members, restart_count))
            port = self._launcher.wait_for_port()
            store.set("nblaunch/start", f"{port} {restart_count}")
        else:
            port, restart_count = (int(part) for part in store.get("nblaunch/start").split())
            place = replace(place, master_port=port)
            self._news.begin(restart_count)
            self._launcher.send(Formed(-1, time.time(), place, members, restart_count))
        self._are_running = True
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _count_start(self) -> int:
        """How often the workers of this job were started before."""
        return int(self._job_store.add(f"{self._orders.meeting.run_id}/starts", 1)) - 1

    def _introduce(self, worker_group: WorkerGroup) -> tuple[Member, ...]:
        store: Any = worker_group.store
        own = Member(
            id=self._news.id,
            node_rank=worker_group.group_rank or 0,
            host=self._orders.host_name,
            address=self._orders.address,
            first_rank=worker_group.workers[0].global_rank,
            num_workers=len(worker_group.workers),
        )
        store.set(f"nblaunch/member/{own.node_rank}", schema.dump(own))
        keys = [f"nblaunch/member/{rank}" for rank in range(worker_group.group_world_size or 1)]
        return tuple(schema.load(Member, page) for page in store.multi_get(keys))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._launcher.ended
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
            self._news.refresh()  # whoever waits for another start has said before whether it failed
            reason = "the set of nodes changes, so all workers start again"
            self._launcher.send(StopWorkers(-1, time.time(), reason=reason))
            self._launcher.wait_for_end()

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

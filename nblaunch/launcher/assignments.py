"""One attempt of a job, and what each of its workers is assigned: event pipe, outbox, log files, environment."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace

from nblaunch.engines.saved_call import SavedCall
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.peers import Peers
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire import descriptors, sealing
from nblaunch.wire.assignment import Assignment
from nblaunch.wire.board import Board, create_memory_file
from nblaunch.wire.channel import EventReceiver


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of this machine.

    Args:
        spec: what to run.
        plan: how.
        number: of this attempt, from 0.
        topology: of the first of these ranks. ``master_port`` 0: the workers' store is hosted here.
        log: the job's log folder.
        saved: the call as it was at the launch, where this attempt may start later; None = as it is now.
        peers: the other nodes of the job, where there are any.
        restart_count: how often workers were started before, the same number on all nodes.
    """

    spec: LaunchSpec
    plan: LaunchPlan
    number: int
    topology: Topology
    log: JobLog
    saved: SavedCall | None = None
    peers: Peers | None = None
    restart_count: int = 0

    @property
    def ranks(self) -> range:
        """Those that run on this machine."""
        return range(self.topology.rank, self.topology.rank + self.topology.local_world_size)


def assign(
    attempt: Attempt, board: Board, mark: int, stack: ExitStack, worker_ends: ExitStack
) -> tuple[list[Assignment], dict[int, EventReceiver]]:
    """Make each worker's descriptors and assignment.

    Args:
        attempt: with the port of the store in its topology.
        board: for the progress of all ranks.
        mark: by which the processes that come from the workers are found.
        stack: closes what this process keeps until the end of the attempt.
        worker_ends: closes what only the workers need, once they have it.

    Returns:
        The assignments, and rank -> where its events arrive.

    Raises:
        OSError: descriptors or memory ran out.
    """
    assignments, receivers = [], {}
    key = sealing.new_key() if attempt.topology.num_nodes == 1 else b""
    for local_rank, rank in enumerate(attempt.ranks):
        topology = replace(attempt.topology, rank=rank, local_rank=local_rank)
        reading, writing = os.pipe()
        descriptors.keep_from_children(reading)
        receivers[rank] = EventReceiver(reading, f"rank {rank}")
        stack.callback(descriptors.close, reading)
        worker_ends.callback(os.close, writing)
        outbox_fd = -1
        # Of weights, any rank may hold a shard.
        if _returns_value(attempt, topology) or attempt.plan.modules:
            outbox_fd = create_memory_file(f"nblaunch-outbox-{rank}")
            stack.callback(os.close, outbox_fd)
        assignments.append(
            Assignment(
                topology=topology,
                backend=attempt.plan.backend.name,
                environment=_environment(attempt, topology),
                defaults=attempt.spec.defaults,
                is_spmd=attempt.spec.is_spmd,
                attempt=attempt.number,
                board_fd=board.fd,
                event_fd=writing,
                outbox_fd=outbox_fd,
                log_path=str(attempt.log.log_path(rank, attempt.number)),
                stacks_path=str(attempt.log.stacks_path(rank, attempt.number)),
                num_threads=attempt.plan.num_threads,
                returns_value=_returns_value(attempt, topology),
                sends_weights_of=tuple(attempt.plan.modules),
                key=key,
                mark=mark,
            )
        )
    return assignments, receivers


def _returns_value(attempt: Attempt, topology: Topology) -> bool:
    return topology.local_rank == 0 or attempt.spec.return_all


def _environment(attempt: Attempt, topology: Topology) -> dict[str, str | None]:
    """Return what a worker sets, or with None unsets, before anything else."""
    backend, peers = attempt.plan.backend, attempt.peers
    return {
        **topology.to_env(attempt.number),
        **attempt.spec.environment,
        **backend.worker_env(topology),
        **((backend.spmd_env() or {}) if attempt.spec.is_spmd else {}),
        **(peers.worker_settings(topology, attempt.restart_count) if peers is not None else {}),
    }

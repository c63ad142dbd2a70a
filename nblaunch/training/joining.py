"""Joining a job: a process takes its place, which is a :class:`Member`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nblaunch import backends, context
from nblaunch.backends.base import Backend
from nblaunch.topology import Topology
from nblaunch.training.options import InitProcessGroupKwargs
from nblaunch.wire.board import Slot


@dataclass(frozen=True)
class Member:
    """A process that has taken its place in the job.

    Args:
        topology: its ranks, those of the process group where there is one.
        backend: the device family it computes on.
        device: its device.
        slot: its slot of the progress board.
    """

    topology: Topology
    backend: Backend
    device: torch.device
    slot: Slot

    def __reduce__(self) -> tuple[Any, ...]:
        return _here, ()  # what is pickled with it takes the place of the process that it arrives in


def join(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> Member:
    """Take this process's place: choose its device and join the process group, unless that was done already.

    Args:
        cpu: compute on the CPU even where the context has another backend.
        init: how to join the process group.

    Raises:
        RuntimeError: the environment speaks of several processes but not of where they meet.
    """
    ctx = context.current()
    backend = backends.choose("cpu") if cpu else ctx.backend
    device = backend.device(ctx.topology)
    init = init or InitProcessGroupKwargs()
    if init.backend is not None or init.init_method is not None:
        _join_by_hand(ctx.topology, backend, init)
    backend.join(ctx.topology, device, init.timeout.total_seconds() if init.timeout is not None else None)
    return Member(_agreed_topology(ctx.topology), backend, device, ctx.slot)


def _join_by_hand(topology: Topology, backend: Backend, init: InitProcessGroupKwargs) -> None:
    """Join a group of the kind, or at the place, that the user names; a lone process needs none."""
    if is_distributed() or topology.world_size == 1:
        return
    dist.init_process_group(
        init.backend or backend.process_group,
        init_method=init.init_method,
        timeout=init.timeout,
        rank=topology.rank,
        world_size=topology.world_size,
    )


def _here() -> Member:
    session = context.current().training
    return join() if session is None else session.member


def is_distributed() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def _agreed_topology(topology: Topology) -> Topology:
    """Return the topology of the context, corrected by the process group that a script may have made by itself."""
    if not is_distributed():
        if topology.world_size > 1:
            raise RuntimeError(
                f"this process is rank {topology.rank} of {topology.world_size} by its environment, but MASTER_PORT is "
                "not set, so that it can't find the others. Start it with notebook_launcher or torchrun, or call "
                "torch.distributed.init_process_group before the Accelerator is built."
            )
        return topology
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (topology.rank, topology.world_size):
        return topology
    # Without a launcher's word on nodes, all processes are taken to run on this one.
    return Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)

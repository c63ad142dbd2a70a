"""The process group of a job: :func:`join` it, as a :class:`JoinedProcess`."""

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
class JoinedProcess:
    """This process, once it has joined the process group of its job: its rank and device, which stay.

    Everything in ``nblaunch.training`` that needs them is passed this one object, as ``process``.

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
        # What is pickled with it stands for the process that it arrives in.
        return _of_this_process, ()


def configure_device(spmd: bool, downcast_bf16: bool) -> None:
    """Configure the device of this process before it is first used: before :func:`join`.

    Args:
        spmd: this process drives all devices of its host.
        downcast_bf16: represent ``float`` as bf16, see ``Accelerator``; also where the launcher was given it.
    """
    worker = context.current()
    if spmd:
        worker.backend.enable_spmd()
    if downcast_bf16 or worker.accelerator_defaults.get("downcast_bf16"):
        worker.backend.downcast_to_bf16()


def join(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> JoinedProcess:
    """Choose this process's device and join the process group, unless that was done already.

    Args:
        cpu: compute on the CPU even where the context has another backend.
        init: how to join the process group.

    Raises:
        RuntimeError: the environment has several processes but no address of their rendezvous.
    """
    worker = context.current()
    backend = backends.choose("cpu") if cpu else worker.backend
    device = backend.device(worker.topology)
    init = init or InitProcessGroupKwargs()
    if init.backend is not None or init.init_method is not None:
        _join_by_hand(worker.topology, backend, init)
    backend.join(worker.topology, device, init.timeout.total_seconds() if init.timeout is not None else None)
    return JoinedProcess(_actual_topology(worker.topology), backend, device, worker.slot)


def _of_this_process() -> JoinedProcess:
    shared = context.current().training
    return join() if shared is None else shared.process


def _join_by_hand(topology: Topology, backend: Backend, init: InitProcessGroupKwargs) -> None:
    """Join a group of the kind, or at the address, that the user names; a lone process needs none."""
    if is_distributed() or topology.world_size == 1:
        return
    dist.init_process_group(
        init.backend or backend.dist_backend,
        init_method=init.init_method,
        timeout=init.timeout,
        rank=topology.rank,
        world_size=topology.world_size,
    )


def is_distributed() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def _actual_topology(topology: Topology) -> Topology:
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
    # Nothing is known of nodes, so all processes are taken to run on this one.
    return Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)

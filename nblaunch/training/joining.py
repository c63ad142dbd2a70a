"""This process in its job: :func:`join` chooses its device and has the backend join the process group.

Backends call ``init_process_group``, mostly by ``backends/process_group.py``; where the user's
``InitProcessGroupKwargs`` name a backend or an ``init_method``, :func:`join` does. In workers of nblaunch it returns
when all ranks have come. Also here: barriers, :func:`one_at_a_time`, and the state that the board shows of a rank that
waits. Uneven inputs, which torch's ``Join`` is for, are in ``gradients.py``.

Processes that ``multiprocessing`` starts in a rank have its numbers, and stay out of the group.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from nblaunch import backends, context
from nblaunch.backends.base import Backend
from nblaunch.context import ProcessContext
from nblaunch.events import WorkerState
from nblaunch.topology import Topology
from nblaunch.training.options import InitProcessGroupKwargs
from nblaunch.wire.board import Slot

_RANK_ENTRY = "nblaunch_rank"


@dataclass(frozen=True)
class JoinedProcess:
    """This process, once it has joined the process group of its job: its rank and device, which stay.

    Everything in ``nblaunch.training`` that needs them is passed this one object, as ``process``. A lone process, and
    one that ``multiprocessing`` started in a rank, has it without a process group.
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
        downcast_bf16: see ``Accelerator``; also where the launcher was given it.
    """
    here = context.current()
    if _rank_that_started_this(here) is not None:
        return
    if spmd:
        here.backend.enable_spmd()
    if downcast_bf16 or here.accelerator_defaults.get("downcast_bf16"):
        here.backend.downcast_to_bf16()


def join(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> JoinedProcess:
    """Choose this process's device and join the process group, unless that was done already.

    A process that ``multiprocessing`` started afresh in a rank, as a loader's worker, joins no group: it has the
    environment of its rank, whose place in the group is taken. It gets the numbers and the device of that rank.

    Raises:
        RuntimeError: the environment has several processes but no address of their rendezvous.
    """
    here = context.current()
    rank = _rank_that_started_this(here)
    if rank is not None:
        return rank
    backend = backends.choose("cpu") if cpu else here.backend
    device = backend.device(here.topology)
    init = init or InitProcessGroupKwargs()
    if init.backend is not None or init.init_method is not None:
        _join_by_hand(here.topology, backend, init)
    backend.join(here.topology, device, init.timeout.total_seconds() if init.timeout is not None else None)
    if here.topology.world_size > 1 and not is_distributed():
        raise RuntimeError(
            f"this process is rank {here.topology.rank} of {here.topology.world_size} according to its "
            "environment, but MASTER_PORT is not set, so it can't find the other ranks. Start it with "
            "notebook_launcher or torchrun, or call torch.distributed.init_process_group before the Accelerator is "
            "built."
        )
    process = JoinedProcess(current_topology(), backend, device, here.slot)
    if here.topology.master_port or is_distributed():
        _mark_children(process, here.topology.to_env())
    return process


def _mark_children(process: JoinedProcess, environment: dict[str, str]) -> None:
    """Let processes that ``multiprocessing`` starts from now on know that this one is a rank.

    A process inherits the configuration of the one that creates it, whatever the start method, along with the key of
    its connections. The environment does not suffice: a forkserver keeps the environment of its start. The types are
    such that any interpreter can unpickle them.
    """
    entry = environment, asdict(process.topology), process.backend.name, str(process.device)
    multiprocessing.current_process()._config[_RANK_ENTRY] = entry  # type: ignore[attr-defined]


def _rank_that_started_this(here: ProcessContext) -> JoinedProcess | None:
    """Return the rank that started this process, in which its device may be of no use; None if there is none.

    A process with another environment than that rank has a place of its own.
    """
    if multiprocessing.parent_process() is None or is_distributed():
        return None
    entry = multiprocessing.current_process()._config.get(_RANK_ENTRY)  # type: ignore[attr-defined]
    if entry is None or entry[0] != here.topology.to_env():
        return None
    _, topology, name, device = entry
    backend = backends.discover().get(name, here.backend)
    return JoinedProcess(Topology(**topology), backend, torch.device(device), here.slot)


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


def current_topology() -> Topology:
    """Return the topology of the context, corrected by the process group that a script may have made by itself."""
    topology = context.current().topology
    if not is_distributed():
        return topology
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (topology.rank, topology.world_size):
        return topology
    # Nothing is known of nodes, so all processes are taken to run on this one.
    return Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)


# --- waiting for other ranks ------------------------------------------------------------------------------------------


class waiting:
    """Context manager: show on the board that this rank waits for others, then what it showed before.

    So a slow rank can be distinguished from those that wait for it.
    """

    __slots__ = ("_before", "_slot")

    def __enter__(self) -> None:
        self._slot = context.current().slot
        self._before = self._slot.state
        self._slot.set_state(WorkerState.WAITING)

    def __exit__(self, *exc_info: object) -> None:
        self._slot.set_state(self._before)
        self._slot.note_progress()


def barrier(device: torch.device) -> None:
    """Wait until every rank has come here; return at once where there is no process group."""
    if not is_distributed():
        return
    with waiting():
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[device.index or 0])
        else:
            dist.barrier()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run the block in one process of this machine after the other, as to build a model that memory holds but once.

        with nblaunch.one_at_a_time():
            model = build_model().to(accelerator.device)

    Nothing in the block may wait for other ranks: they wait for its end. In processes that nblaunch did not launch it
    does nothing.
    """
    with context.current().locks.lock():
        yield

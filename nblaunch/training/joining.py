"""Makes this process part of its job: :func:`join` chooses its device, and the backend joins the process group.

Backends call ``init_process_group``, mostly through ``backends/process_group.py``. If the user's
``InitProcessGroupKwargs`` name a backend or an ``init_method``, :func:`join` calls that function itself. In nblaunch's
workers, :func:`join` returns when all ranks have joined. This module also has barriers, :func:`one_at_a_time`, and the
board's state for waiting ranks. torch's ``Join`` for uneven inputs is unrelated; see ``uneven_inputs.py``.

Processes that ``multiprocessing`` starts in a rank have the rank's topology, but do not join the group.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from nblaunch import backends, context, env, formatting
from nblaunch.backends.base import Backend
from nblaunch.context import ProcessContext
from nblaunch.events import WorkerState
from nblaunch.topology import Topology, missing_variables
from nblaunch.training.options import InitProcessGroupKwargs
from nblaunch.wire.board import Slot

_RANK_ENTRY = "nblaunch_rank"


@dataclass(frozen=True)
class JoinedProcess:
    """The rank and the device of this process, after it has joined its job's process group. Neither changes later.

    All code in ``nblaunch.training`` that needs them gets this object as ``process``. A single process also has this
    object, and so does a process that ``multiprocessing`` started in a rank, but neither is in a process group.
    """

    topology: Topology
    backend: Backend
    device: torch.device
    slot: Slot

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled object describes the process that unpickled it.
        return _of_this_process, ()


def configure_device(spmd: bool, downcast_bf16: bool) -> None:
    """Configure the device of this process before its first use, that is, before :func:`join`.

    Args:
        spmd: this process drives all devices of its host.
        downcast_bf16: see ``Accelerator``; the launcher may also set it.
    """
    here = context.current()
    if _rank_that_started_this(here) is not None:
        return
    if spmd:
        here.backend.enable_spmd()
    if downcast_bf16 or here.accelerator_defaults.get("downcast_bf16"):
        here.backend.downcast_to_bf16()


def join(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> JoinedProcess:
    """Choose this process's device, and join the process group if it has not joined yet.

    A process that ``multiprocessing`` started in a rank, such as a loader's worker, does not join, because the rank
    itself is the member of the group. The process gets the topology and the device of its rank.

    Raises:
        RuntimeError: the environment describes several processes, but has no address for their rendezvous.
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
        missing = missing_variables(env.snapshot())
        raise RuntimeError(
            f"this process is rank {here.topology.rank} of {here.topology.world_size} according to its "
            f"environment, but it can't find the other ranks, because {formatting.joined(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start it with "
            "notebook_launcher or torchrun, or call torch.distributed.init_process_group before you create the "
            "Accelerator."
        )
    process = JoinedProcess(current_topology(), backend, device, here.slot)
    if here.topology.master_port or is_distributed():
        _mark_children(process, here.topology.to_env())
    return process


def _mark_children(process: JoinedProcess, environment: dict[str, str]) -> None:
    """Mark processes that ``multiprocessing`` starts from now on as children of a rank.

    With every start method, a process inherits its parent's ``_config``. The environment is not sufficient: a
    forkserver keeps the environment that it started with. The entry contains only types that any interpreter can
    unpickle.
    """
    entry = environment, asdict(process.topology), process.backend.name, str(process.device)
    multiprocessing.current_process()._config[_RANK_ENTRY] = entry  # type: ignore[attr-defined]


def _rank_that_started_this(here: ProcessContext) -> JoinedProcess | None:
    """Return the rank that started this process with ``multiprocessing``; None if there is none.

    A process whose environment differs from the environment of that rank is a rank itself. The returned device may not
    be usable in this process.
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
    """Join a group with the user's backend or address. A single process needs no group."""
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
    """Return the topology from the context, or from a process group that the script created itself."""
    topology = context.current().topology
    if not is_distributed():
        return topology
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (topology.rank, topology.world_size):
        return topology
    # The nodes are unknown, so assume that all processes run on this one.
    return Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)


# --- waiting for other ranks ------------------------------------------------------------------------------------------


class waiting:
    """Context manager: shows on the board that this rank is waiting for other ranks, and restores the previous state.

    This distinguishes a slow rank from the ranks that are waiting for it.
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
    """Wait until every rank has called this; return immediately without a process group."""
    if not is_distributed():
        return
    with waiting():
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[device.index or 0])
        else:
            dist.barrier()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run the block in one process on this machine at a time, for example if a model fits only once into host memory.

        with nblaunch.one_at_a_time():
            model = build_model().to(accelerator.device)

    The block must not wait for other ranks, because they wait for it to end. In processes that nblaunch did not launch,
    this does nothing.
    """
    with context.current().locks.lock():
        yield

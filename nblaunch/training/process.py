"""This process among the processes of its job: joining them, knowing one's place, waiting, taking turns.

:class:`ProcessControl` implements what ``Accelerator``, ``PartialState`` and ``AcceleratorState`` share, once. It
needs nothing but a :class:`Member`, and never looks at models, loaders or precision.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nblaunch import backends, context, env
from nblaunch.backends import process_group
from nblaunch.backends.base import Backend
from nblaunch.events import WorkerState
from nblaunch.topology import Topology
from nblaunch.training import splitting
from nblaunch.training.options import InitProcessGroupKwargs
from nblaunch.wire import stopping
from nblaunch.wire.board import Slot

F = TypeVar("F", bound=Callable[..., Any])


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
    ctx.end_building()  # joining waits for all ranks
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


def compares_shapes() -> bool:
    """Whether collectives compare the shapes of their tensors over ranks first."""
    return bool(context.current().defaults.get("debug") or env.read("ACCELERATE_DEBUG_MODE"))


def is_distributed() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def _agreed_topology(topology: Topology) -> Topology:
    """The topology of the context, corrected by the process group that a script may have made by itself."""
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


class Waiting:
    """Context manager: the board shows that this rank waits for others, then what it showed before."""

    __slots__ = ("_before", "_slot")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __enter__(self) -> None:
        context.current().end_building()  # or the others, who wait for their turn, would never come
        self._before = self._slot.state
        self._slot.set_state(WorkerState.WAITING)

    def __exit__(self, *exc_info: object) -> None:
        self._slot.set_state(self._before)


def waiting() -> Waiting:
    """:class:`Waiting` on the slot of this process."""
    return Waiting(context.current().slot)


def barrier(device: torch.device) -> None:
    """Wait until every rank has come here; returns at once where there is no process group."""
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
    with context.current().turn(is_alone=True):
        yield


class ProcessControl(ABC):
    """Ranks, barriers, turns and the like. Final classes give it its ``_member``."""

    @property
    @abstractmethod
    def _member(self) -> Member:
        """The place of this process."""

    # --- who am I ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._member.device

    @property
    def num_processes(self) -> int:
        """Processes in the job."""
        return self._member.topology.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process in the job, from 0."""
        return self._member.topology.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self._member.topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self._member.topology.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self._member.topology.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank of the job."""
        return self._member.topology.rank == self._member.topology.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._member.topology.world_size > 1

    @property
    def backend(self) -> str | None:
        """Name of the process group's backend, as ``"gloo"``; None for a lone process without a group."""
        return str(dist.get_backend()) if is_distributed() else None

    @property
    def debug(self) -> bool:
        """Whether collectives compare shapes over ranks: as launched with ``debug``, or ``ACCELERATE_DEBUG_MODE``."""
        return compares_shapes()

    @property
    def fork_launched(self) -> bool:
        """Whether ``notebook_launcher`` started this process."""
        return context.is_worker()

    @property
    def default_device(self) -> torch.device:
        """The kind of device that this process computes on, without a number."""
        return torch.device(self._member.device.type)

    def set_device(self) -> None:
        """Make :attr:`device` the current one again, where the script chose another."""
        self._member.backend.device(self._member.topology)

    # --- waiting and taking turns --------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        barrier(self._member.device)

    @property
    def should_stop(self) -> bool:
        """Whether somebody asked the job to end well (``job.stop()``): True at the same look on every rank.

        Look at it once a step, on every rank: ``if accelerator.should_stop: break``. Costs a read of shared memory.
        """
        return stopping.should_stop(self._member.slot)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block first, the others wait at its entry until it is through."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The main process of each machine runs the block first, the others wait at its entry."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        # Not in a ``finally``: if the block failed, the others must not go on with what it did not produce. The
        # launcher stops them.
        if is_first:
            self.wait_for_everyone()

    # --- only some processes -------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the main process of each machine; nothing on the others."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Any = None) -> Any:
        """Decorator: call ``function`` on the main process only; None on the others. With or without parentheses."""
        return self._maybe_later(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorator: as :meth:`on_main_process`, for the main process of each machine."""
        return self._maybe_later(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator: call ``function`` on the last process only; None on the others."""
        return self._only_where(lambda: self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorator: call ``function`` on one rank of the job only, nowhere where there are fewer ranks."""
        index = self._check_index("process_index", process_index)
        return self._maybe_later(function, lambda: self.process_index == index)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorator: as :meth:`on_process`, for one rank of each machine."""
        index = self._check_index("local_process_index", local_process_index)
        return self._maybe_later(function, lambda: self.local_process_index == index)

    @staticmethod
    def _check_index(name: str, index: int | None) -> int:
        # What is for rank 3 must not keep the script from running on two ranks.
        if index is None or index < 0:
            raise ValueError(f"{name}={index!r} is not a rank; ranks count from 0")
        return index

    def _maybe_later(self, function: Any, is_here: Callable[[], bool]) -> Any:
        if function is None:
            return functools.partial(self._only_where, is_here)
        return self._only_where(is_here, function)

    @staticmethod
    def _only_where(is_here: Callable[[], bool], function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_here() else None

        return call  # type: ignore[return-value]

    # --- sharing work --------------------------------------------------------------------------------------------

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of ``inputs``, in order. The first ``len(inputs) % num_processes`` ranks get one more.

        Args:
            inputs: list, tuple, tensor (split on dim 0), dict of these of equal length, or an object with ``len`` and
                ``select(indices)`` as ``datasets.Dataset``.
            apply_padding: repeat the last element until all shares are equally long, so that they can be gathered.

        Raises:
            ValueError: the values of a dict differ in length.
            TypeError: ``inputs`` is none of these types.
        """
        topology = self._member.topology
        yield splitting.split_evenly(inputs, topology.rank, topology.world_size, apply_padding)

    def destroy_process_group(self) -> None:
        """Leave the process group, if there is one."""
        process_group.leave()

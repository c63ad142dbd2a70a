"""Methods that concern one process: its rank, barriers, and work that only some ranks do.

:class:`ProcessMethods` implements the methods that ``Accelerator``, ``PartialState`` and ``AcceleratorState`` have in
common. It needs only a :class:`JoinedProcess`, and is independent of models, loaders and precision.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nblaunch import context, formatting
from nblaunch.backends import process_group
from nblaunch.training.collectives.operations import compares_shapes
from nblaunch.training.joining import JoinedProcess, barrier, is_distributed
from nblaunch.wire import stop_agreement

F = TypeVar("F", bound=Callable[..., Any])


class ProcessMethods(ABC):
    """Ranks, barriers, and work that only some ranks do. Concrete classes implement ``_process``."""

    @property
    @abstractmethod
    def _process(self) -> JoinedProcess:
        """This process: its ranks, device and board slot."""

    # --- identity ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._process.device

    @property
    def num_processes(self) -> int:
        """Number of processes in the job."""
        return self._process.topology.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process in the job, from 0."""
        return self._process.topology.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine, from 0."""
        return self._process.topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 in the job."""
        return self._process.topology.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 on its machine."""
        return self._process.topology.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank in the job."""
        return self._process.topology.rank == self._process.topology.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._process.topology.world_size > 1

    @property
    def backend(self) -> str | None:
        """Name of the process group's backend, such as ``"gloo"``; None without a process group."""
        return str(dist.get_backend()) if is_distributed() else None

    @property
    def debug(self) -> bool:
        """Whether collectives compare shapes across ranks, set by the launch or ``ACCELERATE_DEBUG_MODE``; settable."""
        return compares_shapes()

    @debug.setter
    def debug(self, is_wanted: bool) -> None:
        context.current().compares_shapes = bool(is_wanted)

    @property
    def fork_launched(self) -> bool:
        """Whether ``notebook_launcher`` started this process."""
        return context.is_worker()

    @property
    def default_device(self) -> torch.device:
        """The device type of this process, without an index."""
        return torch.device(self._process.device.type)

    def set_device(self) -> None:
        """Make :attr:`device` the current device again, if the script selected another one."""
        self._process.backend.device(self._process.topology)

    # --- waiting ---------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        barrier(self._process.device)

    @property
    def should_stop(self) -> bool:
        """Whether ``job.stop()`` was called; it becomes True in the same step on every rank.

        Read it once per step on every rank: ``if accelerator.should_stop: break``. It only reads shared memory.
        """
        return stop_agreement.should_stop(self._process.slot)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first. Other processes enter it after the main process has left it.

        Example::

            with accelerator.main_process_first():  # one process downloads, the others read its copy
                dataset = load_dataset("imdb")
        """
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the main process of each machine first; see :meth:`main_process_first`."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        # Don't use ``finally``: if the block failed, its result is missing, and the others must not continue. The
        # launcher stops them.
        if is_first:
            self.wait_for_everyone()

    # --- only some processes -------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each machine; do nothing on other ranks."""
        if self.is_local_main_process:
            if (training := context.current().training) is not None:
                training.watch.before_show(args)
            print(*args, **kwargs)

    def on_main_process(self, function: Any = None) -> Any:
        """Decorate ``function`` to run only on the main process; it returns None on other ranks.

        Example::

            @accelerator.on_main_process
            def report(loss):
                print(f"loss {loss:.3f}")
        """
        return _only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorate ``function`` to run only on the main process of each machine; see :meth:`on_main_process`."""
        return _only_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F) -> F:
        """Decorate ``function`` to run only on the last process; it returns None on other ranks."""
        return _only_where(lambda: self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate ``function`` to run only on one rank of the job. A single process always runs it.

        Args:
            function: the function; None: return the decorator, as for ``@on_process(process_index=1)``.
            process_index: the rank, from 0.

        Raises:
            ValueError: ``process_index`` is missing or negative.
        """
        index = _checked("process_index", process_index)
        return _only_where(lambda: not self.use_distributed or self.process_index == index, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate ``function`` to run only on one rank of each machine; see :meth:`on_process`."""
        index = _checked("local_process_index", local_process_index)
        return _only_where(lambda: not self.use_distributed or self.local_process_index == index, function)

    # --- sharing work --------------------------------------------------------------------------------------------

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's share of ``inputs``, in order. The first ``len(inputs) % num_processes`` shares are longer.

        Args:
            inputs: a list, a tuple, a tensor (split along dim 0), a dict of these with equal lengths, or an
                object with ``len`` and ``select(indices)``, such as ``datasets.Dataset``.
            apply_padding: repeat the last element until all shares have the same length, so that they can be gathered
                later.

        Raises:
            ValueError: the values of a dict differ in length.
            TypeError: ``inputs`` has another type.

        Example::

            with accelerator.split_between_processes(prompts) as mine:
                outputs = accelerator.gather_object([generate(prompt) for prompt in mine])
        """
        topology = self._process.topology
        yield split_evenly(inputs, topology.rank, topology.world_size, apply_padding)

    def destroy_process_group(self) -> None:
        """Leave the process group, if there is one."""
        process_group.leave()


def _checked(name: str, index: int | None) -> int:
    # Accept ranks that do not exist, because code for rank 3 must also run on two ranks.
    if index is None or index < 0:
        raise ValueError(f"{name}={index!r} is not a rank; ranks are numbered from 0")
    return index


def _only_where(is_here: Callable[[], bool], function: Any) -> Any:
    """Wrap ``function`` to run only if ``is_here()``; without a function, return the decorator."""
    if function is None:
        return functools.partial(_only_where, is_here)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_here() else None

    return call


def split_evenly(inputs: Any, rank: int, world_size: int, apply_padding: bool) -> Any:
    """Return a rank's share of ``inputs``; see ``ProcessMethods.split_between_processes``."""
    if world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values of a dict must have equal lengths to be split, got {lengths}")
        shares = {key: split_evenly(value, rank, world_size, apply_padding) for key, value in inputs.items()}
        if isinstance(inputs, dict):
            return shares
        try:
            return type(inputs)(shares)  # type: ignore[call-arg]
        except TypeError:  # its constructor needs more than a mapping
            return shares
    indices = share_of(len(inputs), rank, world_size, apply_padding)
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        return inputs.select(indices)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(indices, dtype=torch.long, device=inputs.device)]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)([inputs[index] for index in indices])
    raise TypeError(
        f"split_between_processes can't split {formatting.kind(inputs)}; pass a list, tuple or tensor, a dict "
        "of these, or an object with `select` such as datasets.Dataset"
    )


def share_of(length: int, rank: int, world_size: int, apply_padding: bool = False) -> list[int]:
    """Return the indices of a rank's consecutive share of ``range(length)``, optionally padded with its last index."""
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    indices = list(range(start, start + size + (1 if rank < extra else 0)))
    if apply_padding and length and extra:
        indices += [indices[-1] if indices else length - 1] * (size + 1 - len(indices))
    return indices

"""What training keeps per process: :class:`SharedState`, which lives in ``context.current().training``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nblaunch import context
from nblaunch.errors import warn
from nblaunch.events import WorkerState
from nblaunch.progress.board_reports import BusyTime, LoopStack, LossReport, length_of
from nblaunch.progress.reports import get_reports
from nblaunch.training import joining
from nblaunch.training.accumulation import AccumulationState, LoaderStack
from nblaunch.training.checks.watch import Watch
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.models import bare_module
from nblaunch.training.options import InitProcessGroupKwargs
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.precision import Precision

if TYPE_CHECKING:
    from nblaunch.training.strategies import Strategy, StrategyPlugin
    from nblaunch.training.strategies.base import TrainingSetup

T = TypeVar("T")


@dataclass
class SharedState:
    """What all Accelerators, loaders and optimizers of one process share.

    Args:
        process: its ranks, device and board slot, once it has joined the job.
        loaders: the prepared loaders that it is reading.
        accumulation: the accumulation window that was entered last, or else the latest Accelerator's.
        loops: the running loops over loaders and iterables, shown on the board.
        losses: reports losses there, and the memory of the device.
        busy_time: reports time per step spent without waiting for other ranks.
        watch: runs the checks for errors that raise nothing.
        models: prepared models, by whose mode training and evaluating differ.
        precision: of the latest Accelerator; None before there is one.
        plugin: of the latest Accelerator, by which it built its strategy; None before there is one.
        parallelism: how the ranks are divided, since the latest Accelerator; None: all are replicas.
        label: member of ``DistributedType`` for its strategy, as ``"FSDP"``; empty if every rank has whole models.
        strategies: strategies of all Accelerators, by ``id``, because a user's strategy may not be hashable.
        is_resuming: the middle of an epoch was loaded, and is not read yet.
        attributes: what users set on ``PartialState()`` and the other views, by class.
        has_checked_models: there was a backward pass, see :meth:`check_models`.
        init: how the process group was joined.
    """

    process: JoinedProcess
    loaders: LoaderStack
    accumulation: AccumulationState
    loops: LoopStack
    losses: LossReport
    busy_time: BusyTime
    watch: Watch
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    precision: Precision | None = None
    plugin: StrategyPlugin | None = None
    parallelism: ParallelismConfig | None = None
    label: str = ""
    strategies: weakref.WeakValueDictionary[int, Strategy] = field(
        default_factory=weakref.WeakValueDictionary
    )
    is_resuming: bool = False
    attributes: dict[type, dict[str, Any]] = field(default_factory=dict)
    has_checked_models: bool = False
    init: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # What is pickled with it takes part in the job of the process that it arrives in.
        return get_shared_state, ()

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different data: all, but for those that compute every layer together."""
        world_size = self.process.topology.world_size
        return world_size if self.parallelism is None else self.parallelism.data_parallel_size

    @property
    def data_rank(self) -> int:
        """Which of them this is; ranks with the same data lie side by side."""
        topology = self.process.topology
        return topology.rank * self.num_data_ranks // topology.world_size

    @property
    def counts_samples(self) -> bool:
        """Whether this rank reports the samples that it reads: the first of those that read the same ones does."""
        topology = self.process.topology
        return topology.rank % (topology.world_size // self.num_data_ranks) == 0

    def show_progress(self, iterable: Iterable[T], total: int | None, desc: str | None) -> Iterator[T]:
        """Iterate over ``iterable`` and show its steps; see ``Accelerator.progress``."""
        is_over_epochs = "epoch" in (desc or "").lower()
        status = desc if context.current().is_launched and not is_over_epochs else None
        if status:
            print(status, end="\r", flush=True)
        length = total if total is not None else length_of(iterable)
        loop = self.loops.begin(length, 0, WorkerState.RUNNING, is_over_epochs=is_over_epochs)
        try:
            for item in iterable:
                yield item
                self.loops.advance(loop)
        finally:
            self.losses.flush()
            self.loops.end(loop)
            if status:
                print(" " * len(status), end="\r", flush=True)  # what is left is kept as a line

    def check_models(self) -> None:
        """Warn, at the first backward pass, where its gradients stay on their rank: no model was prepared."""
        self.has_checked_models = True
        topology = self.process.topology
        if topology.world_size > 1 and topology.rank == 0 and not self.models:
            warn(
                "no model was prepared, so each rank trains its own copy with its own gradients. Pass the model to "
                "prepare as well: model, optimizer = accelerator.prepare(model, optimizer). (A model that you "
                "wrapped in DistributedDataParallel yourself does not need this.)"
            )

    def adopt(
        self, plugin: StrategyPlugin, strategy: Strategy, setup: TrainingSetup, precision: Precision
    ) -> None:
        """Apply the choices of a new Accelerator to the process."""
        self.plugin, self.parallelism = plugin, setup.parallelism
        self.accumulation = setup.accumulation
        self.precision = precision
        self.label = strategy.label if strategy.holds_shards else ""
        self.strategies[id(strategy)] = strategy

    def take_resuming(self) -> bool:
        """Return whether the middle of an epoch was loaded that now begins to be read; True once."""
        is_resuming, self.is_resuming = self.is_resuming, False
        return is_resuming

    @property
    def is_training(self) -> bool:
        """Whether gradients are recorded, and a prepared model, if there is any, is in training mode.

        The user's own module is asked: ``eval()`` of DeepSpeed's engine, or of what ``unwrap_model`` returns, leaves
        the mode of the wrapper as it is.
        """
        modules = (bare_module(model) for model in self.models)
        return torch.is_grad_enabled() and (not self.models or any(module.training for module in modules))


def get_shared_state(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> SharedState:
    """Return the shared state of this process; the first call joins the process group.

    Raises:
        ValueError: ``cpu`` was asked for, but the process computes on another device already.
    """
    here = context.current()
    init = init or InitProcessGroupKwargs()
    is_joined = joining.is_distributed() and (here.training is None or here.training.init != init)
    if is_joined and init.to_kwargs():
        given = ", ".join(f"{name}={value}" for name, value in init.to_kwargs().items())
        warn(f"{given} has no effect, because this process has already joined its process group")
    if here.training is None:
        process = joining.join(cpu, init)
        reports, loaders = get_reports(), LoaderStack()
        reports.losses.backend = process.backend  # it may compute on the CPU beside a device
        watch = Watch(here)
        reports.at_begin.append(_weak(watch.begin_anew))
        here.training = SharedState(
            process,
            loaders,
            AccumulationState(loaders),
            reports.loops,
            reports.losses,
            reports.busy_time,
            watch,
            init=init,
        )
    shared: SharedState = here.training
    if cpu and shared.process.device.type != "cpu":
        raise ValueError(
            f"cpu=True, but this process computes on {shared.process.device} since its first Accelerator "
            "or PartialState"
        )
    return shared


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return what calls a method while its object lives: the reports of an inline launch may outlive the launch."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := reference()) is not None:
            bound()

    return call

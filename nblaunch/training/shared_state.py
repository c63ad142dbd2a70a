"""The training state of a process: :class:`SharedState`, stored in ``context.current().training``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nblaunch import context
from nblaunch.errors import warn
from nblaunch.events import WorkerState
from nblaunch.progress.board_reports import BusyTime, LoopStack, LossReport, get_reports, length_of
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
    """The state that all Accelerators, loaders and optimizers of one process share.

    Args:
        process: the process's ranks, device and board slot, after it has joined its job.
        loaders: the prepared loaders being read.
        accumulation: the accumulation window that was entered last, or else the latest Accelerator's.
        loops: the running loops over loaders and iterables, shown on the board.
        losses: reports losses and the device's memory on the board.
        busy_time: reports the time per step, excluding time spent waiting for other ranks.
        watch: runs the checks for errors that raise no exception.
        is_shown: whether another process reads what this one reports on the board.
        models: prepared models; their mode distinguishes training from evaluation.
        precision: the latest Accelerator's precision; None before there is one.
        plugin: the latest Accelerator's strategy plugin; None before there is one.
        parallelism: how the latest Accelerator divided the ranks; None: all are replicas.
        label: member of ``DistributedType`` for the strategy, such as ``"FSDP"``; empty if ranks hold whole models.
        strategies: all Accelerators' strategies, by ``id``, because a user's strategy may not be hashable.
        attributes: attributes that users set on ``PartialState()`` and the other views, by class.
        has_checked_models: whether a backward pass has called :meth:`check_models`.
        init: the arguments that the process joined its group with.
    """

    process: JoinedProcess
    loaders: LoaderStack
    accumulation: AccumulationState
    loops: LoopStack
    losses: LossReport
    busy_time: BusyTime
    watch: Watch
    is_shown: bool
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    precision: Precision | None = None
    plugin: StrategyPlugin | None = None
    parallelism: ParallelismConfig | None = None
    label: str = ""
    strategies: weakref.WeakValueDictionary[int, Strategy] = field(
        default_factory=weakref.WeakValueDictionary
    )
    attributes: dict[type, dict[str, Any]] = field(default_factory=dict)
    has_checked_models: bool = False
    init: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # An unpickled state is the state of the process that unpickled it.
        return get_shared_state, ()

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different data. Ranks that compute every layer together count as one."""
        world_size = self.process.topology.world_size
        return world_size if self.parallelism is None else self.parallelism.data_parallel_size

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks with different data. Ranks with the same data are consecutive."""
        topology = self.process.topology
        return topology.rank * self.num_data_ranks // topology.world_size

    @property
    def counts_samples(self) -> bool:
        """Whether this rank reports its samples: only the first of the ranks with the same data does."""
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
                # Otherwise the status would stay as a line of output.
                print(" " * len(status), end="\r", flush=True)

    def check_models(self) -> None:
        """Warn at the first backward pass if no model was prepared, because ranks then don't exchange gradients."""
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
        """Apply a new Accelerator's choices to the process."""
        self.plugin, self.parallelism = plugin, setup.parallelism
        self.accumulation = setup.accumulation
        self.precision = precision
        self.label = strategy.label if strategy.holds_shards else ""
        self.strategies[id(strategy)] = strategy

    @property
    def is_training(self) -> bool:
        """Whether gradients are recorded and any prepared model is in training mode (or no model is prepared).

        Only the mode of the user's module counts: ``eval()`` on DeepSpeed's engine, or on the result of
        ``unwrap_model``, does not change the mode of the wrapper.
        """
        modules = (bare_module(model) for model in self.models)
        return torch.is_grad_enabled() and (not self.models or any(module.training for module in modules))


def get_shared_state(cpu: bool = False, init: InitProcessGroupKwargs | None = None) -> SharedState:
    """Return this process's shared state; the first call joins the process group.

    Raises:
        ValueError: ``cpu`` is set, but the process already computes on another device.
    """
    here = context.current()
    init = init or InitProcessGroupKwargs()
    is_joined = joining.is_distributed() and (here.training is None or here.training.init != init)
    if is_joined and init.to_kwargs():
        settings = ", ".join(f"{name}={value}" for name, value in init.to_kwargs().items())
        warn(f"{settings} has no effect, because this process has already joined its process group")
    if here.training is None:
        process = joining.join(cpu, init)
        reports, loaders = get_reports(), LoaderStack()
        reports.losses.backend = process.backend  # with cpu=True, not the backend of the process's device
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
            here.is_watched,
            init=init,
        )
    shared: SharedState = here.training
    if cpu and shared.process.device.type != "cpu":
        raise ValueError(
            f"cpu=True, but this process already computes on {shared.process.device}. Pass cpu=True to its first "
            "Accelerator or PartialState"
        )
    return shared


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``method`` as long as its object exists: reports may outlive an inline launch."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := reference()) is not None:
            bound()

    return call

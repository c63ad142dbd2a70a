"""The user's views of a process's training state: ``PartialState``, ``AcceleratorState``, ``GradientState``.

They hold no data, but read the shared state (``shared_state.py``). ``DistributedType`` is a label that is
derived on demand; nblaunch itself does not branch on it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from nblaunch import context
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.options import GradientAccumulationPlugin, InitProcessGroupKwargs
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.process_methods import ProcessMethods
from nblaunch.training.shared_state import SharedState, get_shared_state
from nblaunch.training.strategies.deepspeed.settings import DeepSpeedSettings
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugins
from nblaunch.training.strategies.fsdp2.settings import ShardingSettings


class DistributedType(str, enum.Enum):
    """A one-word description of a job.

    The types from ``MULTI_NPU`` onwards exist only for scripts that compare with them; no nblaunch job has one.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    XLA = "XLA"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"

    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        return f"DistributedType.{self.name}"


def distributed_type_of(process: JoinedProcess, strategy: str = "") -> DistributedType:
    """Return the ``DistributedType`` of a job: the strategy's label, or the devices' label if that is empty."""
    if strategy:
        return DistributedType(strategy)
    if process.topology.world_size == 1:
        return DistributedType.NO
    return DistributedType[process.backend.distributed_type]


def _is_to_join() -> bool:
    """Return whether this process is a worker that has not joined its job yet."""
    here = context.current()
    return here.training is None and here.is_launched and not here.was_reset


class _SharedAttributes:
    """``View._shared_state``: the attributes that all instances of a view share; empty if there is no state (yet)."""

    def __get__(self, view: Any, cls: type[View]) -> dict[str, Any]:
        shared: SharedState | None = context.current().training
        if shared is None or not cls._is_in(shared):
            return {}
        return {"initialized": True, **shared.attributes.get(cls, {})}


class View:
    """A view of the shared state. All instances of a class share attributes that users set.

    A view from a notebook cell, or an unpickled one, shows the state of the worker in which it is used.
    """

    _shared_state = _SharedAttributes()

    @classmethod
    def _is_in(cls, shared: SharedState) -> bool:
        """Return whether the process has the state that this view shows."""
        return True

    def _join(self) -> SharedState:
        """Return the shared state; join this worker's job first if it has not joined yet."""
        return get_shared_state()

    def _live(self) -> SharedState:
        """Return the shared state. Raise AttributeError if this view has no state, for example after a reset."""
        shared: SharedState | None = self._join() if _is_to_join() else context.current().training
        if shared is None or not self._is_in(shared):
            raise AttributeError(reset_message(type(self)))
        return shared

    @property
    def _process(self) -> JoinedProcess:
        return self._live().process

    @property
    def initialized(self) -> bool:
        """Whether the process has this state."""
        return bool(type(self)._shared_state)

    def __getattr__(self, name: str) -> Any:
        # There are no attributes before the process joins its job, and a debugger's lookup must not make it join.
        is_without = name.startswith("__") or _is_to_join()
        attributes = {} if is_without else self._live().attributes.get(type(self), {})
        if name not in attributes:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return attributes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            self._live().attributes.setdefault(type(self), {})[name] = value

    def __getstate__(self) -> dict[str, Any]:
        return {}  # the view must show the state of the process that uses it, not of the one that unpickled it


def reset_message(cls: type[View]) -> str:
    """Return the error message for a view whose state was reset. It uses Accelerate's words, which users search for."""
    name = cls.__name__
    return (
        f"`{name}` object has no attributes in this process. This happens if `{name}._reset_state()` was "
        f"called, and no `Accelerator()` or `{name}()` has been created since: create one"
    )


class PartialState(View, ProcessMethods):
    """The ranks, device and process group of this process, without an Accelerator.

    Args:
        cpu: compute on the CPU.
        **kwargs: ``backend``, ``init_method`` and ``timeout`` of :class:`InitProcessGroupKwargs`.

    Raises:
        ValueError: ``cpu=True``, but the process already computes on another device.
        TypeError: an argument is unknown.
    """

    _asked: tuple[bool, dict[str, Any]] = (False, {})

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self._asked = cpu, kwargs
        self._join()

    def _join(self) -> SharedState:
        cpu, kwargs = self._asked
        return get_shared_state(cpu, InitProcessGroupKwargs(**kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {"_asked": self._asked}

    @property
    def distributed_type(self) -> DistributedType:
        """A one-word description of the job, for scripts that read it."""
        return distributed_type_of(self._process)

    @staticmethod
    def _reset_state() -> None:
        here = context.current()
        here.training, here.was_reset = None, True

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(View, ProcessMethods):
    """The settings of this process's Accelerator.

    Args:
        mixed_precision: the expected precision; None: any.

    Raises:
        ValueError: there is no Accelerator yet, or it has another precision.
    """

    def __init__(self, mixed_precision: str | None = None) -> None:
        shared: SharedState | None = context.current().training
        if shared is None or shared.precision is None:
            raise ValueError("AcceleratorState() needs an Accelerator; create `Accelerator()` first")
        if mixed_precision is not None and mixed_precision != shared.precision.name:
            raise ValueError(
                f"mixed_precision={mixed_precision!r}, but the Accelerator of this process was built with "
                f"mixed_precision={shared.precision.name!r}"
            )

    @classmethod
    def _is_in(cls, shared: SharedState) -> bool:
        return shared.precision is not None

    @property
    def distributed_type(self) -> DistributedType:
        """A one-word description of the job, for scripts that read it."""
        return distributed_type_of(self._process, self._live().label)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        precision = self._live().precision
        assert precision is not None  # _is_in checks this
        return precision.name

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over ranks."""
        return self._live().label == "FSDP"

    @property
    def fsdp_plugin(self) -> ShardingSettings | None:
        """The plugin for sharding models; None if they are not sharded."""
        plugin = self._live().plugin
        return plugin if isinstance(plugin, ShardingSettings) else None

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedSettings] | None:
        """DeepSpeed's plugins by name; None without DeepSpeed."""
        plugins = self._live().plugin
        return plugins.by_name if isinstance(plugins, DeepSpeedPlugins) else None

    @property
    def deepspeed_plugin(self) -> DeepSpeedSettings | None:
        """The selected DeepSpeed plugin, which ``prepare`` uses; None without DeepSpeed."""
        plugins = self._live().plugin
        return plugins.active if isinstance(plugins, DeepSpeedPlugins) else None

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How the ranks are divided for parallel training; None: all ranks are replicas."""
        return self._live().parallelism

    @property
    def device_mesh(self) -> Any:
        """The ranks as torch's ``DeviceMesh``; None if they are not divided."""
        config = self.parallelism_config
        return None if config is None else config.device_mesh

    torch_tp_plugin = megatron_lm_plugin = None
    """Always None: ``parallelism_config`` has ``tp_size``, and Megatron-LM is not supported."""

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedSettings:
        """Return the DeepSpeed plugin ``name``."""
        return self._named_plugins.get(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make ``prepare`` use the DeepSpeed plugin ``name`` from now on."""
        self._named_plugins.select(name)

    @property
    def _named_plugins(self) -> DeepSpeedPlugins:
        plugins = self._live().plugin
        if not isinstance(plugins, DeepSpeedPlugins):
            raise ValueError(
                "this process has no DeepSpeed plugins; pass deepspeed_plugins={name: ...} to the Accelerator"
            )
        return plugins

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        shared: SharedState | None = context.current().training
        if shared is not None:
            shared.precision = shared.plugin = shared.parallelism = None
            shared.attributes.pop(AcceleratorState, None)
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{PartialState()!r}Mixed precision type: {self.mixed_precision}\n"


class GradientState(View):
    """The user's view of gradient accumulation and the loader being read.

    ``accelerator.gradient_state`` shows the window of that Accelerator. ``GradientState()`` shows the window that was
    entered last, or else the latest Accelerator's.

    Args:
        gradient_accumulation_plugin: new settings for gradient accumulation; None: don't change them.
    """

    _window: AccumulationState | None = None

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        shared = get_shared_state()
        if gradient_accumulation_plugin is not None:
            shared.accumulation.plugin = gradient_accumulation_plugin

    @classmethod
    def _of(cls, window: AccumulationState) -> GradientState:
        """Return the state of one Accelerator's window."""
        state = cls.__new__(cls)
        state._window = window
        return state

    @property
    def _accumulation(self) -> AccumulationState:
        shared, window = self._live(), self._window
        # In a worker, a view that was created in the notebook shows the worker's window.
        return window if window is not None and window.loaders is shared.loaders else shared.accumulation

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends in an optimizer step."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._accumulation.sync_gradients = sync_gradients

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients are already averaged over ranks. Set it to True if you averaged them yourself.

        On devices that average gradients in the optimizer step, the next step then skips averaging, and sets this to
        False.
        """
        return self._accumulation.are_gradients_reduced or self._live().label == "FSDP"

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, are_reduced: bool) -> None:
        self._accumulation.are_gradients_reduced = are_reduced

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Do the same as the setter, for other libraries' trainers that count micro-steps themselves."""
        self._accumulation.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Number of micro-steps per optimizer step."""
        return self._accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether to silence torch's warning about the order of scheduler and optimizer steps inside a window."""
        return self._accumulation.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the window."""
        return self._accumulation.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The current accumulation settings that differ from the defaults; settable as a whole."""
        return {**self._accumulation.plugin.to_kwargs(), "num_steps": self._accumulation.num_steps}

    @plugin_kwargs.setter
    def plugin_kwargs(self, settings: Mapping[str, Any]) -> None:
        self._accumulation.plugin = GradientAccumulationPlugin(**settings)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of the active loader."""
        return self._accumulation.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of real rows in the last global batch of the active loader: 0 means all, -1 unknown."""
        return self._accumulation.remainder

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader being read; None if there is none."""
        return self._accumulation.loaders.innermost

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the prepared loaders being read, outermost first."""
        return [None, *self._accumulation.loaders.entered()]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self._accumulation.loaders.innermost is not None

    @staticmethod
    def _reset_state() -> None:
        shared: SharedState | None = context.current().training
        if shared is not None:
            shared.accumulation = AccumulationState(shared.loaders)
            shared.attributes.pop(GradientState, None)

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Real rows of its last batch: {self.remainder}\n"
            f"Gradient accumulation: {self.plugin_kwargs}\n"
        )


def is_initialized() -> bool:
    """Return whether this process has an ``AcceleratorState``, because it created an Accelerator."""
    return bool(AcceleratorState._shared_state)


def wait_for_everyone() -> None:
    """Wait until every process has called this."""
    PartialState().wait_for_everyone()

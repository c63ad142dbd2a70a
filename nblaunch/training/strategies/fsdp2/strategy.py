"""Fully sharded data parallelism (FSDP2): every rank holds a shard of each weight, and the full weights are gathered
unit by unit when needed.

A unit is a module whose weights are gathered together. ``setup_module`` chooses units, shards them, and fills the
shards from the weights that the ranks had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nblaunch import formatting
from nblaunch.errors import warn
from nblaunch.host import memory
from nblaunch.training import models
from nblaunch.training.collectives import dtensor
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.models import bare_module
from nblaunch.training.optimizer import AcceleratedOptimizer
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup, report_shards
from nblaunch.training.strategies.dtensor_strategy import DTensorStrategy, share_weights, warn_of_unsharded
from nblaunch.training.strategies.fsdp2 import units as fsdp2_units
from nblaunch.training.strategies.fsdp2.over_devices import DeviceShardsStrategy
from nblaunch.training.strategies.fsdp2.settings import ShardingSettings
from nblaunch.training.strategies.fsdp2.weights import FullWeights
from nblaunch.weights import is_fsdp_module, is_quantised_weight, is_sharded, is_sharded_model


class Fsdp2Strategy(DTensorStrategy):
    """Applies torch's ``fully_shard`` over all ranks, or within each machine. A single rank shards nothing.

    Args:
        process: this process's ranks and device.
        settings: the user's settings, read when a model is set up.
        dtype: the dtype of gathered weights; None: keep the weights' own dtypes.
        parallelism: how the ranks are divided; None: all ranks shard together, or the ranks on each machine do.
    """

    name = "fsdp2"
    label = "FSDP"
    unjoined = "with fsdp_plugin"

    def __init__(
        self,
        process: JoinedProcess,
        settings: ShardingSettings,
        dtype: torch.dtype | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(process, "fsdp_plugin")
        if process.backend.reduces_gradients_at_step:
            raise ValueError(
                f"fsdp_plugin can't be used on {process.backend.name} with one process per device, because torch's "
                "fully_shard supports only CPUs and GPUs. Use strategy='spmd', which shards models over the "
                "devices of one process, or leave fsdp_plugin out"
            )
        self._settings = settings
        self._dtype = dtype
        self._parallelism = parallelism
        settings.precision_policy(dtype)  # raises an error for unknown values before any model is built
        # Units cast their weights and inputs. autocast would also compute losses and layer norms in fp32, which takes
        # more memory and differs from Accelerate.
        self.holds_shards = self.casts_models = process.topology.world_size > 1

    # --- preparing -----------------------------------------------------------------------------------------------

    def place(self, model: nn.Module, process: JoinedProcess) -> None:
        """Move a model that will not be sharded; if it will be, only the shards move."""
        if not self.holds_shards:
            super().place(model, process)

    def setup_module(self, model: nn.Module, process: JoinedProcess) -> nn.Module:
        inner = bare_module(model)
        if is_fsdp_module(inner):
            return model  # already sharded, by the user or an earlier prepare
        units = fsdp2_units.choose(
            inner,
            self._settings.auto_wrap_policy,
            self._settings.transformer_cls_names_to_wrap,
            self._settings.min_num_params,
        )
        if self._settings.activation_checkpointing:
            for _, unit in units or [("", inner)]:
                fsdp2_units.checkpoint_activations(
                    unit, bool(self._settings.activation_checkpointing_offload)
                )
        if self.holds_shards:
            if self._dtype is None:
                units = fsdp2_units.of_one_dtype_each(inner, units)
            self._shard(inner, [*(unit for _, unit in units), inner])
        return model

    def _shard(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        # Every step allocates and frees units. glibc would keep the freed memory, which could reach or exceed the size
        # of the whole model.
        memory.tune_allocator()
        ignored = self._ignored_parameters(model)
        name = type(model).__name__  # before fully_shard changes the class
        is_tp = self._parallelism is not None and self._parallelism.tp_enabled
        if is_tp and not is_sharded_model(model):
            warn_of_unsharded(model)
            is_tp = False
        whole = self._whole_parameters(model, units, ignored)
        ignored |= {model.get_parameter(name) for name in whole}
        mesh = self._mesh()
        num_bytes = (self._shard_further if is_tp else self._shard_whole)(model, units, ignored, mesh)
        for unit in units:
            fsdp2_units.gather_for_training(unit)
            fsdp2_units.reject_copies(unit)
        # Look the parameters up again, because they may have been replaced.
        averaged = [weight for weight in map(model.get_parameter, whole) if weight.requires_grad]
        fsdp2_units.average_gradients(averaged, mesh, units)
        own_bytes = sum(
            dtensor.local(parameter).numel() * parameter.element_size()
            for parameter in model.parameters()
            if is_sharded(parameter)
        )
        is_freed = self._settings.reshard_after_forward
        kept = "freed after its forward pass" if is_freed else "kept until its backward pass"
        rest = f"; gathered in {formatting.count(len(units), 'unit')}, each {kept}"
        report_shards(name, num_bytes, own_bytes, rest)

    def _whole_parameters(
        self, model: nn.Module, units: Sequence[nn.Module], ignored: set[nn.Parameter]
    ) -> list[str]:
        """Return the names of parameters that can't be sharded, which every rank keeps whole."""
        odd = fsdp2_units.odd_weights(model, units, ignored, is_one_dtype=self._dtype is None)
        if self._dtype is not None:
            for parameter in odd:
                if parameter.requires_grad and parameter.is_floating_point():  # as for sharded parameters
                    parameter.data = parameter.data.to(torch.float32)
        return [name for name, parameter in model.named_parameters() if parameter in odd]

    def _shard_whole(
        self, model: nn.Module, modules: Sequence[nn.Module], ignored: set[nn.Parameter], mesh: Any
    ) -> int:
        """Shard a model that each rank holds whole or on the meta device; return its size in bytes."""
        device = self._process.device
        may_be_sent = self._settings.cpu_ram_efficient_loading is not False
        # Keep trainable weights in fp32 if layers compute in 16 bits, even if the weights were loaded in 16 bits,
        # because small steps would otherwise be lost.
        trained_dtype = torch.float32 if self._dtype is not None else None
        weights = FullWeights(model, ignored, device, may_be_sent, trained_dtype)
        weights.move_to_meta()
        self._apply_fully_shard(modules, ignored, mesh)
        place = torch.device("cpu") if self._settings.cpu_offload else device
        weights.fill_shards(place, self._settings.param_init_fn)
        for module in modules:
            fsdp2_units.register_new_parameters(module)
        return weights.num_bytes

    def _shard_further(
        self, model: nn.Module, modules: Sequence[nn.Module], ignored: set[nn.Parameter], mesh: Any
    ) -> int:
        """Shard a model that tensor parallelism has already sharded over other ranks; return its size in bytes."""
        assert self._parallelism is not None
        model.to(self._process.device)
        share_weights(model, self._parallelism)
        if self._dtype is not None:
            _train_in_fp32(model, ignored)
        sharded = [parameter for parameter in model.parameters() if parameter not in ignored]
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in sharded)
        self._apply_fully_shard(modules, ignored, mesh)
        return num_bytes

    def _ignored_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        ignored = fsdp2_units.ignored_parameters(model, self._settings.ignored_modules)
        if self._process.topology.rank == 0:
            _warn_of_drift(model, ignored)
        # A shard of a quantised weight would lose the data that its library stores with the weight.
        return ignored | {parameter for parameter in model.parameters() if is_quantised_weight(parameter)}

    def _apply_fully_shard(self, modules: Sequence[nn.Module], ignored: set[nn.Parameter], mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        arguments: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self._settings.reshard_after_forward,
            "mp_policy": self._settings.precision_policy(self._dtype),
            "offload_policy": self._settings.offload_policy(),
            "ignored_params": ignored,
        }
        for module in modules:
            fsdp2_units.return_no_views(module)
            fully_shard(module, **arguments)

    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if self._parallelism is not None:
            return self._parallelism.fsdp_mesh()
        topology = self._process.topology
        kind = self._process.device.type
        if self._settings.is_hybrid:
            shape = (topology.world_size // topology.local_world_size, topology.local_world_size)
            return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        world: Any = dist.group.WORLD
        if self._settings.cpu_offload and dist.get_backend() == "nccl":
            # Shards are in host memory, where NCCL can't exchange results such as norms and full tensors.
            world = dist.new_group(backend="cpu:gloo,cuda:nccl")
        return DeviceMesh.from_group(world, kind)

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        if self.holds_shards:
            _check_optimizer(optimizer)
        return super().optimizer(optimizer)

    # --- gradients -----------------------------------------------------------------------------------------------

    @contextmanager
    def _reducing(self, model: nn.Module, reduces: bool) -> Iterator[None]:
        """Set whether ``backward`` reduces gradients in the block, and restore the previous setting afterwards."""
        module: Any = models.uncompiled(model)
        if not is_fsdp_module(module):
            yield
            return
        before = fsdp2_units.is_reducing(module)
        module.set_requires_gradient_sync(reduces)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(before)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._reducing(model, False)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._reducing(model, True)

    # --- states --------------------------------------------------------------------------------------------------

    @property
    def saves_shards(self) -> bool:
        return self._settings.saves_shards


class FullyShardedDataParallelPlugin(ShardingSettings, StrategyPlugin):
    """The plugin for sharding over ranks, with its settings."""

    __doc__ = ShardingSettings.__doc__  # help() shows the fields

    name = Fsdp2Strategy.name
    is_kept = True

    def build(self, setup: TrainingSetup) -> Strategy:
        if setup.process.backend.num_spmd_devices:
            return DeviceShardsStrategy(setup.process, self)
        return Fsdp2Strategy(setup.process, self, setup.precision.dtype, setup.parallelism)


_WITHOUT_SHARDS = {
    "Adafactor": "averages rows and columns of whole matrices",
    "LBFGS": "joins all weights into one vector",
    "Rprop": "selects single elements",
}
"""Optimizers whose steps torch 2.13 can't compute on shards, by class name, with the reason for each."""


def _check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose first step would fail in torch with an error about DTensors."""
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _WITHOUT_SHARDS), None)
    if name is not None:
        raise ValueError(
            f"{type(optimizer).__name__} {_WITHOUT_SHARDS[name]}, which torch can't do with sharded weights "
            "(fsdp_plugin). Use AdamW, SGD or another optimizer that works element by element, or leave "
            "fsdp_plugin out"
        )


def _train_in_fp32(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Convert trainable 16-bit parameters to fp32. ``FullWeights`` does the same for models that are not sharded
    yet.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or old in ignored or not (old.requires_grad and old.is_floating_point()):
                continue
            if old.dtype != torch.float32:
                if old not in made:
                    made[old] = nn.Parameter(old.detach().to(torch.float32))
                module._parameters[name] = made[old]


def _warn_of_drift(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Warn about weights that will diverge between ranks, because their gradients are not averaged."""
    names = [name for name, weight in model.named_parameters() if weight in ignored and weight.requires_grad]
    if names:
        warn(
            f"ignored_modules excludes {formatting.first(names, 3)} from sharding: their gradients are not averaged, "
            "so the ranks diverge, and checkpoints contain only rank 0's values. Freeze them with "
            "requires_grad_(False), or average their gradients before each step"
        )

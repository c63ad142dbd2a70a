"""Tensor parallelism, and the common base for strategies whose weights are sharded as DTensors over any mesh.

This module computes the norm of all shards, converts shards to full states and back, and saves and loads states.
``shard_files.py`` reads and writes the files. The caller decides when the files are moved to their final place in the
folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nblaunch.errors import CheckpointError, warn
from nblaunch.training.collectives import dtensor, operations
from nblaunch.training.joining import JoinedProcess, waiting
from nblaunch.training.models import bare_module
from nblaunch.training.optimizer import AcceleratedOptimizer
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.strategies import shard_files
from nblaunch.training.strategies.base import ShardWriter, Strategy, StrategyPlugin, TrainingSetup
from nblaunch.weights import is_sharded, is_sharded_model, quantised_entries

_MODEL = "pytorch_model_fsdp_{}"
_OPTIMIZER = "optimizer_{}"
_NO_DEADLINE = timedelta(days=365)  # training also waits for a slow disk without a deadline


class DTensorStrategy(Strategy):
    """Clips, saves and loads models with DTensor parameters. ``setting`` names the user's setting in errors."""

    shard_files = "*/__{rank}_*.distcp"

    def __init__(self, process: JoinedProcess, setting: str) -> None:
        if not hasattr(torch.nn.utils, "get_total_norm"):
            # torch 2.6 added this function, fully_shard, and checkpoints that a single rank writes.
            raise RuntimeError(
                f"{setting} needs torch 2.6 or newer, but this is {torch.__version__}: pip install -U torch"
            )
        self._process = process
        self._saving_group: Any = None

    @property
    def saves_shards(self) -> bool:
        """Whether checkpoints contain each rank's shards; otherwise the main process writes full states."""
        return True

    # --- optimizers ----------------------------------------------------------------------------------------------

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        if isinstance(optimizer, torch.optim.Optimizer):
            mixed = _MixedGroups()
            optimizer.register_step_pre_hook(mixed.before_step)
            optimizer.register_step_post_hook(mixed.after_step)
        return None

    # --- gradients -----------------------------------------------------------------------------------------------

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = dtensor.total_norm(gradients, norm_type, self._process.device)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            held = dtensor.local(gradient)
            held.mul_(factor.to(held.device))
        return total

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = dtensor.summed(parameter.grad)  # the sum is clipped, not each rank's summand
                dtensor.local(parameter.grad).clamp_(-clip_value, clip_value)

    # --- states --------------------------------------------------------------------------------------------------

    @property
    def _keeps_full(self) -> bool:
        return self._process.topology.local_rank == 0

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        full = dtensor.gather_weights(module, self._keeps_full)
        return full if self._keeps_full else {}

    def optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        full = dtensor.gather(optimizer.state_dict(), self._keeps_full)
        return full if self._keeps_full else {}

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        load_by_places(optimizer, state)

    def save_shards(self, folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> bool:
        if self.saves_shards:
            for name, state in _states(models, optimizers):
                with waiting():
                    shard_files.write(state, folder / name, is_alone=not self.holds_shards)
        return self.saves_shards

    def shard_writer(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], copy: Callable[[Any], Any]
    ) -> ShardWriter | None:
        if not self.saves_shards:
            return None
        if self.holds_shards and self._saving_group is None:
            with waiting():
                self._saving_group = dist.new_group(backend="gloo", timeout=_NO_DEADLINE)
        return CopiedShards(models, optimizers, copy, self._saving_group)

    def load_shards(self, folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> bool:
        if not any((folder / _MODEL.format(0)).glob("*")):  # empty if full states replaced the shards
            return False
        is_alone = not self.holds_shards
        for index, model in enumerate(models):
            load_model(bare_module(model), folder / _MODEL.format(index), is_alone)
        for index, optimizer in enumerate(optimizers):
            owner, inner = _owner(models, optimizer), inner_optimizer(optimizer)
            load_optimizer(owner, inner, folder / _OPTIMIZER.format(index), is_alone)
        return True


class _MixedGroups:
    """Turns off ``foreach`` and ``fused`` during a step, for groups that mix shards (DTensors) and full tensors.

    torch can't update such a mixed list of parameters in one call, as it would by default on GPUs. Models
    that are only partly sharded have mixed groups, for example with tensor parallelism or
    ``ignored_modules``. Step hooks check the groups each time, because a script may replace parameters, add groups or
    load settings at any time before a step.
    """

    def __init__(self) -> None:
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            settings = {
                name: group[name] for name in ("foreach", "fused") if group.get(name, False) is not False
            }
            if settings and len({is_sharded(parameter) for parameter in group["params"]}) > 1:
                self._settings.append((group, settings))
                group.update(dict.fromkeys(settings, False))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, settings in self._settings:
            group.update(settings)
        self._settings.clear()


class CopiedShards(ShardWriter):
    """Copies of a rank's shards, which torch.distributed.checkpoint writes from a thread.

    The ranks exchange their plans in a separate process group, because collectives from a background thread would
    interleave with the training loop's differently on every rank. (torch's ``async_save`` writes one state like this.
    Here, one thread writes several states in the same order on all ranks.)
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        copy: Callable[[Any], Any],
        group: Any,
    ) -> None:
        self._group = group  # None in a single process
        try:
            self._states: dict[str, dict[str, Any]] = copy(dict(_states(models, optimizers)))
        except Exception as error:
            self.cancel(f"{type(error).__name__}: {error}")
            raise

    def write(self, folder: Path) -> None:
        self._raise_on_all_ranks(None)
        for name, state in self._states.items():
            shard_files.write(state, folder / name, is_alone=self._group is None, group=self._group)

    def cancel(self, problem: str) -> None:
        with suppress(CheckpointError):
            self._raise_on_all_ranks(problem)

    def _raise_on_all_ranks(self, problem: str | None) -> None:
        problems = [problem]
        if self._group is not None:
            problems *= dist.get_world_size(self._group)
            dist.all_gather_object(problems, problem, self._group)
        for rank, text in enumerate(problems):
            if text is not None:
                raise CheckpointError(f"{shard_files.NOT_SAVED} Rank {rank}: {text}")


def _states(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each folder, with the nested state to save in it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    for index, model in enumerate(models):
        yield _MODEL.format(index), {"model": get_model_state_dict(bare_module(model))}
    for index, optimizer in enumerate(optimizers):
        state = optimizer_state(_owner(models, optimizer), inner_optimizer(optimizer))
        yield _OPTIMIZER.format(index), {"optimizer": state}


def load_model(module: nn.Module, folder: Path, is_alone: bool, adapter_only: bool = False) -> Any:
    """Load this rank's shards of a module from ``folder``; with ``adapter_only``, only trained parameters."""
    from torch.distributed.checkpoint import state_dict as states

    options = states.StateDictOptions(ignore_frozen_params=adapter_only)
    state: dict[str, Any] = {"model": states.get_model_state_dict(module, options=options)}
    frozen = quantised_entries(module, state["model"])
    for name in frozen:  # quantised modules can't load them, and training does not change them
        del state["model"][name]
    shard_files.read(state, folder, is_alone, owner=module)
    options.strict = not (frozen or adapter_only)
    with shard_files.loading(folder):
        return states.set_model_state_dict(module, state["model"], options=options)


def optimizer_state(owner: nn.Module, inner: Any, options: Any = None) -> dict[str, Any]:
    """Return an optimizer's state, keyed by parameter names; parameters that never had a gradient have no entry."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _gradients(inner, are_there=True):
        return dict(get_optimizer_state_dict(owner, inner, options=options))


def load_optimizer(owner: nn.Module, inner: Any, folder: Path, is_alone: bool) -> None:
    """Load this rank's shards of an optimizer's state from ``folder``."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with shard_files.loading(folder):
        paths = shard_files.read_metadata(folder).planner_data.values()
    saved = {path[2] for path in paths if len(path) > 2 and path[1] == "state"}
    before = dict(inner.state)
    try:
        state: Any = optimizer_state(owner, inner)  # shard_files.read fills its tensors
        if not saved <= state["state"].keys():
            inner.state.clear()
            with _gradients(inner, are_there=False):
                state = get_optimizer_state_dict(owner, inner)  # has every parameter
        by_name = {name: values for name, values in state["state"].items() if name in saved}
        whole = {"optimizer": {**state, "state": by_name}}
        shard_files.read(whole, folder, is_alone, owner=inner)
        with shard_files.loading(folder):
            load_by_names(owner, inner, whole["optimizer"])
    except BaseException:
        inner.state.clear()
        inner.state.update(before)
        raise


def load_by_names(owner: nn.Module, inner: Any, state: dict[str, Any]) -> None:
    """Load a sharded or full state, keyed by parameter names.

    Raises:
        ValueError: the optimizer's groups have different parameters.
    """
    groups_here = optimizer_state(owner, inner)["param_groups"]
    load_by_places(
        inner, in_own_order(state, [[{name} for name in group["params"]] for group in groups_here])
    )


def in_own_order(state: dict[str, Any], names_here: Sequence[Sequence[set[str]]]) -> dict[str, Any]:
    """Sort a state's parameters into an optimizer's own order.

    Args:
        state: the state, keyed by parameter names.
        names_here: the possible names of each parameter, by group; a parameter that layers share has several.

    Raises:
        ValueError: the optimizer's groups have different parameters.
    """
    saved = state["param_groups"]
    groups = [
        {**group, "params": [min(names.intersection(group["params"]), default="") for names in of_group]}
        for group, of_group in zip(saved, names_here, strict=False)
    ]
    if len(saved) != len(names_here) or [set(group["params"]) for group in groups] != [
        set(group["params"]) for group in saved
    ]:
        raise ValueError("the optimizer's groups have different parameters")
    return {**state, "param_groups": groups}


def load_by_places(optimizer: Any, state: dict[str, Any]) -> None:
    """Match a sharded or full state to parameters by position, and load it; its keys may be numbers or names."""
    names, held = (
        [parameter for group in groups for parameter in group["params"]]
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    likes = dict(zip(names, held, strict=False))  # if group sizes differ, torch raises an error below
    by_name = {
        name: dtensor.shard_state_dict(values, dict.fromkeys(values, likes.get(name)))
        for name, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": by_name})


@contextmanager
def _gradients(optimizer: Any, are_there: bool) -> Iterator[None]:
    """Give all trained parameters gradients in the block, or remove all gradients; restore them afterwards.

    If torch finds neither gradients nor a state, it creates a state for every parameter by taking a step with zero
    gradients.
    """
    trained = [
        candidate
        for group in optimizer.param_groups
        for candidate in group["params"]
        if candidate.requires_grad
    ]
    gradients = [parameter.grad for parameter in trained]
    try:
        for parameter in trained:
            parameter.grad = parameter.detach() if are_there else None
        yield
    finally:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient


def inner_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)


def _owner(models: Sequence[nn.Module], optimizer: Any) -> nn.Module:
    """Return the module whose parameters the optimizer steps: one model, or a list of several models."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [
        bare_module(model)
        for model in models
        if any(id(parameter) in stepped for parameter in model.parameters())
    ]
    if not owners:
        raise CheckpointError(
            f"the {type(inner_optimizer(optimizer)).__name__} has no parameters from a prepared model, so the names "
            "of its states are unknown; prepare it together with its model"
        )
    return owners[0] if len(owners) == 1 else nn.ModuleList(owners)


@torch.no_grad()
def share_weights(model: nn.Module, parallelism: ParallelismConfig) -> None:
    """Give all ranks rank 0's weights: whole weights from rank 0 itself, shards from the ranks in its replica."""
    replicas = parallelism.data_parallel_mesh
    with waiting():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not is_sharded(tensor):
                dist.broadcast(tensor, src=0)
            elif replicas is not None:
                group = replicas.get_group()
                dist.broadcast(dtensor.local(tensor), src=dist.get_global_rank(group, 0), group=group)


class TensorParallelPlugin(StrategyPlugin):
    """Chooses tensor parallelism: ``Accelerator(parallelism_config=ParallelismConfig(tp_size=...))``."""

    name = "tensor_parallel"

    def build(self, setup: TrainingSetup) -> Strategy:
        assert setup.parallelism is not None  # its tp_size chose this plugin
        return TensorParallelStrategy(setup.process, setup.parallelism)


class TensorParallelStrategy(DTensorStrategy):
    """Keeps the sharding of the models that the user passes, and makes weights equal on ranks with the same shard.

    Every rank holds a shard of each layer, and the ranks process the same data together. torch's ``parallelize_module``
    or transformers' ``tp_plan`` has sharded the model: its weights are DTensors over the mesh's ``tp`` dimension.
    """

    name = TensorParallelPlugin.name
    holds_shards = True

    def __init__(self, process: JoinedProcess, parallelism: ParallelismConfig) -> None:
        super().__init__(process, "tp_size")
        self._parallelism = parallelism

    def setup_module(self, model: nn.Module, process: JoinedProcess) -> nn.Module:
        inner = bare_module(model)
        if not is_sharded_model(inner):
            warn_of_unsharded(inner)
        share_weights(inner, self._parallelism)
        return model


def warn_of_unsharded(model: nn.Module) -> None:
    """Warn on rank 0 that a model is not sharded although ``tp_size`` is set."""
    if operations.rank() == 0:
        warn(
            f"tp_size is more than 1, but the {type(model).__name__} is not sharded, so all ranks in a tensor "
            "parallel group do the same work. Before prepare, call "
            'torch.distributed.tensor.parallel.parallelize_module(model, accelerator.torch_device_mesh["tp"], '
            'plan), or load it with from_pretrained(..., tp_plan="auto")'
        )

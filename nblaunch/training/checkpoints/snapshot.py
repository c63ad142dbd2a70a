"""The contents of a checkpoint, from a process's live objects to the files in the checkpoint's folder.

    CheckpointedObjects  the live objects of one process
    Snapshot             their states, or copies of the states so that training can continue
    folder               their files; each rank writes its own

States are stored as plain numbers and tensors, so reading a checkpoint executes no code from it. The exception is
DeepSpeed, which unpickles its own files.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nblaunch.training.checkpoints import files, model_files
from nblaunch.training.checkpoints.files import Manifest
from nblaunch.training.checkpoints.registered import Places, Registered, as_bytes, capture
from nblaunch.training.checkpoints.save_round import Coordinator, Participant
from nblaunch.training.collectives import dtensor, rng
from nblaunch.training.data import resuming
from nblaunch.training.models import plain_module
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.prepare import Preparer
from nblaunch.training.shared_state import SharedState
from nblaunch.training.strategies import Strategy
from nblaunch.training.strategies.base import ShardWriter
from nblaunch.weights import is_sharded, quantised_entries

Hooks = OrderedDict[int, Callable[..., Any]]


class CheckpointedObjects:
    """The live objects of one process, whose states a checkpoint saves and restores.

    Args:
        shared: the state that all Accelerators of this process share.
        preparer: holds the prepared objects.
        project: where checkpoints go, and how many are kept.

    Attributes:
        registered: the registered objects.
        save_hooks: handle number -> hook to call before weights are written.
        load_hooks: handle number -> hook to call before weights are read.
    """

    def __init__(self, shared: SharedState, preparer: Preparer, project: ProjectConfiguration) -> None:
        self.shared = shared
        self.preparer = preparer
        self.project = project
        self.registered: list[Registered] = []
        self.save_hooks: Hooks = OrderedDict()
        self.load_hooks: Hooks = OrderedDict()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.shared.process.topology.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self.shared.process.topology.world_size

    @property
    def is_writer(self) -> bool:
        """Whether this process writes common files: rank 0 does, or with ``save_on_each_node`` one rank per machine."""
        topology = self.shared.process.topology
        return (topology.local_rank if self.project.save_on_each_node else topology.rank) == 0

    @property
    def strategy(self) -> Strategy:
        """The strategy, which decides how models are distributed among ranks."""
        return self.preparer.strategy

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler for fp16; None with other precisions."""
        return self.preparer.precision.scaler

    def models_for_hooks(self) -> list[Any]:
        """Return the user's modules; hooks call their methods, such as ``save_pretrained``."""
        return [plain_module(model) for model in self.preparer.models]

    def register(self, objects: Sequence[Any], per_rank: bool | None = None) -> None:
        """Include ``objects`` in checkpoints; see ``Accelerator.register_for_checkpointing``."""
        unfit = [
            f"Item at index {position} ({type(obj).__name__})"
            for position, obj in enumerate(objects)
            if not (
                callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
            )
        ]
        if unfit:
            raise ValueError(
                f"objects to register need state_dict and load_state_dict, which are missing from: {'; '.join(unfit)}"
            )
        self.registered.extend(Registered(obj, per_rank) for obj in objects)

    def handed_over(self) -> tuple[list[Registered], list[Callable[..., Any]], list[Callable[..., Any]]]:
        """Return registered objects, save hooks and load hooks, for :meth:`take_over`."""
        return list(self.registered), list(self.save_hooks.values()), list(self.load_hooks.values())

    def take_over(
        self,
        registered: tuple[Sequence[Registered], Sequence[Callable[..., Any]], Sequence[Callable[..., Any]]],
    ) -> None:
        """Register another process's objects and hooks. Hooks get new handles, because each process numbers its own."""
        objects, save_hooks, load_hooks = registered
        self.registered.extend(objects)
        for hooks, carried in ((self.save_hooks, save_hooks), (self.load_hooks, load_hooks)):
            for hook in carried:
                add_hook(hooks, hook)


def add_hook(hooks: Hooks, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook, and return a handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@dataclass
class Snapshot:
    """This rank's part of a checkpoint."""

    manifest: Manifest  # describes the whole checkpoint; the main process adds the files, and writes it
    weights: list[Mapping[str, Any]]  # weights of models that no hook saved; empty on ranks other than 0
    objects: dict[str, Any]  # state dicts, or their bytes, by file name
    safe_serialization: bool
    # Copies of this rank's shards that are still to be written; None if they have been written, or there are none.
    shards: ShardWriter | None

    def write(self, folder: Path) -> None:
        """Write this rank's files to ``folder``."""
        if self.shards is not None:
            self.shards.write(folder)
        name = files.SAFE_WEIGHTS_NAME if self.safe_serialization else files.WEIGHTS_NAME
        for index, weights in enumerate(self.weights):
            model_files.write_weights(weights, folder / files.numbered(name, index), self.safe_serialization)
        for name, state in self.objects.items():
            files.write_object(state, folder / name)


def collect(
    live: CheckpointedObjects,
    folder: Path,
    safe_serialization: bool,
    copies: CpuCopies | None = None,
    side: Coordinator | Participant | None = None,
) -> Snapshot:
    """Return this rank's part of a checkpoint. Every rank that saves calls this.

    Hooks, and strategies that shard, may write to ``folder``.

    Args:
        live: the objects of this process.
        folder: the checkpoint's folder.
        safe_serialization: write weights in safetensors' format.
        copies: copies the states so that training can continue; None: use the live states.
        side: this rank's side of the save round; None: this rank saves alone.
    """
    is_main = live.rank == 0
    saves_models = is_main or live.strategy.holds_shards  # saving shards is a collective
    is_sharded, shards = _save_shards(live, folder, copies) if saves_models else (False, None)
    try:
        weights = [] if is_sharded else _full_weights(live)
        optimizers: list[Mapping[str, Any]] = []
        if saves_models and not is_sharded:
            optimizers = [live.strategy.optimizer_state_dict(each) for each in live.preparer.optimizers]
        models = live.models_for_hooks()
        for hook in list(live.save_hooks.values()):
            hook(models, weights, str(folder))  # may remove weights from the list
        registered, places = capture(live.registered, live.rank, side)
        manifest = _manifest(live, is_sharded, len(weights), places)
        objects: dict[str, Any] = _common_objects(live, optimizers) if is_main else {}
        objects |= registered | _own_objects(live)
        weights = weights if is_main else []
        if copies is not None:
            weights, objects = copies.take((weights, objects), "objects")
        return Snapshot(manifest, weights, objects, safe_serialization, shards)
    except Exception as error:
        if shards is not None:  # keep the other ranks from writing theirs
            shards.cancel(f"{type(error).__name__}: {error}")
        raise


def _save_shards(
    live: CheckpointedObjects, folder: Path, copies: CpuCopies | None
) -> tuple[bool, ShardWriter | None]:
    """Return whether models and optimizers are saved in shards, and a writer for shards that are not written yet."""
    prepared, strategy = live.preparer, live.strategy
    if copies is not None:
        shards = strategy.shard_writer(
            prepared.models, prepared.optimizers, partial(copies.take, part="shards")
        )
        if shards is not None:
            return True, shards
    return strategy.save_shards(folder, prepared.models, prepared.optimizers), None


def _full_weights(live: CheckpointedObjects) -> list[Mapping[str, Any]]:
    """Return full weights, without frozen quantised ones that tensor files can't hold, such as torchao's."""
    all_weights: list[Mapping[str, Any]] = []
    for model in live.preparer.models:
        module = plain_module(model)
        weights = live.strategy.state_dict(module)
        for name in quantised_entries(module, weights):
            if hasattr(weights[name], "__tensor_flatten__"):
                del weights[name]
        all_weights.append(weights)
    return all_weights


def _manifest(
    live: CheckpointedObjects, is_sharded: bool, num_models: int, places: dict[str, Places]
) -> Manifest:
    prepared = live.preparer
    return Manifest(
        world_size=live.world_size,
        models=num_models,
        optimizers=len(prepared.optimizers),
        schedulers=len(prepared.schedulers),
        loaders=len(prepared.loaders),
        custom=len(live.registered),
        sharded_by=live.strategy.name if is_sharded else "",
        places=places,
    )


def _common_objects(live: CheckpointedObjects, optimizers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states that are the same on all ranks."""
    prepared = live.preparer
    objects: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        objects[files.numbered(files.OPTIMIZER, index)] = optimizer
    for index, scheduler in enumerate(prepared.schedulers):
        objects[files.numbered(files.SCHEDULER, index)] = scheduler.state_dict()
    for index, loader in enumerate(prepared.loaders):
        objects[files.numbered(files.SAMPLER, index)] = resuming.capture(loader, live.shared)
    if live.scaler is not None:
        objects[files.SCALER_NAME] = live.scaler.state_dict()
    return objects


def _own_objects(live: CheckpointedObjects) -> dict[str, bytes]:
    """Return the states of random generators and stateful loaders, which differ between ranks."""
    # Only stateful loaders know their position in data that may differ from rank to rank.
    objects = {
        files.loader_state(index, live.rank): as_bytes(loader.state_dict())
        for index, loader in enumerate(live.preparer.loaders)
        if loader.use_stateful_dataloader and (live.rank == 0 or loader.reads_on_every_rank)
    }
    generators = rng.capture_states(live.shared.process.backend)
    generators["step"] = live.preparer.accumulation.step
    return {**objects, files.random_states(live.rank): as_bytes(generators)}


# --- copies -----------------------------------------------------------------------------------------------------------


class CpuCopies:
    """Copies nested state dicts into the same memory every time.

    Most of the time for a first copy is spent on new memory, which the system clears page by page. This object
    therefore keeps its copies. It holds only one state for each part at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def take(self, state: Any, part: str = "") -> Any:
        """Return ``state`` with a copy of every tensor, overwriting the earlier copy of this ``part``.

        Tensors that share memory also share a copy. Leaves that are not tensors are kept as they are.
        """
        return self._copy(state, (part,), {})

    def _copy(self, state: Any, path: tuple[Any, ...], seen: dict[Any, Any]) -> Any:
        if is_sharded(state):
            held = self._copy(dtensor.local(state), path, seen)
            return dtensor.with_local(state, held)
        if isinstance(state, torch.Tensor):
            view, _ = model_files.view_of(state)
            held = seen.get(view) if view is not None else None
            if held is None:
                held = seen[view] = self._kept[path] = _copy_into(self._kept.get(path), state.detach())
            return held
        if isinstance(state, Mapping):
            # Keep the class of a dict subclass, such as MultiStepLR's Counter. A copy of any other mapping may share
            # items with the original, so make a plain dict instead.
            made = copy.copy(state) if isinstance(state, dict) else {}
            for key, value in state.items():
                made[key] = self._copy(value, (*path, key), seen)
            return made
        if isinstance(state, (list, tuple)) and not hasattr(state, "_fields"):
            return type(state)(self._copy(item, (*path, i), seen) for i, item in enumerate(state))
        return state


def _copy_into(kept: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        if not tensor.is_cuda or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.to("cpu", copy=True)
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)  # GPUs copy to pinned memory directly
    return kept.copy_(tensor)

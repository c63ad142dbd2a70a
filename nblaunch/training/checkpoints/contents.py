"""What a checkpoint holds for one rank: read, and checked to fit its objects, before any of it is loaded.

Of weights, names and shapes are read, not values. Modules that load in a way of their own are left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints import files, model_files
from nblaunch.training.checkpoints.files import Manifest
from nblaunch.training.checkpoints.loading import view_of
from nblaunch.training.checkpoints.snapshot import CheckpointSources
from nblaunch.training.data import resuming
from nblaunch.training.models import bare_module
from nblaunch.wire.weights import quantised_entries


@dataclass
class Contents:
    """States by the objects that they are loaded into, each list in the order in which these were prepared.

    Args:
        optimizers: empty where the strategy reads them with the weights.
        schedulers: of all.
        orders: where each loader was in its epoch, by ``resuming.capture``; None where the checkpoint doesn't say.
        loaders: this rank's own state of each loader that knows its position; None where there is none, or it is one
            of another number of ranks.
        scaler: of fp16; None where there is none.
        custom: of the registered objects.
        random: this rank's generators, or those of rank 0; None where there are none.
        random_rank: the rank whose they are.
    """

    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    orders: list[dict[str, Any] | None] = field(default_factory=list)
    loaders: list[dict[str, Any] | None] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    custom: list[Any] = field(default_factory=list)
    random: Mapping[str, Any] | None = None
    random_rank: int = 0


def read(
    state: CheckpointSources, folder: Path, manifest: Manifest | None, reading: Mapping[str, Any]
) -> Contents:
    """Return the contents of a checkpoint.

    Args:
        state: what they will be loaded into.
        folder: of the checkpoint.
        manifest: its own; None: the checkpoint is another tool's.
        reading: arguments of ``files.read_object``.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit.
    """
    prepared, on_cpu = state.preparer, {**reading, "map_location": "cpu"}
    is_same_size = manifest is None or manifest.world_size == state.world_size
    contents = Contents()
    for index, optimizer in enumerate(
        prepared.optimizers if manifest is None or not manifest.sharded_by else ()
    ):
        path = folder / files.numbered(files.OPTIMIZER, index)
        if manifest is None and not path.is_file():
            break  # of another tool's strategy, which may lay it elsewhere
        contents.optimizers.append(files.read_object(path, **reading))
        if not state.strategy.holds_shards:
            check_optimizer(optimizer, contents.optimizers[-1], path)
    for index in range(len(prepared.schedulers)):
        contents.schedulers.append(
            files.read_object(folder / files.numbered(files.SCHEDULER, index), **reading)
        )
    for index, loader in enumerate(prepared.loaders):
        order, own = None, None
        path = folder / files.numbered(files.SAMPLER, index)
        if manifest is not None and path.is_file():
            order = files.read_object(path)
            _check_order(loader, order, index, manifest, state.world_size)
            candidates = [folder / files.loader_state(index, rank) for rank in (state.rank, 0)]
            found = next((path for path in candidates if path.is_file()), None)
            if found is not None and is_same_size and loader.use_stateful_dataloader:
                own = files.read_object(found, **reading)
        contents.orders.append(order)
        contents.loaders.append(own)
    if state.scaler is not None and (folder / files.SCALER).is_file():
        contents.scaler = files.read_object(folder / files.SCALER, **reading)
    for index, owner in enumerate(state.custom):
        contents.custom.append(files.read_object(folder / files.custom(index), owner=owner, **on_cpu))
    for rank in (state.rank, 0):
        path = folder / files.random_states(rank)
        if path.is_file():
            contents.random, contents.random_rank = files.read_object(path, **on_cpu), rank
            break
    return contents


def _check_order(loader: Any, order: dict[str, Any], index: int, manifest: Manifest, world_size: int) -> None:
    """Raise CheckpointError where another number of ranks can't go on in the middle of the epoch."""
    if manifest.world_size == world_size or resuming.can_continue(loader, order):
        return
    raise CheckpointError(
        f"loader {index} was in the middle of an epoch when {manifest.world_size} processes saved it, and {world_size} "
        "can't go on there: the DataLoader's worker processes, or the dataset itself, share its stream. Start "
        f"{manifest.world_size} processes, save at the end of an epoch, or read the stream with num_workers=0"
    )


_MAX_NAMED = 8  # names in one message


def check_weights(model: nn.Module, path: Path, strict: bool) -> None:
    """Raise CheckpointError where names or shapes in a file of weights are others than the model's.

    Args:
        model: wrapped or not.
        path: the file, in safetensors' format or torch's.
        strict: names must be the same.
    """
    module = bare_module(model)
    state = module.state_dict()
    saved, own = _shapes(model_files.read_weights(path)), _shapes(state)
    if saved and all(name.startswith("module.") for name in saved) and not own.keys() & saved.keys():
        saved = {name.removeprefix("module."): shape for name, shape in saved.items()}
    views = {name: view_of(value)[0] for name, value in state.items() if isinstance(value, torch.Tensor)}
    held = {views.get(name) for name in saved} - {None}  # what is tied to these may be left out
    frozen = quantised_entries(module, state).keys()
    left_out = {name for name in own if views.get(name) in held} | frozen
    special = tuple(_special_prefixes(module))
    wrong = [
        f"size mismatch for {name}: {saved[name]} in the file, {shape} in the model"
        for name, shape in own.items()
        if None not in (shape, saved.get(name)) and saved[name] != shape and name not in frozen
    ]
    if strict:
        wrong += [
            f"{name} is missing in the file" for name in own if name not in saved and name not in left_out
        ]
        wrong += [f"{name} is not in the model" for name in saved if name not in own]
    wrong = [text for text in wrong if not text.removeprefix("size mismatch for ").startswith(special)]
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise CheckpointError(f"{path} does not fit the model. {'; '.join(wrong[:_MAX_NAMED])}{more}")


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Return shapes by name; None where a value is no tensor."""
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
        for name, value in weights.items()
    }


def _special_prefixes(module: nn.Module) -> Iterator[str]:
    """Yield the names of submodules that rename or reshape what they load."""
    for name, child in module.named_modules():
        loads = type(child)._load_from_state_dict is not nn.Module._load_from_state_dict
        if (
            loads
            or any(
                not getattr(hook, "keeps_names_and_shapes", False)
                for hook in child._load_state_dict_pre_hooks.values()
            )
            or type(child).load_state_dict is not nn.Module.load_state_dict
        ):
            yield f"{name}." if name else ""


def check_optimizer(optimizer: Any, state: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError where an optimizer's state is of other groups of parameters than it has."""
    saved, own = state.get("param_groups"), getattr(optimizer, "param_groups", None)
    if not isinstance(saved, list) or not isinstance(own, list):
        return  # its strategy knows what it is
    sizes = [[len(group.get("params", ())) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{path} does not fit the optimizer: it is of groups of {sizes[0]} parameters, and the optimizer has "
            f"groups of {sizes[1]}"
        )

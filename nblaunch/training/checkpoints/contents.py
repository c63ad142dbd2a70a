"""What a checkpoint holds for one rank, beside weights: read and checked before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints import files, fitting
from nblaunch.training.checkpoints.files import Manifest
from nblaunch.training.checkpoints.snapshot import TrainingState
from nblaunch.training.data import resuming


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
    state: TrainingState, folder: Path, manifest: Manifest | None, reading: Mapping[str, Any]
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
        prepared.optimizers if manifest is None or not manifest.in_parts else ()
    ):
        path = folder / files.numbered(files.OPTIMIZER, index)
        if manifest is None and not path.is_file():
            break  # of another tool's strategy, which may lay it elsewhere
        contents.optimizers.append(files.read_object(path, **reading))
        if not state.strategy.holds_shards:
            fitting.check_optimizer(optimizer, contents.optimizers[-1], path)
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
    for index in range(len(state.custom)):
        contents.custom.append(files.read_object(folder / files.custom(index), **on_cpu))
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

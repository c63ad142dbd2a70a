"""Resuming in the middle of an epoch: loaders that skip the first batches, and loader positions for checkpoints.

A checkpoint from the middle of an epoch stores the generator states from the *start* of the epoch, when the order was
drawn. They include the states of the process's global generators, from which a user's sampler or stream may draw the
order. Reading the epoch again and skipping the samples already seen yields exactly the remaining samples. An
:class:`EpochPosition` records which samples were seen; any number of ranks can continue from it.

Loading a checkpoint does not reproduce the random numbers that a dataset draws from the process's global generators:
the loader reads one batch ahead of the training loop, so these generators are also one batch ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.training.data.adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    index_sampler_options,
    inherited_options,
    is_stateful,
    stateful_loader,
)
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.samplers import SeedableRandomSampler, SkipBatchSampler, index_sampler_of
from nblaunch.training.data.sharding import EpochPosition
from nblaunch.training.shared_state import SharedState


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A plain data loader that reads and drops its first batches in the first epoch.

    Args:
        dataset: as in :class:`torch.utils.data.DataLoader`.
        skip_batches: number of batches to drop.
        use_stateful_dataloader: read with torchdata.
        options: further arguments for the loader.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **options: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **options)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.skip_batches = self.skip_batches, 0
        skipped += self._take_batches_to_drop()
        self.epochs.batches_behind = 0
        self.begin()
        try:
            for batch in islice(iter(self.base_dataloader), skipped, None):
                self._note_position()
                yield batch
            self._note_position(is_end=True)
        finally:
            self.end()

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader, num_batches: int | None = None) -> DataLoader:
    """Return a loader that continues an interrupted epoch of ``dataloader`` after its first batches.

    Args:
        dataloader: the loader, prepared or not. It keeps its position, and both loaders can read later epochs.
        num_batches: number of this rank's batches to leave out of the new loader's first epoch. None: leave out all
            samples before the position in the checkpoint that was loaded last (a different number of ranks may have
            saved it); if that checkpoint was saved between epochs, leave out nothing. An indexed dataset does not load
            the skipped samples; a stream reads and drops them.

    Raises:
        ValueError: ``num_batches`` is negative.
    """
    if num_batches is not None and num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative")
    if isinstance(dataloader, PreparedLoader):
        return _rest_of(dataloader, num_batches)
    dataset, options = dataloader.dataset, inherited_options(dataloader)
    if isinstance(dataset, IterableDataset):
        options.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
        return SkipDataLoader(dataset, num_batches or 0, is_stateful(dataloader), **options)
    index_sampler = SkipBatchSampler(index_sampler_of(dataloader), num_batches or 0)
    options.update(index_sampler_options(dataloader, index_sampler))
    made: DataLoader = (stateful_loader if is_stateful(dataloader) else DataLoader)(dataset, **options)
    return made


def _rest_of(loader: PreparedLoader, num_batches: int | None) -> PreparedLoader:
    saved = loader.epochs.saved_position
    if num_batches is None and saved is not None:
        return loader.beginning_at(saved)
    if num_batches is None and loader.use_stateful_dataloader:
        return loader  # the position in a stream may exist only in the loader's own state
    return loader.beginning_at(loader.rounds(num_batches or 0))


# --- for checkpoints --------------------------------------------------------------------------------------------------


def capture(loader: PreparedLoader, shared: SharedState) -> dict[str, Any]:
    """Return the state of ``loader``; its position is None if no epoch is being read."""
    # The training loop reads either this loader or a loader for the rest of its epoch.
    entered = shared.loaders.entered()
    epochs = loader.epochs
    reading = [
        candidate
        for candidate in entered
        if getattr(candidate, "epochs", None) is epochs and candidate._loop is not None
    ]
    # Once the last batch has been returned, the epoch counts as done, and the state describes the next one.
    is_done = bool(reading) and reading[0].end_of_dataloader
    is_mid_epoch = bool(reading) and not is_done
    state = {
        **loader.order_state(is_mid_epoch, is_done),
        "position": asdict(reading[0].position) if is_mid_epoch else None,
        "is_portable": loader.has_portable_position,
        "global": epochs.start.of_process if is_mid_epoch else {},
    }
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        state["seed"] = sampler.initial_seed
    return state


def can_continue(loader: PreparedLoader, state: dict[str, Any]) -> bool:
    """Return whether ``loader`` can continue from a position that was saved by a different number of ranks."""
    return state["position"] is None or (state["is_portable"] and loader.has_portable_position)


def restore(loader: PreparedLoader, state: dict[str, Any]) -> None:
    """Restore the epoch of ``loader``, and the generators' states at the start of that epoch, from the state that
    :func:`capture` returned.

    :func:`skip_first_batches`, or a loader that resumes by itself, then skips the first part of the epoch.
    """
    position = state["position"]
    loader.set_epoch(state["iteration"])
    epochs = loader.epochs
    epochs.left = state["num_partial_epochs"]
    epochs.global_start = dict(state.get("global", {}))
    epochs.saved_position = None if position is None else EpochPosition(**position)
    epochs.is_resuming = position is not None
    for generator, saved in zip(loader._generators(), state["generators"], strict=False):
        if generator is torch.default_generator and position is not None:
            # The checkpoint stores the later state of this generator separately.
            epochs.global_start["torch_manual_seed"] = saved
        else:
            generator.set_state(saved.cpu())
    sampler = loader.get_sampler()
    if "seed" in state and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = state["seed"]

"""Going on in the middle of an epoch: loaders without the first batches, and where loaders are, for checkpoints.

A checkpoint taken in the middle of an epoch has the generators as they were at its *start*, because that is where the
order is drawn: reading the epoch again and skipping what was seen gives exactly what is left. What was seen is kept as
a :class:`EpochPosition`, from which any number of ranks can go on.

Not kept: what a dataset draws from the process's global generators while it is read; one batch is read ahead, so these
are one batch ahead of the training loop.
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
    """A plain data loader without its first batches, once: they are read and dropped.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`, with its ``options``.
        skip_batches: how many.
        use_stateful_dataloader: read with torchdata.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **options: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **options)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.skip_batches = self.skip_batches, 0
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
    """Return a loader that goes on behind the first batches of ``dataloader``, for an epoch that was interrupted.

    Args:
        dataloader: prepared or not; it keeps its place, and later epochs may be read from either.
        num_batches: how many are left out of the first epoch that the new loader reads, counted as this rank gets
            them. None: what all ranks, as many as there were, had seen at the checkpoint that was loaded last; none
            where that was not in the middle of an epoch. Over indexed datasets nothing is loaded for them; streams are
            read and dropped.

    Raises:
        ValueError: ``num_batches`` is negative.
    """
    prepared = dataloader if isinstance(dataloader, PreparedLoader) else None
    if num_batches is None:
        if prepared is not None and prepared.saved_position is not None:
            return prepared.beginning_at(prepared.saved_position)
        if prepared is not None and prepared.use_stateful_dataloader:
            return prepared  # its own state may hold a position in a stream that nothing else knows
        num_batches = 0
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative")
    dataset, options = dataloader.dataset, inherited_options(dataloader)
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream:
        options.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
    else:
        num_skipped = num_batches * (1 if prepared is None else prepared.batches_per_round)
        index_sampler = SkipBatchSampler(index_sampler_of(dataloader), num_skipped)
        options.update(index_sampler_options(dataloader, index_sampler))
    if prepared is not None:
        options.update(prepared.own_options(), skip_batches=num_batches)
        skipping = type(prepared)(dataset, **options)
        skipping.follow(prepared)
        return skipping
    if is_stream:
        return SkipDataLoader(dataset, num_batches, is_stateful(dataloader), **options)
    made: DataLoader = (stateful_loader if is_stateful(dataloader) else DataLoader)(dataset, **options)
    return made


# --- for checkpoints --------------------------------------------------------------------------------------------------


def capture(loader: PreparedLoader, shared: SharedState) -> dict[str, Any]:
    """Return where ``loader`` is."""
    reading = _being_read(loader, shared)
    is_read = reading in shared.loaders.entered()
    is_mid_epoch = is_read and not reading.end_of_dataloader
    # With its last batch returned, an epoch counts as done: what follows is the next one.
    is_done = is_read and reading.end_of_dataloader
    generators = reading.epoch_start if is_mid_epoch else [one.get_state() for one in reading._generators()]
    state = {
        "iteration": reading.iteration + (1 if is_done else 0),
        "num_partial_epochs": reading.num_partial_epochs,
        "generators": generators,
        "is_mid_epoch": is_mid_epoch,
        "position": asdict(reading.position) if is_mid_epoch and reading.has_portable_position else None,
    }
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        state["seed"] = sampler.initial_seed
    return state


def capture_own(loader: PreparedLoader, shared: SharedState) -> dict[str, Any]:
    """Return the state by which ``loader``, one that knows its position, goes on by itself."""
    reading = _being_read(loader, shared)
    if reading is loader:
        return loader.state_dict()
    # A stream that has no position for any number of ranks was read from its start, as ``loader`` would have.
    return reading.state_for_followed() if reading.has_portable_position else reading.state_dict()


def can_continue(loader: PreparedLoader, state: dict[str, Any]) -> bool:
    """Return whether ``loader`` can go on where another number of ranks was."""
    if not state["is_mid_epoch"]:
        return True
    return state.get("position") is not None and loader.has_portable_position


def restore(loader: PreparedLoader, state: dict[str, Any], shared: SharedState) -> None:
    """Bring ``loader`` to where :func:`capture` saw it: to its epoch, and to the generators at its start.

    The first part of the epoch is left out by :func:`skip_first_batches`, or by a loader that resumes by itself.
    """
    loader.set_epoch(state["iteration"])
    loader.num_partial_epochs = state.get("num_partial_epochs", 0)  # checkpoints of older versions have none
    loader.global_start = None
    for generator, saved in zip(loader._generators(), state["generators"], strict=False):
        if generator is torch.default_generator and state["is_mid_epoch"]:
            loader.global_start = saved.cpu()  # the checkpoint has its present state, too
        else:
            generator.set_state(saved.cpu())
    sampler = loader.get_sampler()
    if "seed" in state and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = state["seed"]
    loader.saved_position = None
    if state["is_mid_epoch"]:
        shared.is_resuming = True
        if can_continue(loader, state):
            loader.saved_position = EpochPosition(**state["position"])


def _being_read(loader: PreparedLoader, shared: SharedState) -> PreparedLoader:
    """Return the loader that reads what ``loader`` would: itself, or one made of it that begins further on."""
    for other in shared.loaders.entered():
        if isinstance(other, PreparedLoader) and loader in other.followed():
            return other
    return loader

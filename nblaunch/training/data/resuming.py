"""Epochs that were interrupted: where prepared loaders are, and loaders that begin further on.

A checkpoint taken in the middle of an epoch has the generators as they were at its *start*, because that is where the
order is drawn: reading the epoch again and skipping what was seen gives exactly what is left.

Not kept: what a dataset draws from the process's global generators while it is read; one batch is read ahead, so these
are one batch ahead of the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from nblaunch.training.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, stateful_loader
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.prepare import is_stateful, reading_options, reading_order
from nblaunch.training.data.samplers import SeedableRandomSampler, SkipBatchSampler, order_of, sampler_of
from nblaunch.training.session import Session


def capture(loader: PreparedLoader, session: Session) -> dict[str, Any]:
    """Return where ``loader`` is."""
    found = _being_read(loader, session)
    reading = loader if found is None else found  # not ``or``: a loader may have no length, and so no truth
    is_mid_epoch = reading in session.loaders.entered() and not reading.end_of_dataloader
    # With its last batch returned, an epoch counts as done: what follows is the next one.
    is_done = reading in session.loaders.entered() and reading.end_of_dataloader
    generators = reading.epoch_start if is_mid_epoch else [one.get_state() for one in reading._generators()]
    state = {
        "iteration": reading.iteration + (1 if is_done else 0),
        "generators": generators,
        "is_mid_epoch": is_mid_epoch,
    }
    sampler = sampler_of(loader.batch_sampler)
    if isinstance(sampler, SeedableRandomSampler):
        state["seed"] = sampler.initial_seed
    return state


def restore(loader: PreparedLoader, state: dict[str, Any], session: Session) -> None:
    """Bring ``loader`` to where :func:`capture` saw it."""
    loader.set_epoch(state["iteration"])
    for generator, saved in zip(loader._generators(), state["generators"], strict=False):
        generator.set_state(saved.cpu())
    sampler = sampler_of(loader.batch_sampler)
    if "seed" in state and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = state["seed"]
    if state["is_mid_epoch"]:
        session.is_resuming = True


def _being_read(loader: PreparedLoader, session: Session) -> PreparedLoader | None:
    """Return the loader that reads what ``loader`` would: itself, or one made of it that skips its first batches."""
    sampler = sampler_of(loader.batch_sampler)
    for other in session.loaders.entered():
        if other is loader or (sampler is not None and sampler_of(other.batch_sampler) is sampler):
            return other
    return None


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


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """Return a loader that goes on behind the first batches of ``dataloader``, for an epoch that was interrupted.

    Args:
        dataloader: prepared or not; it keeps its place, and later epochs may be read from either.
        num_batches: how many are left out of the first epoch that the new loader reads, counted as this rank gets
            them. Over indexed datasets nothing is loaded for them; streams are read and dropped.

    Raises:
        ValueError: ``num_batches`` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative")
    options = reading_options(dataloader)
    kind: Any = type(dataloader)
    per_batch = 1
    if isinstance(dataloader, PreparedLoader):
        options.update(dataloader.own_options(), skip_batches=num_batches)
        per_batch = dataloader.batches_per_round
    if isinstance(dataloader.dataset, IterableDataset):
        if not isinstance(dataloader, PreparedLoader):
            kind = SkipDataLoader
            options.update(use_stateful_dataloader=is_stateful(dataloader))
        options.update(
            batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, skip_batches=num_batches
        )
    else:
        if not isinstance(dataloader, PreparedLoader):
            kind = stateful_loader if is_stateful(dataloader) else DataLoader
        order = SkipBatchSampler(order_of(dataloader), num_batches * per_batch)
        options.update(reading_order(dataloader, order))
    skipping: DataLoader = kind(dataloader.dataset, **options)
    if isinstance(skipping, PreparedLoader):
        skipping.follow(dataloader)
    return skipping

"""Checks for loaders that were not prepared, and for loader processes that draw the same random numbers.

Without ``prepare``, ranks may read the same samples. :mod:`nblaunch.progress.sampler_epochs` finds epochs with equal
orders, in all loops.
"""

from __future__ import annotations

import functools
import mmap
import random
import struct
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    dataloader,
    get_worker_info,
)
from torch.utils.data._utils import fetch as fetching
from torch.utils.data._utils import worker as working

from nblaunch.progress import batches
from nblaunch.progress.plain_loops import plain_loops
from nblaunch.training.checks import Check, Prepared

_NUM_COMPARED = 3  # batches in a row


def _unprepared_iterator(prepared: Prepared) -> Any:
    """Return the iterator of the torch loader that was read most recently; None inside a prepared loader's loop."""
    return plain_loops().last_iterator if prepared.accumulation.loaders.innermost is None else None


def _sampler_of(iterator: Any) -> Any:
    """Return the sampler that yields single indices; None if the loader does not use torch's ``BatchSampler``."""
    index_batches = getattr(iterator, "_index_sampler", None)
    return index_batches.sampler if type(index_batches) is BatchSampler else None


class SameSamples(Check):
    """All ranks read the same samples, in the same order.

    Loaders that look the same may read different data, for example a separate file or subset on each rank, so
    batches are compared. A loop may use only a part of each batch, so losses are compared as well.
    """

    name = "same_samples"

    def begin_window(self) -> None:
        self._digests: deque[int] = deque(maxlen=_NUM_COMPARED)
        self._losses: deque[str] = deque(maxlen=_NUM_COMPARED)

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        iterator = _unprepared_iterator(prepared)
        sampler = _sampler_of(iterator)
        if not isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
            return
        if prepared.shared.num_data_ranks == 1 or not prepared.models or len(sampler) < 2:
            return
        self._losses.append(f"{float(loss.detach()):.4g}")  # devices round differently
        if len(self._digests) == len(self._losses) == _NUM_COMPARED:
            self.report(
                f"each rank trains on the same {len(sampler):,} samples, in the same order",
                "Pass the DataLoader to accelerator.prepare(), which gives each rank its share",
                value=(type(sampler).__name__, len(sampler), *self._digests, *self._losses),
                judged_by="distinct",
            )
        _digest_next_batch(iterator, self._digests)


def _digest_next_batch(iterator: Any, digests: deque[int]) -> None:
    """Add to ``digests`` a digest of the next batch that a torch loader's iterator reads."""
    # Keep a weak reference, because the loader's processes stop only when the iterator is gone.
    reference = weakref.ref(iterator)

    def read_and_digest() -> Any:
        living: Any = reference()
        living.__dict__.pop("_next_data", None)
        batch = living._next_data()
        with suppress(Exception):
            if (digest := batches.digest(batch)) is not None:
                digests.append(digest)
        return batch

    iterator._next_data = read_and_digest


# --- noise ------------------------------------------------------------------------------------------------------------

# torch seeds each worker process of a loader differently. A ``worker_init_fn`` that gives all of them the same seed
# undoes that. torch does not seed a generator that the dataset itself holds, so every process gets the same copy.
#
#     loader process ── digests of its generators, around two batches ──> shared memory ──> check on the rank
#
# The check examines only indexed datasets, because processes that read an iterable dataset may draw the same numbers to
# divide the samples among themselves.

_NUM_BATCHES = 2
_NUM_ROWS = 64
_MAX_LOADERS = 256
_MAX_OBJECTS = 64  # number of objects in a dataset to search for generators
_SOURCES = ("random", "numpy.random", "torch", "a generator in the dataset")
_ROW = struct.Struct(f"qq{len(_SOURCES)}q")
"""Seed of the loader, index of the process, digest of each source."""


class EqualNoise(Check):
    """Several processes of one loader draw the same random numbers while they read different samples."""

    name = "equal_noise"

    def __init__(self) -> None:
        self._table = _table()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        for source in self._table.find_equal():
            self.report(
                f"a DataLoader's processes draw the same random numbers from {source}, so samples get the same noise",
                "In worker_init_fn or at the first sample, seed the generator with get_worker_info().seed, which "
                "differs between processes",
            )


class _Table:
    """Digests of the random numbers that loader processes drew, in memory that they share with their parent."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUM_ROWS * _ROW.size)
        self._shuffled: dict[int, None] = {}

    def note_loader(self, iterator: Any) -> None:
        """Record a loop over a loader with worker processes, if the loader shuffles.

        Loaders that do not shuffle are often used for evaluation, which may need the same noise in every process.
        """
        sampler = iterator._index_sampler
        while (
            inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        ) is not None:
            sampler = inner
        if not isinstance(sampler, SequentialSampler):
            self._shuffled[iterator._base_seed] = None
            if len(self._shuffled) > _MAX_LOADERS:
                self._shuffled.pop(next(iter(self._shuffled)))

    def write(self, digests: list[int]) -> None:
        """Write the digests of this loader process."""
        info: Any = get_worker_info()
        base_seed = info.seed - info.id
        row = (base_seed + info.id) % _NUM_ROWS
        _ROW.pack_into(self._memory, row * _ROW.size, base_seed, info.id, *digests)

    def find_equal(self) -> Iterator[str]:
        """Yield the sources that gave two processes of one loader the same numbers."""
        seen: set[tuple[int, int, int]] = set()
        for base_seed, _, *digests in _ROW.iter_unpack(self._memory[:]) if self._shuffled else ():
            for source, digest in enumerate(digests):
                if digest and base_seed in self._shuffled:
                    if (base_seed, source, digest) in seen:
                        yield _SOURCES[source]
                    seen.add((base_seed, source, digest))


@functools.cache
def _table() -> _Table:
    """Return this process's table; the first call installs the hooks on torch's loaders."""
    table = _Table()
    begin, loop = dataloader._MultiProcessingDataLoaderIter.__init__, working._worker_loop

    @functools.wraps(begin)
    def begin_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        table.note_loader(self)

    @functools.wraps(loop)  # keeps the name, by which a new process finds the original
    def watch_and_loop(*args: Any, **kwargs: Any) -> None:
        _watch_fetches(table)
        loop(*args, **kwargs)

    dataloader._MultiProcessingDataLoaderIter.__init__ = begin_and_note  # type: ignore[method-assign]
    working._worker_loop = watch_and_loop
    return table


def _watch_fetches(table: _Table) -> None:
    """Digest the states of the generators before and after each of this process's first batches."""
    fetcher: Any = fetching._MapDatasetFetcher
    fetch = fetcher.fetch
    states: list[tuple[list[int], list[int]]] = []

    @functools.wraps(fetch)
    def digest_and_fetch(self: Any, index: Any) -> Any:
        before = _states(self.dataset)
        batch = fetch(self, index)
        states.append((before, _states(self.dataset)))
        if len(states) == _NUM_BATCHES:
            fetcher.fetch = fetch
            table.write(_digests(states))
        return batch

    fetcher.fetch = digest_and_fetch


def _digests(states: list[tuple[list[int], list[int]]]) -> list[int]:
    """Return a digest for each source; 0 if some batches used no numbers from it, or all used the same ones."""
    digests = []
    for source in range(len(_SOURCES)):
        path = [(before[source], after[source]) for before, after in states]
        has_drawn = all(before != after for before, after in path) and len(set(path)) == len(path)
        digests.append(hash(tuple(path)) if has_drawn else 0)
    return digests


def _states(dataset: Any) -> list[int]:
    numpy: Any = sys.modules.get("numpy")
    states_of_own = tuple(map(_state_of, _generators_in(dataset)))
    return [
        hash(random.getstate()),
        0 if numpy is None else hash(str(numpy.random.get_state(legacy=False)["state"])),
        hash(torch.get_rng_state().numpy().tobytes()),
        hash(states_of_own),
    ]


def _generators_in(dataset: Any) -> Iterator[Any]:
    """Yield the random generators in the attributes of a dataset, its transforms and its inner datasets."""
    numpy: Any = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    objects: list[Any] = [dataset]
    seen: set[int] = set()
    while objects and len(seen) < _MAX_OBJECTS:
        part = objects.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, kinds):
            yield part
        elif isinstance(part, (list, tuple)):
            objects += part[:_MAX_OBJECTS]
        elif not isinstance(part, (type, torch.Tensor)):
            objects += getattr(part, "__dict__", {}).values()


def _state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().numpy().tobytes())
    state = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()
    return str(state)

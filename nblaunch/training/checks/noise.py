"""A check for loader processes that draw the same random numbers and so give samples the same noise.

torch seeds each worker process of a loader differently. A ``worker_init_fn`` that gives all of them the same seed
undoes that. torch does not seed a generator that the dataset itself holds, so every process gets the same copy.

    loader process ── digests of its generators, around two batches ──> shared memory ──> check on the rank

The check examines only indexed datasets, because processes that read an iterable dataset may draw the same numbers in
order to divide the samples among them.
"""

from __future__ import annotations

import functools
import mmap
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import SequentialSampler, dataloader, get_worker_info
from torch.utils.data._utils import fetch as fetching
from torch.utils.data._utils import worker as working

from nblaunch.training.checks.check import Check, Prepared, Report

_NUM_BATCHES = 2
_NUM_ROWS = 64
_MAX_LOADERS = 256
_MAX_OBJECTS = 64  # objects of a dataset to search for generators
_SOURCES = ("random", "numpy.random", "torch", "a generator in the dataset")
_ROW = struct.Struct(f"qq{len(_SOURCES)}q")
"""Seed of the loader, index of the process, digest of each source."""


class EqualNoise(Check):
    """Several processes of one loader draw the same random numbers while they read different samples."""

    name = "equal_noise"

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._table = _table()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        for source in self._table.find_equal():
            self.report(
                f"processes of a DataLoader draw the same random numbers from {source}, so samples get the same noise",
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
    """Return the table of this process; the first call installs the hooks on torch's loaders."""
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
    """Return a digest for each source; 0 if some batches did not draw from it, or all drew the same numbers."""
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
    """Yield the random generators in the attributes of a dataset, its transforms and inner datasets."""
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

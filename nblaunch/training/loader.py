"""Prepared data loaders: a rank's share of the data, on its device, one batch ahead, with progress on the board.

:func:`prepare_data_loader` turns a person's loader into a :class:`DataLoaderShard`. Which samples a rank gets is
decided in ``sharding.py``; here random orders are made equal over ranks, once per epoch, and batches are handed out.

    rank 0 ── generator state ──> all ranks     start of an epoch: the only communication
    read b0 │ read b1, hand out b0 │ read b2, hand out b1 │ end seen: hand out b2 with end_of_dataloader = True
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from nblaunch.events import WorkerState
from nblaunch.training import advice, collectives, nested, rng
from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.training.passes import Pass
from nblaunch.training.process import Member
from nblaunch.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    sampler_of,
)
from nblaunch.training.state import Session, open_session

_ACCEPTED = set(inspect.signature(DataLoader.__init__).parameters)
# What says how data is read, not which: taken over from the person's loader. Not every torch has all of them.
_READING_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class DataLoaderShard(DataLoader):
    """A rank's share of a data loader.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`, with its ``options``.
        device: where batches go; None: they stay where they are.
        config: how data is shared.
        num_processes: ranks that share the data.
        rng_types: generators that are made equal at the start of every epoch.
        shard: what knows how many rows of the last global batch are real; None where nothing is ever added.

    ``end_of_dataloader`` is True while the last batch is in the user's hands; ``remainder`` is the number of real rows
    in the last global batch (0 = all of them, -1 = not known); ``iteration`` the number of completed epochs.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None = None,
        config: DataLoaderConfiguration | None = None,
        num_processes: int = 1,
        rng_types: Sequence[str] = ("generator",),
        shard: BatchSamplerShard | IterableDatasetShard | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        if options.get("batch_sampler") is not None:
            # torch leaves these at "None" and "sequential" where it is given a batch sampler; people read them.
            self.__dict__["batch_size"] = getattr(self.batch_sampler, "batch_size", None)
            self.__dict__["sampler"] = sampler_of(self.batch_sampler)
        self.device = device
        self.config = config or DataLoaderConfiguration()
        self.num_processes = num_processes
        self.rng_types = tuple(rng_types)
        self.shard = shard
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1

    # --- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        session = open_session()
        self._start_epoch(session)
        one = self._begin_pass(session)
        try:
            yield from self._hand_out(session, one, super().__iter__())
            self.iteration += 1
            if one.state is WorkerState.TRAINING:
                session.passes.epoch = self.iteration
        finally:
            session.gradients.leave(self)
            session.passes.end(one)

    def _hand_out(self, session: Session, one: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        """All batches, the next one always read before the current one is handed out."""
        nothing = object()
        current = next(batches, nothing)
        if current is nothing:
            return
        advance = session.passes.advance
        while True:
            current = self._place(current)
            upcoming = next(batches, nothing)
            if upcoming is nothing:
                self._finish_epoch()
            advance(one, nested.count_rows(current))
            yield current
            if upcoming is nothing:
                return
            current = upcoming

    def _place(self, batch: Any) -> Any:
        # Loaders make batches on the CPU; there, moving would only rebuild the containers.
        if self.device is None or self.device.type == "cpu":
            return batch
        return nested.to_device(batch, self.device, self.config.non_blocking)

    def _start_epoch(self, session: Session) -> None:
        self._hand_epoch(self.iteration)
        generators = self._generators()
        for rng_type in self.rng_types:
            for generator in generators if rng_type == "generator" else [None]:
                rng.synchronize_rng_state(rng_type, generator)
        self.end_of_dataloader = False
        self.remainder = self._expected_remainder()
        session.gradients.enter(self)

    def _finish_epoch(self) -> None:
        if self.shard is not None and self._is_shard_read_here:
            self.remainder = self.shard.tail_rows
        self.end_of_dataloader = True

    def _begin_pass(self, session: Session) -> Pass:
        is_training = session.is_training
        epoch = self.iteration if is_training else session.passes.epoch
        state = WorkerState.TRAINING if is_training else WorkerState.EVALUATING
        return session.passes.begin(self._length_or_unknown(), epoch, state)

    @property
    def _is_shard_read_here(self) -> bool:
        """Batch samplers run in this process; iterable datasets in the reading workers, where there are any."""
        return isinstance(self.shard, BatchSamplerShard) or self.num_workers == 0

    def _expected_remainder(self) -> int:
        """Real rows of the last global batch by arithmetic, before the epoch is read."""
        if self.drop_last or getattr(self.batch_sampler, "drop_last", False):
            return -1
        samples, batch = self._num_samples(), self.total_batch_size
        return samples % batch if samples is not None and batch else -1

    def _num_samples(self) -> int | None:
        for counted in (self.sampler, self.dataset):
            source = counted.dataset if isinstance(counted, IterableDatasetShard) else counted
            try:
                return len(source)  # type: ignore[arg-type]
            except TypeError:
                continue
        return None

    def _length_or_unknown(self) -> int:
        try:
            return len(self)
        except TypeError:
            return -1

    def _generators(self) -> list[torch.Generator]:
        """Those that decide the order: of the samplers, and of an iterable dataset that has one."""
        owners = [self.batch_sampler, self.sampler, getattr(self.batch_sampler, "batch_sampler", None)]
        if isinstance(self.dataset, IterableDatasetShard):
            owners.append(self.dataset.dataset)
        found = [getattr(owner, "generator", None) for owner in owners]
        unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        return list(unique.values())

    # --- what people ask of it -----------------------------------------------------------------------------------

    @property
    def base_dataloader(self) -> DataLoader:
        """This loader itself: there is no other one inside."""
        return self

    @property
    def total_batch_size(self) -> int:
        """Rows of a global batch, all ranks together; 0 where the batch sampler doesn't tell."""
        size = getattr(self.shard, "batch_size", None) or self.batch_size or 0
        return size if self.config.split_batches else size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset. TypeError where it has no length."""
        dataset = self.dataset
        return len(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, counted from 0."""
        self.iteration = epoch
        self._hand_epoch(epoch)

    def _hand_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset the epoch, those that want to know."""
        told: list[Any] = []
        parts: tuple[Any, ...] = (self.batch_sampler, self.sampler, self.dataset)
        for part in parts:
            if hasattr(part, "set_epoch") and not any(part is other for other in told):
                part.set_epoch(epoch)
                told.append(part)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of indices below the batch samplers."""
        batch_sampler: Any = self.batch_sampler
        while hasattr(batch_sampler, "batch_sampler"):
            batch_sampler = batch_sampler.batch_sampler
        if not hasattr(batch_sampler, "sampler"):
            raise TypeError(
                f"the loader's {type(batch_sampler).__name__} has no sampler that could be replaced"
            )
        batch_sampler.sampler = sampler
        self.__dict__["sampler"] = sampler


def prepare_data_loader(
    loader: DataLoader,
    member: Member,
    config: DataLoaderConfiguration,
    rng_types: Sequence[str],
    put_on_device: bool,
) -> DataLoaderShard:
    """This rank's share of ``loader``, as a new loader; the given one is not read any more.

    A sampler with a random generator of its own choice is given one, so that all ranks can be given the same.

    Raises:
        ValueError: the data can't be shared as ``config`` says, with the reason.
    """
    _check_plain(loader)
    common = _reading_options(loader)
    topology = member.topology
    common.update(
        device=member.device if put_on_device else None,
        config=config,
        num_processes=topology.world_size,
        rng_types=rng_types,
    )
    if isinstance(loader.dataset, IterableDataset):
        return _share_iterable(loader, member, config, common)
    batch_sampler, is_passed_as_sampler = _batch_sampler_of(loader)
    _settle_order(batch_sampler, config)
    shard = None
    if topology.world_size > 1:
        shard = BatchSamplerShard(
            batch_sampler, topology.world_size, topology.rank, config.split_batches, config.even_batches
        )
    sampling: dict[str, Any] = {"sampler": shard or batch_sampler, "batch_size": None}
    if not is_passed_as_sampler:
        sampling = {"batch_sampler": shard or batch_sampler}
    return DataLoaderShard(loader.dataset, shard=shard, **sampling, **common)


def _check_plain(loader: DataLoader) -> None:
    """Refuse what would be shared twice; warn about what a new loader can't take over."""
    sampler = sampler_of(loader.batch_sampler) or loader.sampler
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"the loader's DistributedSampler hands out a share of 1/{sampler.num_replicas} already, and prepare would "
            "share it once more. Give the loader to prepare without a DistributedSampler (with shuffle=True if it "
            "shuffles)."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        advice.warn(
            f"{type(loader).__name__} has an __iter__ of its own, which the prepared loader does not use: it reads the "
            "dataset and the sampler itself. Put what it does into the collate_fn."
        )


def _share_iterable(
    loader: DataLoader, member: Member, config: DataLoaderConfiguration, common: dict[str, Any]
) -> DataLoaderShard:
    world_size, rank = member.topology.world_size, member.topology.rank
    batch_size, drop_last = loader.batch_size, loader.drop_last
    if world_size == 1:
        return DataLoaderShard(loader.dataset, batch_size=batch_size, drop_last=drop_last, **common)
    # Without a batch size the stream yields whole batches, which are shared as single items are.
    unit = batch_size or 1
    shard = IterableDatasetShard(
        loader.dataset, unit, drop_last, world_size, rank, config.split_batches and batch_size is not None
    )
    own_size = unit // world_size if shard.split_batches else batch_size
    return DataLoaderShard(shard, shard=shard, batch_size=own_size, drop_last=drop_last, **common)


def _batch_sampler_of(loader: DataLoader) -> tuple[Any, bool]:
    """The loader's batch sampler, and whether it was given as ``sampler`` with ``batch_size=None``."""
    if loader.batch_sampler is not None:
        return loader.batch_sampler, False
    if isinstance(loader.sampler, BatchSampler):
        return loader.sampler, True
    raise ValueError(
        "a DataLoader over an indexed dataset with batch_size=None and no batch sampler hands out single samples, "
        "which can't be shared in batches. Give it a batch_size, or pass sampler=BatchSampler(...)."
    )


def _reading_options(loader: DataLoader) -> dict[str, Any]:
    options = {
        name: getattr(loader, name)
        for name in _READING_OPTIONS
        if name in _ACCEPTED and hasattr(loader, name)
    }
    if not options["num_workers"]:
        # torch refuses these two without reading workers, even at their defaults.
        options.pop("prefetch_factor", None)
        options.pop("multiprocessing_context", None)
    return options


def _settle_order(batch_sampler: Any, config: DataLoaderConfiguration) -> None:
    """See that a random order is one that all ranks can be given."""
    sampler = sampler_of(batch_sampler)
    if config.use_seedable_sampler and type(sampler) is RandomSampler:
        batch_sampler.sampler = SeedableRandomSampler(
            sampler.data_source,
            _agree_on_seed(config.data_seed),
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
        )
        return
    for part in (batch_sampler, sampler):
        if hasattr(part, "generator") and part.generator is None:
            part.generator = torch.Generator()
            part.generator.manual_seed(_draw_seed())


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _agree_on_seed(seed: int | None) -> int:
    if seed is not None:
        return seed
    return int(collectives.broadcast(torch.tensor(_draw_seed() % 2**62)).item())

"""Prepared data loaders: epochs in an order that ranks share, progress on the board, and their position.

    rank 0 ── generator state ──> all ranks     start of an epoch: the only communication

:class:`DataLoaderShard` reads its rank's own share of the data, always one batch ahead:

    read b0 │ read b1, return b0 │ read b2, return b1 │ end seen: return b2 with end_of_dataloader = True

The loader whose rank 0 reads for all is in ``dispatcher.py``; which samples belong to which rank is decided in
``sharding.py``; how the user's loader becomes a prepared one, in ``prepare.py``.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from nblaunch.backends.base import Backend
from nblaunch.events import WorkerState
from nblaunch.training.board_reports import Loop
from nblaunch.training.collectives import nested, rng
from nblaunch.training.data.samplers import (
    SkipBatchSampler,
    innermost,
    layers,
    order_of,
    pass_epoch,
    sampler_of,
)
from nblaunch.training.data.sharding import BatchSamplerShard, IterableDatasetShard
from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.training.session import Session, open_session


class PreparedLoader(DataLoader):
    """A data loader for one rank of the job. Final classes implement how batches come to this rank.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`, with its ``options``.
        device: where batches go; None: they stay where they are.
        config: how data is shared.
        num_processes: ranks that share the data.
        rng_types: generators that are made equal at the start of every epoch.
        shard: what knows how many rows of the last global batch are real; None where nothing is ever added.
        skip_batches: of this rank, left out of the first epoch that is read.
        slice_fn: cuts a rank's part out of a global batch, see :class:`DataLoaderDispatcher`.

    ``end_of_dataloader`` is True while the last batch is in the user's hands; ``remainder`` is the number of real rows
    in the last global batch (0 = all of them, -1 = not known); ``iteration`` the number of completed epochs;
    ``epoch_start`` has the states, at the start of the epoch, of the generators that decide its order.
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
        skip_batches: int = 0,
        slice_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        if options.get("batch_sampler") is not None:
            # torch leaves these at "None" and "sequential" where it is given a batch sampler; users read them.
            self.__dict__["batch_size"] = getattr(self.batch_sampler, "batch_size", None)
            self.__dict__["sampler"] = sampler_of(self.batch_sampler)
        self.device = device
        self.config = config or DataLoaderConfiguration()
        self.num_processes = num_processes
        self.rng_types = tuple(rng_types)
        self.shard = shard
        self.skip_batches = skip_batches
        self.slice_fn = slice_fn
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = -1
        self._is_accelerate_prepared = True
        self._follower: PreparedLoader | None = None
        self._stateful: Any = (
            _stateful_twin(dataset, options) if self.config.use_stateful_dataloader else None
        )
        self._position: dict[str, Any] | None = None
        self.epoch_start: list[torch.Tensor] = []
        self._resumed_start: list[torch.Tensor] = []

    # --- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        session = open_session()
        self._start_epoch(session)
        loop = self._begin_loop(session)
        try:
            yield from self._hand_out(session, loop)
            session.process.backend.end_loop()
            self.iteration += 1
            if self._follower is not None:
                self._follower.iteration = self.iteration
        finally:
            session.accumulation.leave(self)
            session.losses.flush()
            session.own_time.pause()
            session.loops.end(loop)

    @abstractmethod
    def _hand_out(self, session: Session, loop: Loop) -> Iterator[Any]:
        """Yield this rank's batches, each once ``end_of_dataloader`` is right for it; count steps on the board."""

    def _read(self, session: Session, num_skipped: int) -> Iterator[Any]:
        """Yield batches as they are read here, behind those that are skipped."""
        with rng.untouched(session.take_resuming()):  # making an iterator draws a number; it was drawn before
            batches = super().__iter__() if self._stateful is None else iter(self._stateful)
        if num_skipped and not self._skips_indices:
            batches = islice(batches, num_skipped, None)
        return batches

    @staticmethod
    def _begin_step(session: Session, loop: Loop, batch: Any) -> None:
        backend = session.process.backend
        backend.begin_step(loop.phase, batch)
        if backend.is_lazy:
            session.losses.show_due()

    def _place(self, batch: Any) -> Any:
        # Loaders make batches on the CPU; there, moving would only rebuild the containers.
        if self.device is None or self.device.type == "cpu":
            return batch
        return nested.to_device(batch, self.device, self.config.non_blocking)

    def _start_epoch(self, session: Session) -> None:
        self._hand_epoch(self.iteration)
        self._agree_on_order()
        self.end_of_dataloader = False
        self.remainder = self._expected_remainder()
        session.accumulation.enter(self)

    def _agree_on_order(self) -> None:
        """Make the generators that decide the order those of rank 0, or those that a saved state speaks of."""
        generators = self._generators()
        for rng_type in self.rng_types:
            for generator in generators if rng_type == "generator" else [None]:
                rng.synchronize_rng_state(rng_type, generator)
        self._resume_order(generators)

    def _resume_order(self, generators: Sequence[torch.Generator]) -> None:
        """Begin an epoch in the order that a saved state speaks of, and note it for the next state."""
        for generator, state in zip(generators, self._resumed_start, strict=False):
            generator.set_state(state)
        self._resumed_start = []
        self.epoch_start = [generator.get_state() for generator in generators]

    def _begin_loop(self, session: Session) -> Loop:
        is_training = session.is_training
        epoch = self.iteration + 1 if is_training else 0
        state = WorkerState.TRAINING if is_training else WorkerState.EVALUATING
        skipped = self.skip_batches
        length = self._length_or_unknown()
        if length >= 0 and self._skips_indices:
            length += skipped  # the bar is that of the whole epoch, and begins in the middle
        return session.loops.begin(length, epoch, state, skipped)

    @property
    def _skips_indices(self) -> bool:
        """Whether batches are skipped by their indices, so that none of them is read."""
        return isinstance(self.batch_sampler, SkipBatchSampler) or isinstance(self.sampler, SkipBatchSampler)

    def _take_skip(self) -> int:
        """Return how many batches to leave out now; none from the next time on."""
        skipped, self.skip_batches = self.skip_batches, 0
        return skipped

    @property
    def _is_shard_read_here(self) -> bool:
        """Batch samplers run in this process; iterable datasets in the reading workers, where there are any."""
        return isinstance(self.shard, BatchSamplerShard) or self.num_workers == 0

    def _expected_remainder(self) -> int:
        """Return the real rows of the last global batch by arithmetic, before the epoch is read."""
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
        """Return those that decide the order: of the samplers, and of an iterable dataset that has one."""
        owners = layers(order_of(self))
        if isinstance(self.dataset, IterableDatasetShard):
            owners.append(self.dataset.dataset)
        found = [getattr(owner, "generator", None) for owner in owners]
        unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        return list(unique.values())

    # --- saving where it is --------------------------------------------------------------------------------------

    def _note_position(self, is_end: bool = False) -> None:
        """Keep the state as of now: called before the next batch is read ahead, and when there is none."""
        if self._stateful is not None:
            starts = [g.get_state() for g in self._generators()] if is_end else self.epoch_start
            self._position = {
                # Without one, the next epoch starts afresh; torchdata would draw its order twice to find that out.
                "loader": None if is_end else self._stateful.state_dict(),
                "iteration": self.iteration + is_end,
                "generators": starts,
            }

    @property
    def state_dict(self) -> Callable[[], dict[str, Any]]:
        """Where in its epoch the loader is; a batch that was read ahead does not count.

        Raises:
            AttributeError: the loader was prepared without ``use_stateful_dataloader=True``.
        """
        self._check_stateful("state_dict")
        return self._get_state

    @property
    def load_state_dict(self) -> Callable[[dict[str, Any]], None]:
        """Go on, in the next iteration, behind the batch at which :attr:`state_dict` was taken."""
        self._check_stateful("load_state_dict")
        return self._set_state

    def _check_stateful(self, name: str) -> None:
        if self._stateful is None:
            raise AttributeError(f"{name} needs DataLoaderConfiguration(use_stateful_dataloader=True)")

    def _get_state(self) -> dict[str, Any]:
        if self._position is None:
            starts = [generator.get_state() for generator in self._generators()]
            return {"loader": None, "iteration": self.iteration, "generators": starts}
        return self._position

    def _set_state(self, state: dict[str, Any]) -> None:
        if state["loader"] is not None:
            self._stateful.load_state_dict(state["loader"])
        self.iteration = state["iteration"]
        self._resumed_start = state["generators"]
        self._position = state

    # --- for users -----------------------------------------------------------------------------------

    @property
    def base_dataloader(self) -> DataLoader:
        """What reads: torchdata's stateful loader, or this loader itself."""
        return self if self._stateful is None else self._stateful

    @property
    def total_batch_size(self) -> int:
        """Rows of a global batch, all ranks together; 0 where the batch sampler doesn't know."""
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
        """Pass the epoch to samplers and dataset that have ``set_epoch``."""
        pass_epoch(order_of(self), epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def follow(self, loader: Any) -> None:
        """Go on in the epoch that ``loader`` is in, and let it know of the epochs that are completed here."""
        self.iteration = loader.iteration
        self._follower = loader

    batches_per_round = 1
    """Batches of the underlying order that make one of this rank's."""

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of indices below the batch samplers."""
        batch_sampler = innermost(self.batch_sampler)
        if not hasattr(batch_sampler, "sampler"):
            raise TypeError(
                f"the loader's {type(batch_sampler).__name__} has no sampler that could be replaced"
            )
        batch_sampler.sampler = sampler
        self.__dict__["sampler"] = sampler


def _stateful_twin(dataset: Any, options: dict[str, Any]) -> Any:
    """Return torchdata's loader with the same arguments: it is the one that reads."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata 0.11 is the last one and calls functions that torch 2.13 deprecates; users can't help it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        return StatefulDataLoader(dataset, **options)


class DataLoaderShard(PreparedLoader):
    """A rank's own share of a data loader, read by the rank itself. Arguments as for :class:`PreparedLoader`."""

    def _hand_out(self, session: Session, loop: Loop) -> Iterator[Any]:
        """Yield all batches, the next one always read before the current one is handed out."""
        nothing = object()
        batches, backend = self._read(session, self._take_skip()), session.process.backend
        is_placed = self.device is None or self.device.type == "cpu"
        if backend.prefetches_to_device:
            batches, is_placed = map(self._place, batches), True
        current = next(batches, nothing)
        if current is nothing:
            return
        # Looked up once: on cheap samples, every tenth of a microsecond of a step shows.
        advance, rows = session.loops.advance, nested.count_rows(current)
        is_plain = is_placed and self._stateful is None and self._has_equal_batches
        is_watched = backend.is_lazy or type(backend).begin_step is not Backend.begin_step
        if not is_plain:
            current = self._receive(current, is_placed)
        for upcoming in batches:
            advance(loop, rows)
            if is_watched:
                self._begin_step(session, loop, current)
            yield current
            current = upcoming
            if not is_plain:
                current = self._receive(current, is_placed)
                rows = nested.count_rows(current)
        rows = nested.count_rows(current)
        self._finish_epoch(rows)
        session.loops.advance(loop, rows)
        self._begin_step(session, loop, current)
        yield current

    def _receive(self, batch: Any, is_placed: bool) -> Any:
        """Bring a batch that was just read where it is to be, before the next one is read."""
        batch = batch if is_placed else self._place(batch)
        self._note_position()
        return batch

    @property
    def _has_equal_batches(self) -> bool:
        """Whether no batch but the last can differ from the first in its number of rows."""
        is_plain = type(innermost(self.batch_sampler)) is BatchSampler
        return is_plain and not isinstance(self.dataset, IterableDataset)

    def _finish_epoch(self, rows: int) -> None:
        if self.shard is not None and self._is_shard_read_here:
            self.remainder = self.shard.tail_rows
        elif self.remainder >= 0 and self.num_processes == 1 and not self._has_equal_batches:
            self.remainder = rows % self.total_batch_size  # batches of other sizes came before it
        self.end_of_dataloader = True
        self._note_position(is_end=True)

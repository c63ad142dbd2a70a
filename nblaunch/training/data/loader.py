"""Prepared data loaders: they share an epoch's order among ranks, report progress, and know their position.

    rank 0 ── generator state ──> all ranks     start of an epoch: the only communication

:class:`DataLoaderShard` reads its rank's share of the data, always one batch ahead:

    read b0 │ read b1, return b0 │ read b2, return b1 │ end seen: return b2 with end_of_dataloader = True

In ``dispatcher.py``, rank 0 reads for all ranks. ``sharding.py`` decides which samples belong to which rank.
``prepare.py`` turns the user's loader into a prepared one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from time import monotonic
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate

from nblaunch.backends.base import Backend
from nblaunch.events import WorkerState
from nblaunch.progress.board_reports import Loop, get_reports, length_of
from nblaunch.progress.plain_loops import leave_out
from nblaunch.training.collectives import nested, rng
from nblaunch.training.data.adapter import (
    FINISHED,
    ORDER,
    DataLoaderAdapter,
    DataLoaderStateMixin,
    OrderStart,
    index_sampler_options,
    inherited_options,
)
from nblaunch.training.data.samplers import (
    SeedableRandomSampler,
    SkipBatchSampler,
    draws_from_own_generators,
    generators_of,
    index_sampler_of,
    innermost,
    nested_samplers,
    pass_epoch,
    sampler_of,
)
from nblaunch.training.data.sharding import (
    BatchSamplerShard,
    EpochPosition,
    IterableDatasetShard,
    rest_of_index_sampler,
    rest_of_stream,
)
from nblaunch.training.shared_state import SharedState, get_shared_state
from nblaunch.training.state import GradientState
from nblaunch.wire.board import PROGRESS


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A data loader for one rank of the job. The rank reads its batches itself, unless a subclass overrides that.

    Args:
        dataset, **options: as for :class:`torch.utils.data.DataLoader`.
        device: where batches go; None: they stay where they are.
        rng_types: generators to synchronise with rank 0 at the start of every epoch; None: only generators that decide
            a shared order.
        synchronized_generator: a generator to synchronise in addition to the samplers' generators.
        skip_batches: number of this rank's batches to leave out of the first epoch.
        use_stateful_dataloader: read with torchdata.
        _drop_last: whether the underlying loader drops an incomplete last batch.
        _non_blocking: copy batches to the device asynchronously.
        iteration: the first epoch to read.
        num_processes: number of ranks that share the data; None: as in the shard, or 1 without a shard.

    ``iteration`` is the number of completed epochs; samplers use it to shuffle. ``epochs`` is the full record.
    ``shard`` is the rank's share of an order or a stream; None if the rank reads everything.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        iteration: int = 0,
        *,
        num_processes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **options)
        if options.get("batch_sampler") is not None:
            # With a batch sampler, torch sets batch_size to None and sampler to a sequential one. Users read both.
            vars(self).update(
                batch_size=getattr(self.batch_sampler, "batch_size", None),
                sampler=sampler_of(self.batch_sampler),
            )
        self.shard = self._find_shard()
        self.split_batches = self.shard is not None and self.shard.split_batches
        self.num_processes: int = num_processes or (self.shard.num_processes if self.shard is not None else 1)
        self.device = None if device is None else torch.device(device)
        self.rng_types = tuple(rng_types or ())
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.iteration = iteration
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._is_accelerate_prepared = True
        self._loop: Loop | None = None
        self._is_rest = False
        self._begins_at = EpochPosition()
        # A saved position that this loader ignores, because it was created to begin at another one.
        self._left_position: EpochPosition | None = None
        self._global_now: dict[str, Any] = {}

    def _find_shard(self) -> Any:
        parts = [*nested_samplers(index_sampler_of(self)), self.dataset]
        return next(
            (part for part in parts if isinstance(part, (BatchSamplerShard, IterableDatasetShard))), None
        )

    @property
    def iteration(self) -> int:
        """Number of epochs read to their end, by this loader or by a loader for the rest of an epoch; settable."""
        return self.epochs.completed

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.epochs.completed = iteration

    def __len__(self) -> int:
        return max(0, self._num_rounds() - self.skip_batches)

    def _num_rounds(self) -> int:
        """Return the number of this rank's batches, including the batches to skip."""
        return len(self.base_dataloader)

    # --- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._hand_out_rest() if self.use_stateful_dataloader else self._hand_out()

    def _hand_out_rest(self) -> Iterator[Any]:
        """Yield this rank's batches from the position in a loaded state; all batches if there is no such position."""
        position, self.epochs.saved_position = self.epochs.saved_position, None
        if position is None or position is self._left_position:
            yield from self._hand_out()
            return
        rest = self.beginning_at(position)
        for batch in rest:
            self.end_of_dataloader, self.remainder = rest.end_of_dataloader, rest.remainder
            yield batch

    @contextmanager
    def _epoch(self) -> Iterator[tuple[SharedState, Loop]]:
        """Begin an epoch, or the rest of one; end it when the block ends, even if batches are left."""
        self.epochs.saved_position = None
        shared = get_shared_state()
        outer = self._loop, self.epochs.start, self.end_of_dataloader, self.remainder
        self._hand_epoch(self.iteration)
        self._synchronise_order()
        self.begin()
        self._loop = loop = self._begin_loop(shared)
        first_step, num_trained, is_complete = loop.step, shared.losses.num_trained, False
        num_collectives = shared.watch.before_loop()
        try:
            yield shared, loop
            shared.process.backend.end_loop()
            is_complete = True
            self.iteration += 1
        except GeneratorExit:
            shared.process.backend.leave_loop()
            raise
        finally:
            self.end()
            shared.losses.flush()
            shared.busy_time.pause()
            if loop.state is WorkerState.EVALUATING and is_complete:
                shared.watch.after_evaluation(num_collectives)
            # Once another training loop has begun, later training steps belong to that loop.
            has_trained = (
                shared.losses.num_trained > num_trained and shared.loops.last_training == loop.number
            )
            # A loop that reads one batch without training, as next(iter(loader)) does, only looks at the data.
            is_look = not (is_complete or has_trained) and loop.step - first_step <= 1
            is_epoch = not is_look and loop.state is WorkerState.TRAINING
            if self._loop is loop:  # a loop that began later may still be running
                self._leave_loop(is_epoch, *outer)
            if is_epoch and not is_complete:
                self.epochs.left += 1
            is_of_this_command = shared.loops.end(loop, is_epoch)
            if is_epoch and is_of_this_command:
                get_reports().report_epoch(loop)

    def _leave_loop(self, is_epoch: bool, outer: Any, start: OrderStart, *ends: Any) -> None:
        """Return to the enclosing loop, if there is one, after an evaluation or after a single batch was read."""
        if not is_epoch:
            self.epochs.start = start
        if is_epoch or outer is None:
            self._loop, self._begins_at = None, EpochPosition()  # later epochs are read in full
        else:
            self._loop, (self.end_of_dataloader, self.remainder) = outer, ends

    def _hand_out(self) -> Iterator[Any]:
        """Yield this rank's batches, and count steps on the board.

        This process reads each batch before it yields the previous one, so ``end_of_dataloader`` is always right.
        """
        with self._epoch() as (shared, loop):
            backend, batches = shared.process.backend, self._read(self._take_skip())
            is_placed = self.device is None or self.device.type == "cpu"
            if backend.prefetches_to_device:
                batches, is_placed = map(self._to_device, batches), True
            nothing = object()
            current = next(batches, nothing)
            if current is nothing:
                return
            # Look these up once, because every tenth of a microsecond per step matters if samples are cheap.
            loops, is_shown, slot = shared.loops, shared.is_shown, shared.process.slot
            count = nested.count_rows if is_shown and shared.counts_samples else lambda _: 0
            rows = count(current)
            is_plain = is_placed and self._has_even_batches
            counts_steps = backend.is_lazy or type(backend).begin_step is not Backend.begin_step
            if not is_plain:
                current = self._take_in(current, is_placed)
            for upcoming in batches:
                if loops.shown is not loop:
                    loops.advance(loop, rows)
                else:
                    loop.step += 1
                    if is_shown:  # inlines ``Slot.advance``
                        slot.step = step = slot.step + 1
                        slot.steps_done = steps_done = slot.steps_done + 1
                        slot.samples = samples = slot.samples + rows
                        slot.pack(slot.memory, PROGRESS, monotonic(), step, steps_done, samples)
                if counts_steps:
                    self._begin_step(shared, loop, current)
                yield current
                current = upcoming
                if not is_plain:
                    current = self._take_in(current, is_placed)
                    rows = count(current)
            self._finish_epoch(current)
            loops.advance(loop, count(current))
            self._begin_step(shared, loop, current)
            yield current

    @property
    def _has_even_batches(self) -> bool:
        """Whether all batches but the last have the same number of rows, so that counting batches gives a position.

        A stream does not guarantee this, because each worker process may end with a short batch. A custom collate_fn
        may return any number of rows.
        """
        is_even = not isinstance(self.dataset, IterableDataset) and self.collate_fn is default_collate
        return is_even and not self.use_stateful_dataloader and self._are_cut_by_torch

    def _take_in(self, batch: Any, is_placed: bool) -> Any:
        """Place a batch, and record the position after it, before the next one is read."""
        batch = batch if is_placed else self._to_device(batch)
        self._note_position()
        return batch

    def _finish_epoch(self, batch: Any) -> None:
        """Record that this is the last batch, and its number of real rows if that was unknown before."""
        if self.shard is not None and self._is_shard_read_here:
            self.remainder = self.shard.tail_rows
        elif self.num_processes == 1 and isinstance(self.dataset, IterableDataset):
            # The rows of some tensors may not be samples, so count the rows of the longest tensor.
            tensors = [leaf for leaf in nested.leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
            rows = max((len(tensor) for tensor in tensors), default=0)
            self.remainder = rows if rows < self.total_batch_size else 0
        self.end_of_dataloader = True
        self._note_position(is_end=True)

    def _read(self, num_skipped: int) -> Iterator[Any]:
        """Yield the batches that this process reads, after the skipped ones."""
        num_skipped += self._take_batches_to_drop()
        global_now, self._global_now = self._global_now, {}
        is_resuming, self.epochs.is_resuming = self.epochs.is_resuming, False
        # Creating an iterator draws a random number. In a resumed epoch, the original run has already drawn it.
        with torch.random.fork_rng(devices=[], enabled=is_resuming and not global_now):
            batches: Iterator[Any] = iter(self.base_dataloader)
        leave_out(batches)
        if num_skipped:
            batches = islice(batches, num_skipped, None)
        if global_now:
            batches = chain(list(islice(batches, 1)), batches)  # reading the first batch draws the order
            rng.restore_cpu_states(global_now)
        return batches

    @staticmethod
    def _begin_step(shared: SharedState, loop: Loop, batch: Any) -> None:
        backend = shared.process.backend
        if backend.is_lazy:
            # Read the losses between the two steps, so that neither step's time includes the read.
            backend.end_step()
            shared.losses.show_due()
        backend.begin_step(loop.state.name.lower(), batch)

    def _to_device(self, batch: Any) -> Any:
        # Loaders create batches on the CPU, so moving them there would only rebuild the containers.
        if self.device is None or self.device.type == "cpu":
            return batch
        return nested.send_to_device(batch, self.device, self._non_blocking)

    def _synchronise_order(self) -> None:
        """Set the generators that decide the order to rank 0's states, or to states from a checkpoint."""
        self._return_to_global_start()
        generators = self._generators()
        rng_types = self.rng_types
        if "generator" not in rng_types and self._needs_common_order(generators):  # regardless of rng_types
            rng_types = (*rng_types, "generator")
        for rng_type in rng_types:
            for generator in generators if rng_type == "generator" else [None]:
                rng.synchronize_rng_state(rng_type, generator)
        self._resume_order(generators)

    def _needs_common_order(self, generators: Sequence[torch.Generator]) -> bool:
        """Return whether all ranks share an order that each draws itself; seeded samplers need no synchronisation."""
        samplers = nested_samplers(index_sampler_of(self))
        seeded = {id(sampler.generator) for sampler in samplers if isinstance(sampler, SeedableRandomSampler)}
        is_shared = self.shard is not None and 1 < self.num_processes == get_shared_state().num_data_ranks
        return is_shared and any(id(generator) not in seeded for generator in generators)

    def _return_to_global_start(self) -> None:
        """Rewind the global generators to the start of a resumed epoch, if the order may come from them.

        Once the order is drawn, the generators return to their states from the checkpoint, because other code uses them
        too.
        """
        start, self.epochs.global_start = self.epochs.global_start, {}
        if start:
            self._global_now = rng.capture_cpu_states()
            rng.restore_cpu_states(start)

    def _resume_order(self, generators: Sequence[torch.Generator]) -> None:
        """Begin an epoch in the order of the loaded state, and record that order for the next state."""
        for generator, state in zip(generators, self.epochs.resumed_start, strict=False):
            generator.set_state(state)
        self.epochs.resumed_start = []
        is_own = draws_from_own_generators(index_sampler_of(self), self.dataset)
        of_process = {} if is_own else rng.capture_cpu_states()
        self.epochs.start = OrderStart([generator.get_state() for generator in generators], of_process)

    def _begin_loop(self, shared: SharedState) -> Loop:
        is_training = shared.is_training
        epoch = self.iteration + self.epochs.left + 1 if is_training else 0
        state = WorkerState.TRAINING if is_training else WorkerState.EVALUATING
        behind, length = self._rounds_behind + self.skip_batches, length_of(self)
        resumed, self.epochs.batches_behind = self.epochs.batches_behind // self.batches_per_round, 0
        if length >= 0:  # the progress bar covers the whole epoch, but starts in the middle
            length += behind
        return shared.loops.begin(length, epoch, state, behind + resumed)

    def _take_skip(self) -> int:
        """Return how many batches to skip; later calls return 0."""
        skipped, self.skip_batches = self.skip_batches, 0
        return skipped

    @property
    def _is_shard_read_here(self) -> bool:
        """Whether this process, rather than the DataLoader's worker processes, reads the shard."""
        return isinstance(self.shard, BatchSamplerShard) or self.num_workers == 0

    def _expected_remainder(self) -> int:
        if self._is_of_dividing_stream:
            return -1  # such a loader adds no rows
        # A single process without a shard adds no rows either. Only torch's BatchSampler forms batches of known size.
        is_known = self.num_processes > 1 or self.shard is not None or self._are_cut_by_torch
        if self._drops_last or not is_known:
            return -1
        if isinstance(self.shard, IterableDatasetShard) and self.num_workers > 1:
            return -1  # each worker process pads the last batch of its part
        samples, batch = self._num_samples(), self.total_batch_size
        return samples % batch if samples is not None and batch else -1

    @property
    def completed_rows(self) -> int:  # type: ignore[override]
        """Rows in the last global batch, including padding; without padding, rows in a full batch."""
        if self.shard is not None and self._is_shard_read_here:
            return self.shard.completed_rows
        return self.total_batch_size

    @property
    def adds_nothing(self) -> bool:  # type: ignore[override]
        """Whether a short last batch stays short."""
        return self.shard is None and self.num_processes == 1

    @property
    def is_uneven(self) -> bool:  # type: ignore[override]
        """Whether some ranks get fewer batches than others; True if this can't be known in advance."""
        return self._is_of_dividing_stream or bool(getattr(self.shard, "is_uneven", False))

    @property
    def _is_of_dividing_stream(self) -> bool:
        """Whether the user or the dataset has already divided the data, into parts of any length."""
        return self.shard is None and self.reads_on_every_rank and self.num_processes > 1

    @property
    def _drops_last(self) -> bool:
        return bool(self._drop_last or self.drop_last or getattr(self.batch_sampler, "drop_last", False))

    @property
    def _are_cut_by_torch(self) -> bool:
        """Whether torch's ``BatchSampler`` forms the batches, so that all but the last have the same size."""
        return type(innermost(index_sampler_of(self))) is BatchSampler

    def _num_samples(self) -> int | None:
        for counted in (self.get_sampler(), self.sampler, self.dataset):
            source = counted.dataset if isinstance(counted, IterableDatasetShard) else counted
            length = length_of(source)
            if length >= 0:
                return length
        return None

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that decide the order, from the samplers and from an iterable dataset."""
        dataset = None if self._is_of_dividing_stream else getattr(self.shard, "dataset", self.dataset)
        return generators_of(index_sampler_of(self), dataset, extra=self.synchronized_generator)

    @property
    def shuffled_by(self) -> list[Any]:
        """A key for this epoch's random order: equal for loaders with equal orders, empty for a fixed order."""
        sampler = nested_samplers(index_sampler_of(self))[-1]
        if isinstance(sampler, SeedableRandomSampler):
            return [sampler.initial_seed, sampler.epoch]
        is_shuffled = isinstance(sampler, RandomSampler)
        return [state.numpy().tobytes() for state in self.epochs.start.generators] if is_shuffled else []

    # --- saving the position, and continuing from it -------------------------------------------------------------

    @property
    def position(self) -> EpochPosition:
        """How far all ranks have read, including the current batch; between epochs, where the next one starts."""
        return self._begins_at if self._loop is None else self._position_at(self._loop.step)

    def _position_at(self, step: int) -> EpochPosition:
        return self._begins_at + self.rounds(step - self._rounds_behind)

    @property
    def has_portable_position(self) -> bool:
        """Whether a different number of ranks can continue from the position.

        They can't if several processes read separate parts of the data.
        """
        if self._is_of_dividing_stream:
            return False
        if not isinstance(self.dataset, IterableDataset):
            return True
        is_shared_here = self.num_processes == 1 or self.shard is not None or self.batches_per_round > 1
        return self.num_workers == 0 and (is_shared_here or self.split_batches)

    def rounds(self, number: int) -> EpochPosition:
        """Return how far all ranks together have read when this rank has received ``number`` batches."""
        batches = 1 if self.split_batches else self.num_processes
        return EpochPosition(number * (self.total_batch_size or batches), number * batches)

    @property
    def _rounds_behind(self) -> int:
        """Number of this rank's batches, at their current size, that precede the loader's first one."""
        return self._begins_at.samples // self.rounds(1).samples

    def beginning_at(self, position: EpochPosition) -> PreparedLoader:
        """Return a loader for the rest of the epoch. Both loaders read later epochs in full.

        If ``position`` is a whole number of rounds, the last batch is padded as in an uninterrupted epoch.
        """
        rest = copy.copy(self)  # shares ``epochs``
        rest._loop = None
        rest._left_position = self.epochs.saved_position  # ``rest`` begins at ``position`` instead
        self._forget_base_state()
        num_rounds = position.samples // self.rounds(1).samples
        is_whole = position == self.rounds(num_rounds)
        dataset: Any = self.dataset
        if isinstance(dataset, IterableDataset) and (is_whole or not self.has_portable_position):
            # Read the batches before ``position``, and drop them. If several processes read, only whole rounds can be
            # dropped.
            rest.skip_batches += num_rounds
            return rest
        if isinstance(dataset, IterableDataset):
            dataset = rest_of_stream(dataset, self.batch_size is not None, position)
            sampling: dict[str, Any] = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        else:
            index_sampler = index_sampler_of(self)
            sampling = index_sampler_options(
                self,
                SkipBatchSampler(index_sampler, num_rounds * self.batches_per_round, self.batches_per_round)
                if is_whole
                else rest_of_index_sampler(index_sampler, position),
            )
        rest.base_dataloader = self._make_base(dataset, **sampling, **inherited_options(self))
        rest.shard = rest._find_shard()
        rest._is_rest = True
        rest._begins_at = self._begins_at + position
        return rest

    def _note_position(self, is_end: bool = False) -> None:
        if not self._is_rest:
            super()._note_position(is_end)
        elif self.use_stateful_dataloader:
            # The base loader's state would belong to a different order.
            order = self._order_state(is_end)
            if self._loop is not None and not is_end:
                order["position"] = vars(self._position_at(self._loop.step + 1))
            self.epochs.state = {FINISHED: is_end, ORDER: order}

    def order_state(self, is_inside: bool, is_end: bool) -> dict[str, Any]:
        """Return the epoch's number, and the generator states that determine its order.

        Args:
            is_inside: an epoch is being read.
            is_end: the epoch has ended, so return the states for the next one.
        """
        at_start = self.epochs.start.generators
        generators = at_start if is_inside else [each.get_state() for each in self._generators()]
        return {
            "iteration": self.iteration + is_end,
            "num_partial_epochs": self.epochs.left,
            "generators": generators,
        }

    def _order_state(self, is_end: bool) -> dict[str, Any]:
        return self.order_state(bool(self.epochs.start.generators) and not is_end, is_end)

    def _resume_order_state(self, state: dict[str, Any]) -> None:
        epochs, position = self.epochs, state.get("position")
        epochs.completed = state.get("iteration", 0)
        epochs.left = state.get("num_partial_epochs", 0)
        epochs.resumed_start = state.get("generators", [])
        epochs.saved_position = None if position is None else EpochPosition(**position)

    # --- for users -----------------------------------------------------------------------------------

    @property
    def gradient_state(self) -> GradientState:
        """A view of gradient accumulation in this process."""
        return GradientState()

    @property
    def total_batch_size(self) -> int:
        """Rows in a global batch, over all ranks; 0 if the size is unknown."""
        sizes = (getattr(part, "batch_size", None) for part in (self.shard, self, index_sampler_of(self)))
        size: int = next(filter(None, sizes), 0)
        return size if self.split_batches else size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset. Raises TypeError if the dataset has no length."""
        dataset = self.dataset
        return len(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``, counting from 0."""
        self.iteration = epoch
        self.epochs.left = 0
        self._hand_epoch(epoch)

    def _hand_epoch(self, epoch: int) -> None:
        """Pass the epoch to the samplers and the dataset, if they have ``set_epoch``."""
        pass_epoch(index_sampler_of(self), epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    reads_on_every_rank = True
    """Whether each rank reads data itself; otherwise rank 0 reads for all."""

    batches_per_round = 1
    """Number of batches that the reading process reads for each batch that this rank gets."""

    def get_sampler(self) -> Any:
        """See :func:`get_sampler`."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler from which the innermost batch sampler gets its indices."""
        batch_sampler = innermost(index_sampler_of(self))
        if not hasattr(batch_sampler, "sampler"):
            raise TypeError(f"the loader's {type(batch_sampler).__name__} has no sampler to replace")
        batch_sampler.sampler = sampler
        if self.batch_sampler is not None:
            vars(self)["sampler"] = sampler


def get_sampler(dataloader: DataLoader | PreparedLoader) -> Any:
    """Return the sampler from which the innermost batch sampler gets its indices; None if there is none."""
    return sampler_of(index_sampler_of(dataloader))


class DataLoaderShard(PreparedLoader):
    """A rank's share of a data loader, which the rank reads itself. Takes the arguments of :class:`PreparedLoader`."""

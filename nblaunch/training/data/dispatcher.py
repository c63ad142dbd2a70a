"""A prepared loader whose data rank 0 reads for all ranks.

    rank 0    reads a round of batches │ joins them │ broadcasts structure, rows and is_last │ broadcasts tensors
    all       take their part of the rows

Rank 0 reads one round ahead, so it can mark the last round for all ranks. If reading fails, rank 0 sends the error to
the other ranks, which would otherwise wait forever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch import formatting
from nblaunch.training.collectives import nested, operations
from nblaunch.training.data.adapter import ORDER, index_sampler_options
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.samplers import index_sampler_of, nested_samplers
from nblaunch.training.shared_state import get_shared_state


class DataLoaderDispatcher(PreparedLoader):
    """A loader for which rank 0 reads the data and sends every rank its part.

    A round joins one batch per rank; with ``split_batches``, a round is a single batch. If the last round can't be
    divided evenly, it is padded with rows from the first round.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`.
        split_batches: treat each batch as the global batch, and divide it among the ranks.
        skip_batches, use_stateful_dataloader, _drop_last, _non_blocking: as for :class:`PreparedLoader`.
        slice_fn: ``slice_fn(batch, rows, process_index=, num_processes=)`` returns a rank's part; None: take the slice
            ``rows`` of every tensor. With ``split_batches``, it may also divide leaves that are not tensors.
        iteration: the first epoch to read.
        device: where batches go; None: to the device of this process.
        num_processes: number of ranks that get a part; None: all ranks of the job.
        **options: as for :class:`PreparedLoader`.

    Iterating raises, on all ranks:

    - RuntimeError if the batches of a round can't be joined or divided evenly;
    - TypeError on rank 0, and RuntimeError on the others, if a leaf is not a tensor and there is no ``slice_fn``.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        iteration: int = 0,
        *,
        device: torch.device | str | None = None,
        num_processes: int | None = None,
        **options: Any,
    ) -> None:
        process = get_shared_state().process
        super().__init__(
            dataset,
            device=process.device if device is None else device,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            iteration=iteration,
            num_processes=process.topology.world_size if num_processes is None else num_processes,
            **options,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        # The first rows of this epoch, as a list of tensors, and the first rows from a loaded state.
        self._first_rows: list[torch.Tensor] = []
        self._resumed_rows: list[torch.Tensor] = []

    reads_on_every_rank = False

    @property
    def batches_per_round(self) -> int:  # type: ignore[override]
        """Number of batches that rank 0 reads for each batch that this rank gets."""
        return 1 if self.split_batches else self.num_processes

    @property
    def completed_rows(self) -> int:  # type: ignore[override]
        """Rows in the last round, including padding."""
        if self._is_alone:
            return super().completed_rows
        return math.ceil(self.remainder / self.num_processes) * self.num_processes

    def _num_rounds(self) -> int:
        batches = super()._num_rounds()
        whole, rest = divmod(batches, self.batches_per_round)
        return whole + (1 if rest and not self._drops_last else 0)

    def _synchronise_order(self) -> None:
        if self._is_reader:  # other ranks read nothing, so there is no order to share
            self._return_to_global_start()
            self._resume_order(self._generators())

    @property
    def _is_reader(self) -> bool:
        return operations.rank() == 0

    @property
    def _is_alone(self) -> bool:
        """Whether this process reads only for itself. It then yields all batches, whatever they contain."""
        return operations.world_size() == 1 and self.slice_fn is None

    def _hand_out(self) -> Iterator[Any]:
        return super()._hand_out() if self._is_alone else self._dispatch()

    def _dispatch(self) -> Iterator[Any]:
        """Yield this rank's part of every round that rank 0 reads."""
        size = self.num_processes
        # Ranks that share a model get the same part.
        rank = operations.rank() * size // operations.world_size()
        slice_fn = self.slice_fn or nested.slice_tensors
        with self._epoch() as (shared, loop):
            skipped = self._take_skip() * self.batches_per_round
            if not self._is_reader:
                self._take_batches_to_drop()
                self.epochs.is_resuming = False  # only rank 0 creates an iterator
            rounds = self._sent(skipped) if self._is_reader else self._received()
            for whole, num_rows, is_last in rounds:
                rows = nested.count_rows(whole) // size
                part = slice_fn(
                    whole, slice(rank * rows, (rank + 1) * rows), process_index=rank, num_processes=size
                )
                if is_last:
                    self.remainder = num_rows
                    self.end_of_dataloader = True
                shared.loops.advance(loop, rows if shared.counts_samples else 0)
                self._begin_step(shared, loop, part)
                yield part

    # --- rank 0 --------------------------------------------------------------------------------------------------

    def _sent(self, skipped: int) -> Iterator[tuple[Any, int, bool]]:
        """Send each round, then yield it, its number of real rows, and whether it is the last one."""
        rounds, is_last = self._rounds(skipped), False
        while not is_last:
            try:
                fetched = next(rounds, None)
            except Exception as error:
                operations.broadcast_nested(f"{type(error).__name__}: {error}")
                raise
            if fetched is None:
                operations.broadcast_nested(None)
                return
            whole, num_rows, is_last = fetched
            whole = nested.map_tensors(torch.Tensor.contiguous, self._to_device(whole))
            yield operations.broadcast_nested((whole, num_rows, is_last))

    def _rounds(self, skipped: int) -> Iterator[tuple[Any, int, bool]]:
        skipped += self._take_batches_to_drop()
        batches = self._read(0)
        # Rows from the epoch's first round pad the last one, even if this loader starts in the middle.
        dropped = list(islice(batches, min(skipped, self.batches_per_round)))
        head = self._join(dropped)
        batches = islice(batches, skipped - len(dropped), None)
        current = self._join(list(islice(batches, self.batches_per_round)))
        head = self._note_first_rows(current if head is None else head)
        while current is not None:
            self._note_position()
            upcoming = self._join(list(islice(batches, self.batches_per_round)))
            num_rows = nested.count_rows(current)
            missing = -num_rows % self.num_processes
            if missing and upcoming is not None:
                raise RuntimeError(
                    f"dispatch_batches=True divides batches into {self.num_processes} equal parts, but a batch in "
                    f"the middle of the epoch has {num_rows} rows. Use the same number of rows in all batches, or "
                    "use dispatch_batches=False."
                )
            if missing:
                first = self._skipped_round()
                current = nested.concatenate(
                    [current, _first_rows(head if first is None else first, missing)]
                )
            if upcoming is None:
                self._note_position(is_end=True)
            yield current, num_rows, upcoming is None
            current = upcoming

    def _note_position(self, is_end: bool = False) -> None:
        super()._note_position(is_end)
        state = self.epochs.state
        if state is not None and self._loop is not None and not is_end and self._needs_first_round:
            # A loader that starts at this position rereads the first round; a torchdata loader would not.
            position = vars(self._position_at(self._loop.step + 1))
            self.epochs.state = {**state, ORDER: {**self._order_state(is_end), "position": position}}

    def _order_state(self, is_end: bool) -> dict[str, Any]:
        order = super()._order_state(is_end)
        return {**order, "first_rows": self._first_rows} if self._first_rows and not is_end else order

    def _resume_order_state(self, state: dict[str, Any]) -> None:
        super()._resume_order_state(state)
        self._resumed_rows = state.get("first_rows", [])

    def _note_first_rows(self, head: Any) -> Any:
        """Return the epoch's first round, and store its first rows for saved states.

        ``head`` is the first round that this loader has read. If a stream continues from its own state, ``head`` is a
        later round, and the epoch's first rows come from the loaded state.
        """
        resumed, self._resumed_rows, self._first_rows = self._resumed_rows, [], []
        is_kept = self.use_stateful_dataloader and not (self._needs_first_round or self._drops_last)
        if head is None or not is_kept or self.num_processes == 1:
            return head
        if len(resumed) == len(list(nested.leaves(head))):
            rows = iter(resumed)
            head = nested.map_leaves(lambda leaf: next(rows), head)
        self._first_rows = list(nested.leaves(_first_rows(head, self.num_processes - 1)))
        return head

    @property
    def _needs_first_round(self) -> bool:
        """Whether a loader that continues the epoch must reread the first round, which pads the last one."""
        owners = [*nested_samplers(index_sampler_of(self)), self.dataset]
        if isinstance(self.dataset, IterableDataset) or any(hasattr(owner, "state_dict") for owner in owners):
            return False
        return not self._drops_last and self._expected_remainder() % self.num_processes != 0

    def _skipped_round(self) -> Any:
        """Return the epoch's first round if this loader starts after it; None if this loader has read that round."""
        kept = getattr(index_sampler_of(self), "kept", None)
        if not kept:
            return None
        # Creating an iterator draws a random number. A separate generator leaves the global one untouched.
        options: dict[str, Any] = {"collate_fn": self.collate_fn, "generator": torch.Generator()}
        first: Any = DataLoader(self.dataset, **index_sampler_options(self, kept), **options)
        return self._join(list(first))

    def _join(self, batches: list[Any]) -> Any:
        """Join the batches of a round; return None if there are none, or if the round is incomplete and dropped."""
        if not batches or (self._drops_last and len(batches) < self.batches_per_round):
            return None
        if self.slice_fn is None and self.num_processes > 1:
            _check_leaves(batches[0])
        if nested.count_rows(batches[0]) == 0:
            raise RuntimeError(
                f"dispatch_batches=True sends tensors, but a batch of type {type(batches[0]).__name__} has none"
            )
        try:
            return nested.concatenate(batches)
        except (RuntimeError, TypeError) as error:
            raise RuntimeError(
                f"dispatch_batches=True joins the batches for {len(batches)} ranks, but these can't be joined: "
                f"{error}. Make the collate_fn pad all batches to one shape, or use split_batches=True, which "
                "divides single batches, or dispatch_batches=False."
            ) from error

    # --- other ranks ---------------------------------------------------------------------------------------------

    def _received(self) -> Iterator[tuple[Any, int, bool]]:
        is_last = False
        while not is_last:
            received = operations.broadcast_nested(None, device=self.device)
            if received is None:
                return
            if isinstance(received, str):
                raise RuntimeError(f"rank 0, which reads the data for all ranks, failed: {received}")
            yield received
            _, _, is_last = received


def _check_leaves(batch: Any) -> None:
    """Raise TypeError if a leaf is not a tensor: every rank would get the whole leaf with its part of the rows."""
    for leaf in nested.leaves(batch):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"dispatch_batches=True divides only tensors, but a batch has {formatting.kind(leaf)}. Remove it "
                "in the collate_fn, use dispatch_batches=False, or use split_batches=True with a "
                "slice_fn_for_dispatch that divides it."
            )


def _first_rows(batch: Any, count: int) -> Any:
    """Return the first ``count`` rows of a batch, repeating them if it has fewer."""
    indices = torch.arange(count) % nested.count_rows(batch)
    return nested.map_tensors(lambda tensor: tensor[indices.to(tensor.device)], batch)

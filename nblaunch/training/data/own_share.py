"""A prepared loader that reads its rank's own share of the data, always one batch ahead.

read b0 │ read b1, hand out b0 │ read b2, hand out b1 │ end seen: hand out b2 with end_of_dataloader = True
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from nblaunch.backends.base import Backend
from nblaunch.training.collectives import nested
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.samplers import innermost
from nblaunch.training.session import Session
from nblaunch.training.tracking.progress import Pass


class DataLoaderShard(PreparedLoader):
    """A rank's own share of a data loader, read by the rank itself. Arguments as for :class:`PreparedLoader`."""

    def _hand_out(self, session: Session, one: Pass) -> Iterator[Any]:
        """All batches, the next one always read before the current one is handed out."""
        nothing = object()
        batches, backend = self._read(session, self._take_skip()), session.member.backend
        is_placed = self.device is None or self.device.type == "cpu"
        if backend.places_ahead:
            batches, is_placed = map(self._place, batches), True
        current = next(batches, nothing)
        if current is nothing:
            return
        # Looked up once: on cheap samples, every tenth of a microsecond of a step shows.
        advance, rows = session.passes.advance, nested.count_rows(current)
        is_plain = is_placed and self._stateful is None and self._has_equal_batches
        is_watched = backend.is_lazy or type(backend).begin_step is not Backend.begin_step
        if not is_plain:
            current = self._receive(current, is_placed)
        for upcoming in batches:
            advance(one, rows)
            if is_watched:
                self._begin_step(session, one, current)
            yield current
            current = upcoming
            if not is_plain:
                current = self._receive(current, is_placed)
                rows = nested.count_rows(current)
        self._finish_epoch()
        session.passes.advance(one, nested.count_rows(current))
        self._begin_step(session, one, current)
        yield current

    def _receive(self, batch: Any, is_placed: bool) -> Any:
        """A batch that was just read, where it is to be, before the next one is read."""
        batch = batch if is_placed else self._place(batch)
        self._note_position()
        return batch

    @property
    def _has_equal_batches(self) -> bool:
        """Whether no batch but the last can differ from the first in its number of rows."""
        is_plain = type(innermost(self.batch_sampler)) is BatchSampler
        return is_plain and not isinstance(self.dataset, IterableDataset)

    def _finish_epoch(self) -> None:
        if self.shard is not None and self._is_shard_read_here:
            self.remainder = self.shard.tail_rows
        self.end_of_dataloader = True
        self._note_position(is_end=True)

"""Sharded weights, which travel shard by shard:

rank 0   ── TensorShard ──┐
rank 1   ── TensorShard ──┼──> ShardedTensor ── copied shard by shard ──> the launcher's own tensor
rank 2   ── TensorShard ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorShard:
    """A rank's shard of a tensor: a rectangular block of it, or a stretch of its elements in order.

    Args:
        shape: of the full tensor.
        offset: where the shard begins, one number per dimension.
        data: the elements of the shard, on the CPU; may be empty.
        is_flat: ``offset`` and ``data`` are of the tensor as one row of elements.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Any
    is_flat: bool = False


@dataclass(frozen=True)
class ShardedTensor:
    """The shards of one tensor, which don't overlap. Has the shape and size of the full tensor, but not its values.

    Args:
        shards: at least one.
    """

    shards: Sequence[TensorShard]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self.shards[0].shape

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self.shards[0].data.element_size())

    @property
    def num_missing(self) -> int:
        """Return how many elements are in none of the shards."""
        return self.numel() - sum(int(shard.data.numel()) for shard in self.shards)

    def put_into(self, full: Any) -> None:
        """Copy every shard into ``full``, a tensor of this shape."""
        if any(shard.is_flat for shard in self.shards) and not full.is_contiguous():
            full.copy_(self.assembled())
            return
        for shard in self.shards:
            target = full.view(-1) if shard.is_flat else full
            for dim, (start, length) in enumerate(zip(shard.offset, shard.data.shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(shard.data)

    def assembled(self) -> Any:
        """Return the full tensor, in memory of its own."""
        full = self.shards[0].data.new_empty(self.shape)
        self.put_into(full)
        return full

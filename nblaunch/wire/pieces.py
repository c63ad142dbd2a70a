"""Tensors that ranks hold in parts, on their way to the process that puts them together.

rank 0   ── Piece ──┐
rank 1   ── Piece ──┼──> Pieces ── copied one by one ──> the launcher's own tensor
rank 2   ── Piece ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor, or a stretch of its elements in order.

    Args:
        shape: of the whole tensor.
        offset: where the part begins, one number per dimension.
        part: the part itself, on the CPU; may be empty.
        is_flat: ``offset`` and ``part`` are of the tensor as one row of elements.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    part: Any
    is_flat: bool = False


@dataclass(frozen=True)
class Pieces:
    """What there is of one tensor: parts that don't overlap. Has the shape and size of the whole, but not its values.

    Args:
        parts: at least one.
    """

    parts: Sequence[Piece]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.parts[0].shape

    def numel(self) -> int:
        """Elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def element_size(self) -> int:
        """Bytes of an element."""
        return int(self.parts[0].part.element_size())

    @property
    def num_missing(self) -> int:
        """How many elements are in none of the parts."""
        return self.numel() - sum(int(piece.part.numel()) for piece in self.parts)

    def put_into(self, whole: Any) -> None:
        """Copy every part to its place in ``whole``, a tensor of this shape."""
        if any(piece.is_flat for piece in self.parts) and not whole.is_contiguous():
            whole.copy_(self.assembled())
            return
        for piece in self.parts:
            place = whole.view(-1) if piece.is_flat else whole
            for dim, (start, length) in enumerate(zip(piece.offset, piece.part.shape, strict=True)):
                place = place.narrow(dim, start, length)
            place.copy_(piece.part)

    def assembled(self) -> Any:
        """The whole tensor, in memory of its own."""
        whole = self.parts[0].part.new_empty(self.shape)
        self.put_into(whole)
        return whole

"""Parts of a tensor, each held by one rank, on their way to the process that puts them together: :class:`Piece`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor.

    Args:
        shape: of the whole tensor.
        offset: where the part begins, one number per dimension.
        part: the part itself, on the CPU; may be empty.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    part: Any

    def put_into(self, whole: Any) -> None:
        """Copy the part to its place in ``whole``, a tensor of ``shape``."""
        for dim, (start, length) in enumerate(zip(self.offset, self.part.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        whole.copy_(self.part)

    def numel(self) -> int:
        """Elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def element_size(self) -> int:
        """Bytes of an element."""
        return int(self.part.element_size())


def missing(pieces: Iterable[Piece]) -> int:
    """How many elements of the whole tensor are in none of its ``pieces``, which don't overlap."""
    held = list(pieces)
    return held[0].numel() - sum(int(piece.part.numel()) for piece in held)

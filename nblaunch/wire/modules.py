"""Torch modules in the arguments of a call, found by the same paths in the kernel and in its workers.

Found are arguments themselves, and what lists, tuples, dicts, dataclasses and namespaces among them hold. Each module
is listed once, by the first path that leads to it; a module inside another found one is not, since its weights are
among those of the whole. Weights that ranks hold in shards travel as such:

    rank 0   ── Piece ──┐
    rank 1   ── Piece ──┼──> Pieces ── copied one by one ──> the launcher's own tensor
    rank 2   ── Piece ──┘
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Place = int | str
"""An argument's position, or the path to what is inside one: ``args[0]['generator']``."""

_MAX_DEPTH = 4
_MAX_ITEMS = 1000
"""What holds more than that is data, and is not looked through."""


def modules_in(args: Sequence[Any]) -> dict[Place, Any]:
    """The modules in ``args`` by their places, in order. Imports nothing: without torch there are none."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[Place, Any] = {}
    seen: set[int] = set()
    for position, arg in enumerate(args):
        if isinstance(arg, torch.nn.Module):
            found[position] = arg
        else:
            found.update(_inside(arg, f"args[{position}]", torch.nn.Module, _MAX_DEPTH, seen))
    return found if len(found) < 2 else _outermost(found)


def modules_at(args: Sequence[Any], places: Sequence[Place]) -> dict[Place, Any]:
    """Those that :func:`modules_in` found at ``places``, there or in another process."""
    if not any(isinstance(place, str) for place in places):
        return {place: args[place] for place in places if isinstance(place, int)}
    found = modules_in(args)
    return {place: found[place] for place in places}


def place_name(place: Place) -> str:
    """``args[1]``, ``args[0]['generator']``."""
    return place if isinstance(place, str) else f"args[{place}]"


def _inside(value: Any, name: str, kind: type, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(value))
    for step, part in _parts(value):
        # A proxy's own idea of its class may raise.
        if issubclass(type(part), kind):
            yield name + step, part
        elif depth > 1 and id(part) not in seen:
            yield from _inside(part, name + step, kind, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with how to come to it."""
    cls = type(value)
    if issubclass(cls, (list, tuple)):
        if len(value) <= _MAX_ITEMS:
            names = getattr(cls, "_fields", None)  # of a named tuple
            yield from ((f".{names[i]}" if names else f"[{i}]", part) for i, part in enumerate(value))
    elif issubclass(cls, dict):
        if len(value) <= _MAX_ITEMS:
            yield from ((_key(key, i), part) for i, (key, part) in enumerate(list(value.items())))
    elif dataclasses.is_dataclass(cls):
        names = (field.name for field in dataclasses.fields(cls))
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    elif issubclass(cls, (SimpleNamespace, argparse.Namespace)):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _key(key: Any, index: int) -> str:
    """``['name']``; by its number where the text of a key may differ between processes."""
    return f"[{key!r}]" if isinstance(key, (str, int, enum.Enum)) else f"[key {index}]"


def _outermost(found: dict[Place, Any]) -> dict[Place, Any]:
    """Each module once, without those that are parts of others."""
    parts = {id(part) for module in found.values() for part in module.modules() if part is not module}
    kept: dict[int, Place] = {}
    for place, module in found.items():
        if id(module) not in parts:
            kept.setdefault(id(module), place)
    return {place: found[place] for place in kept.values()}


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

"""Exceptions that are hard to send or to show."""

from __future__ import annotations

import dataclasses


class Mute(Exception):
    """An exception that can't be converted to text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that accepts no attributes, not even the notes and the cause that Python sets."""

    code: int

"""Exceptions that are hard to send and to show, for the tests of both."""

from __future__ import annotations

import dataclasses


class Mute(Exception):
    """Can't be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attribute, not even the notes and the cause that Python sets."""

    code: int

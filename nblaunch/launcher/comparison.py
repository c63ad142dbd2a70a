"""Values by rank, and the variables of one function over all ranks, those that differ first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch import formatting
from nblaunch.diagnosis.rendering import cell_name
from nblaunch.wire.worker_commands import FrameVariables

_MISSING = "not defined"


@dataclass(frozen=True)
class Comparison:
    """The local variables of the ranks of a job. Its text names each value with the ranks that have it.

    Args:
        frames: rank -> variables of its frame.
        silent: ranks that did not answer in time, or that have ended.
    """

    frames: Mapping[int, FrameVariables]
    silent: Sequence[int] = ()

    @property
    def differing(self) -> dict[str, dict[int, str]]:
        """Name of an aspect, as ``batch.shape`` -> rank -> its text, of those that are not the same on all ranks."""
        found = {name: values for name, values in self._by_name().items() if len(set(values.values())) > 1}
        return dict(sorted(found.items(), key=lambda item: _differs_by_nature(item[1])))

    @property
    def equal(self) -> dict[str, str]:
        """Name of an aspect -> its text, of those that are the same on all ranks."""
        return {
            name: next(iter(values.values()))
            for name, values in self._by_name().items()
            if len(set(values.values())) == 1
        }

    def _by_name(self) -> dict[str, dict[int, str]]:
        names = dict.fromkeys(name for frame in self.frames.values() for name in frame.aspects)
        return {
            name: {rank: frame.aspects.get(name, _MISSING) for rank, frame in self.frames.items()}
            for name in names
        }

    def __repr__(self) -> str:
        places = _grouped({rank: _place(frame) for rank, frame in self.frames.items()})
        lines = [f"{formatting.ranks(ranks)}: {place}" for place, ranks in places]
        if self.silent:
            lines.append(f"{formatting.ranks(self.silent)}: no answer")
        for name, values in self.differing.items():
            # The value of the fewest first: that is the odd one.
            parts = [f"{text} on {formatting.ranks(ranks)}" for text, ranks in reversed(_grouped(values))]
            lines.append(f"{name} is {', '.join(parts)}")
        if self.frames:
            lines.append(f"the same on all ranks: {_listed(self.equal)}")
        return "\n".join(lines)


def _differs_by_nature(values: Mapping[int, str]) -> bool:
    """Return whether every rank has a value of its own, as the rank itself: seldom what is looked for."""
    is_own_rank = all(text == str(rank) for rank, text in values.items())
    return is_own_rank or len(set(values.values())) == len(values) > 2


def _grouped(values: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Return (text, ranks that have it), the most frequent first."""
    return [
        (text, [rank for rank, one in values.items() if one == text])
        for text, _ in Counter(values.values()).most_common()
    ]


def _place(frame: FrameVariables) -> str:
    if not frame.filename:
        return "idle"
    return f"{frame.function[0]}, {cell_name(frame.filename)}, line {frame.line}"


def _listed(equal: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {text}" for name, text in equal.items()) or "nothing"


class RankValues(dict[int, Any]):
    """rank -> value. Its text shows equal values once: ``[0-3] 2``."""

    def __repr__(self) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(self):
            ranks_of.setdefault(repr(self[rank]), []).append(rank)
        return "\n".join(f"[{formatting.spans(ranks)}] {text}" for text, ranks in ranks_of.items())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Show the same text in IPython, whose own one is that of a dict."""
        printer.text(repr(self))

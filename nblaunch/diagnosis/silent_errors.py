"""Detects mistakes that raise no exception: compares what the ranks' checks observe, and reports each mistake once.

The checks are in :mod:`nblaunch.training.checks`. Ranks only send observations; this module judges them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nblaunch import formatting
from nblaunch.events import Event, Hint, Note, Observation
from nblaunch.user_code import cell_name

_GATHER_S = 1.0
"""Seconds to hold back a rank's observation until other ranks have sent theirs, so that one message names them all."""

_GATHER_WRITES_S = 5.0
"""How many seconds to hold back observations of a file that several ranks write."""

OF_NODE = frozenset({"together"})
"""Values of ``judged_by`` for observations that each node judges itself, because the same path may name different
files on different nodes.
"""

OF_JOB = frozenset({"itself", "equal", "distinct", "overlapping", "first", "finally"})
"""Values of ``judged_by`` for observations that are judged for all nodes together."""

EVERYTHING = OF_NODE | OF_JOB
"""All values of ``judged_by``, for jobs on one machine."""

_MAX_PENDING = 256
_COMPARED = ("equal", "distinct")  # values of all ranks at one step
_NEEDS_ALL = (
    *_COMPARED,
    "overlapping",
    "first",
    "finally",
)  # inconclusive before all ranks have sent their observations
_MIN_SHARED = 8
"""Number of one rank's samples that another rank must have read as well."""

_TOLERANCE = 1e-3
"""Largest relative difference between numbers that still count as equal; devices round differently."""


class SilentErrors:
    """Judges the observations of an attempt's ranks.

    Args:
        ranks: all ranks that may send observations.
        emit: receives a warning for each error.
        scope: the observations to judge. With several nodes, each node judges :data:`OF_NODE`, and the coordinator
            judges :data:`OF_JOB`.
    """

    def __init__(
        self, ranks: Sequence[int], emit: Callable[[Event], None], scope: Collection[str] = EVERYTHING
    ) -> None:
        self._emit = emit
        self._ranks = set(ranks)
        self._scope = scope
        self._seen: dict[tuple[Any, ...], dict[int, Observation]] = {}
        self._since_s: dict[tuple[Any, ...], float] = {}
        self._reported: set[str] = set()
        self._hints: list[str] = []  # names of the checks that gave hints

    def receive(self, observation: Event) -> None:
        """Process a rank's observation; ignore other events."""
        if not isinstance(observation, Observation) or observation.check in self._reported:
            return
        if observation.judged_by not in self._scope:
            return
        if not observation.problem:
            self._withdraw(observation.check)
            return
        key = (observation.check, *_apart(observation))
        by_rank = self._seen.setdefault(key, {})
        if observation.judged_by == "together":
            by_rank[observation.rank] = observation  # the file has been closed
        else:
            by_rank.setdefault(observation.rank, observation)
        self._since_s.setdefault(key, time.monotonic())
        if len(self._seen) > _MAX_PENDING:
            self._forget(next(iter(self._seen)))

    def _withdraw(self, check: str) -> None:
        self._reported.add(check)
        for key in [key for key in self._seen if key[0] == check]:
            self._forget(key)

    def collect(self, alive: Collection[int]) -> None:
        """Warn about each mistake that has become certain."""
        self._warn(is_end=False)

    def end(self) -> None:
        """Warn about each mistake that is certain now that no more observations will arrive."""
        self._warn(is_end=True)
        if self._hints:
            self._emit(
                Note.of_job(
                    f"{formatting.count(len(self._hints), 'hint')} about the training loop ({', '.join(self._hints)}): "
                    "see nblaunch.last_job().hints()"
                )
            )
            self._hints = []

    def _warn(self, is_end: bool) -> None:
        for key in list(self._seen):
            is_hint = next(iter(self._seen[key].values())).is_hint
            text = self._judge(key, is_end)
            if text and is_hint:
                self._hints.append(key[0])
                self._emit(Hint(text=text))
            elif text:
                self._emit(Note.of_job(text, "warning"))

    def _judge(self, key: tuple[Any, ...], is_end: bool) -> str:
        by_rank = self._seen[key]
        how = next(iter(by_rank.values())).judged_by
        is_complete = by_rank.keys() >= self._ranks
        patience_s = _GATHER_WRITES_S if how == "together" else _GATHER_S
        is_late = is_end or time.monotonic() - self._since_s[key] >= patience_s
        # Wait for ranks whose work takes longer, because they reach the file later.
        is_open = how == "together" and (len(by_rank) == 1 or None in map(_contents, by_rank.values()))
        if not is_end and (how == "finally" or is_open):
            return ""
        if not (is_complete or (is_late and how not in _NEEDS_ALL)):
            return ""
        blamed = _BLAMED[how](by_rank)
        if how == "together" and not blamed and not is_late:
            return ""  # a save is reported when it begins: the file may still be empty
        self._forget(key)
        if not blamed or key[0] in self._reported:
            return ""
        self._reported.add(key[0])
        return _sentence(by_rank, blamed, key[0])

    def _forget(self, key: tuple[Any, ...]) -> None:
        del self._seen[key], self._since_s[key]


def _apart(observation: Observation) -> tuple[Any, ...]:
    """Return a key that observations share if they are judged together."""
    if observation.judged_by in _COMPARED:
        # The problem and the first value say what is compared, such as the gradients of some parameters.
        return observation.step, observation.problem, next(iter(observation.value or ()), None)
    return (observation.step, *observation.value[:-1]) if observation.judged_by == "together" else ()


def _contents(write: Observation) -> str | None:
    """Return a checksum of what a rank has written; "" if it is unknown, None while the file is open."""
    contents: str | None = write.value[-1]
    return contents


def _sentence(by_rank: Mapping[int, Observation], blamed: Sequence[int], check: str) -> str:
    seen = by_rank[min(blamed)]
    who = formatting.ranks(blamed)
    others = by_rank.keys() - set(blamed)
    if seen.judged_by in ("equal", "first") and others:
        who += f" {'differs' if len(blamed) == 1 else 'differ'} from {formatting.ranks(others)}"
    place = f", {cell_name(seen.filename)}, line {seen.lineno}" if seen.filename else ""
    return f"{seen.problem} ({who}{place}). {seen.advice}. (NBLAUNCH_CHECKS=-{check} silences this)"


def _all(by_rank: Mapping[int, Observation]) -> list[int]:
    return sorted(by_rank)


def _all_if_alike(by_rank: Mapping[int, Observation]) -> list[int]:
    """Return all ranks if they have the same value."""
    is_alike = len(by_rank) > 1 and len({str(seen.value) for seen in by_rank.values()}) == 1
    return sorted(by_rank) if is_alike else []


def _all_that_share(by_rank: Mapping[int, Observation]) -> list[int]:
    """Return all ranks if each has read several of the first rank's samples, in a different order."""
    first, *others = (by_rank[rank].value[1:] for rank in sorted(by_rank))
    is_shared = all(len(set(first).intersection(values)) >= _MIN_SHARED for values in others)
    in_order = any(
        2 * sum(mine == theirs for mine, theirs in zip(first, values, strict=False))
        > min(len(first), len(values))
        for values in others
    )
    return sorted(by_rank) if others and is_shared and not in_order else []


def _earliest(by_rank: Mapping[int, Observation]) -> list[int]:
    """Return the ranks where the problem began; none unless it reached all the others exactly one step later."""
    first = min(seen.value for seen in by_rank.values())
    is_spread = max(seen.value for seen in by_rank.values()) == first + 1
    return sorted(rank for rank, seen in by_rank.items() if seen.value == first) if is_spread else []


def _all_that_write(by_rank: Mapping[int, Observation]) -> list[int]:
    """Return all ranks if there are several and the file has contents; an empty file may be a lock.

    Return no ranks if all of them have written the same contents.
    """
    if len(contents := {_contents(seen) for seen in by_rank.values()}) == 1 and any(contents):
        return []
    path = next(iter(by_rank.values())).value[0]
    is_written = os.path.isfile(path) and os.path.getsize(path) > 0
    return sorted(by_rank) if len(by_rank) > 1 and is_written else []


def _minority(by_rank: Mapping[int, Observation]) -> list[int]:
    """Return the ranks that differ from the majority; all ranks without a majority, and none if all agree."""
    groups: list[list[int]] = []
    for rank in sorted(by_rank):
        value = by_rank[rank].value
        group = next((group for group in groups if _are_close(by_rank[group[0]].value, value)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if len(groups) == 1:
        return []
    groups.sort(key=len)
    has_majority = 2 * len(groups[-1]) > len(by_rank)
    return sorted(rank for group in (groups[:-1] if has_majority else groups) for rank in group)


def _are_close(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether two lists are equal, up to rounding."""
    if len(left) != len(right):
        return False
    numbers = [abs(value) for value in (*left, *right) if isinstance(value, float) and math.isfinite(value)]
    limit = _TOLERANCE * max(numbers, default=0.0)
    return all(
        abs(a - b) <= limit
        if isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b)
        else str(a) == str(b)
        for a, b in zip(left, right, strict=True)
    )


_BLAMED = {
    "itself": _all,
    "equal": _minority,
    "distinct": _all_if_alike,
    "overlapping": _all_that_share,
    "first": _earliest,
    "finally": _all,
    "together": _all_that_write,
}

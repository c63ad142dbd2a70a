"""Results that a worker sends its launcher after its function has returned: the return value, then trained states.

    worker   ── put_value ──> memory file      ── Returned: where the value is
    ── put_state ──> memory file      ── StateSent, for one module or optimizer after another
    launcher ── read ──> RankResult

The value comes first, and each part is written and read separately. If a part can't be sent, or the worker dies while
it writes, the parts before it are not lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import StateSent, ValueLocation
from nblaunch.wire.argument_paths import ArgPath, path_name
from nblaunch.wire.pickling import payload, pickle_errors

_MIN_KEPT_BYTES = 64 << 20
"""Smallest size of a value that stays in its memory file."""


@dataclass(frozen=True)
class RankResult:
    """The results of a worker, as far as they could be read.

    Args:
        value: the return value; an :class:`~nblaunch.wire.pickling.pickle_errors.Unpicklable` replaces each part that
            can't be sent.
        states: argument path -> state dict of that module or optimizer, on the CPU; an
            :class:`nblaunch.wire.originals.Unchanged` replaces each unchanged tensor.
        value_error: why the value can't be rebuilt in this process.
        state_errors: argument path -> why this state can't be rebuilt, or which parts of it can't be sent.
    """

    value: Any = None
    states: Mapping[ArgPath, Mapping[str, Any]] = field(default_factory=dict)
    value_error: str = ""
    state_errors: Mapping[ArgPath, str] = field(default_factory=dict)

    def value_of(self, rank: int) -> Any:
        """Return the value that ``rank`` sent.

        Raises:
            ValueError: it can't be rebuilt in this process.
        """
        if self.value_error:
            raise ValueError(f"the value of rank {rank} can't be rebuilt in the kernel: {self.value_error}")
        return self.value


Reader = Callable[[int, ValueLocation, Mapping[ArgPath, StateSent]], RankResult]
"""A function with the parameters of :func:`read`: descriptor of an outbox, place of the value, and sent states."""


class Outbox:
    """Writes a worker's return value and trained states; the launcher calls :func:`read`.

    Args:
        fd: an empty memory file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = payload.PayloadWriter(fd)

    def put_value(self, value: Any) -> ValueLocation:
        """Write the return value. Omit parts that can't be pickled, and name them.

        Raises:
            Exception: writing failed, but not because of a part of the value; memory is probably full.
        """
        value_at, unpicklable = self._append(value, "result", {})
        return ValueLocation(value_at, os.fstat(self._fd).st_size, unpicklable)

    def put_state(
        self, path: ArgPath, state: Mapping[str, Any], equality_tests: Mapping[int, Callable[[Any], bool]]
    ) -> tuple[int, int, str]:
        """Write a state dict, with an ``Unchanged`` for each tensor that its test finds equal to the launcher's.

        Returns:
            Where it starts and ends, and the parts that were omitted because they can't be pickled.

        Raises:
            Exception: as in :meth:`put_value`; the file then has its previous contents.
        """
        at, parts = self._append(state, f"{path_name(path)}.state_dict()", equality_tests)
        return at, os.fstat(self._fd).st_size, "; ".join(parts)

    def _append(
        self, value: Any, name: str, equality_tests: Mapping[int, Callable[[Any], bool]]
    ) -> tuple[int, tuple[str, ...]]:
        """Write ``value``; return its place, and the parts that were omitted."""
        try:
            return self._writer.append(value, main_by_reference=True, tests=equality_tests), ()
        except Exception:
            parts = pickle_errors.unpicklable_parts(value, name)
            if not parts:
                raise
            at = self._writer.append(
                pickle_errors.without_unpicklable(value), main_by_reference=True, tests=equality_tests
            )
            return at, tuple(map(str, parts))


def read(fd: int, value_location: ValueLocation, sent: Mapping[ArgPath, StateSent]) -> RankResult:
    """Read what an :class:`Outbox` wrote.

    If a part's code raises an error while the part is being rebuilt, the result contains the error as text. A dead
    worker's unfinished data is freed first: memory may have run out, and the kernel must not be the next process that
    is killed.
    """
    end = max(value_location.end, 0, *(event.end for event in sent.values()))
    if end < os.fstat(fd).st_size:
        os.ftruncate(fd, end)
    value, value_error = _read_value(fd, value_location) if value_location.at >= 0 else (None, "")
    states, state_errors = {}, {path: event.lost for path, event in sent.items() if event.lost}
    for path, event in sent.items():
        if event.at < 0:
            continue
        state, error = _tried(payload.load_mapped, fd, event.at)
        if error:
            state_errors[path] = error
        else:
            states[path] = {
                name: part for name, part in state.items() if not isinstance(part, pickle_errors.Unpicklable)
            }
    return RankResult(value, states, value_error, state_errors)


def _read_value(fd: int, value_location: ValueLocation) -> tuple[Any, str]:
    """Return the value and an empty string, or None and the reason why the value can't be rebuilt.

    Callers keep the value. A value that takes up most of a large file stays in the file. Any other value is copied:
    otherwise, a loss would keep the weights that share its file in memory, and a thousand losses would keep a thousand
    descriptors open.
    """
    num_bytes = value_location.end - value_location.at
    is_most = num_bytes >= max(_MIN_KEPT_BYTES, os.fstat(fd).st_size // 2)
    return _tried(payload.load_mapped if is_most else payload.load_copied, fd, value_location.at)


def _tried(read: Callable[[int, int], Any], fd: int, at: int) -> tuple[Any, str]:
    try:
        return read(fd, at), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"

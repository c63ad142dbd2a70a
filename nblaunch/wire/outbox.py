"""What a worker leaves for its launcher when its function has returned: the return value, and trained weights.

    worker   ── write ──> memory file: value, weights of one module, weights of the next ...
             ── Contents, with the Finished event: where each of them is
    launcher ── read ──> Outcome

Each part is written and read by itself, so that one that can't travel does not cost the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import Contents
from nblaunch.wire import blame, payload
from nblaunch.wire.modules import Place, place_name

_MIN_KEPT_BYTES = 64 << 20
"""Of a value that stays in the file it came in."""


@dataclass(frozen=True)
class Outcome:
    """What a worker has left, as far as it could be read.

    Args:
        value: the return value; a :class:`nblaunch.wire.blame.Unpicklable` stands for each part that can't travel.
        weights: place in the arguments -> state dict of that module, on the CPU.
        value_error: why the value can't be rebuilt in this process.
        weights_errors: place -> why these weights can't be.
    """

    value: Any = None
    weights: Mapping[Place, Mapping[str, Any]] = field(default_factory=dict)
    value_error: str = ""
    weights_errors: Mapping[Place, str] = field(default_factory=dict)


def write(fd: int, value: Any, weights: Mapping[Place, Mapping[str, Any]]) -> Contents:
    """Write both to the empty file ``fd``; ``value`` None is not written. What can't be pickled is left out and named.

    Raises:
        Exception: something went wrong that is not the fault of any part: memory is full, most likely.
    """
    writer = payload.PayloadWriter(fd)
    value_at, unpicklable = _append(writer, value, "result") if value is not None else (-1, ())
    weights_at, lost = {}, {}
    for place, state in weights.items():
        weights_at[place], parts = _append(writer, state, f"{place_name(place)}.state_dict()")
        if parts:
            lost[place] = "; ".join(parts)
    return Contents(value_at, weights_at, unpicklable, lost)


def read(fd: int, contents: Contents) -> Outcome:
    """Read what :func:`write` wrote. Never raises for what a part's own code raises while it is rebuilt."""
    value, value_error = _read_value(fd, contents) if contents.value_at >= 0 else (None, "")
    weights, weights_errors = {}, dict(contents.lost_weights)
    for place, at in contents.weights_at.items():
        state, error = _tried(payload.load, fd, at)
        if error:
            weights_errors[place] = error
        else:
            weights[place] = {
                name: part for name, part in state.items() if not isinstance(part, blame.Unpicklable)
            }
    return Outcome(value, weights, value_error, weights_errors)


def _append(writer: payload.PayloadWriter, value: Any, name: str) -> tuple[int, tuple[str, ...]]:
    """Where it is, and the parts of it that were left out."""
    try:
        return writer.append(value, main_by_reference=True), ()
    except Exception:
        parts = blame.unpicklable_parts(value, name)
        if not parts:
            raise
        at = writer.append(blame.without_unpicklable(value), main_by_reference=True)
        return at, tuple(f"{part} ({type(why).__name__}: {why})" for part, why in parts)


def _read_value(fd: int, contents: Contents) -> tuple[Any, str]:
    """The value, and why it can't be had.

    People keep it. One that is next to all of a large file stays there; any other is moved out, or a loss would keep
    the weights beside it in memory, and a thousand losses a thousand descriptors.
    """
    whole = os.fstat(fd).st_size
    num_bytes = min(contents.weights_at.values(), default=whole) - contents.value_at
    is_most = num_bytes >= max(_MIN_KEPT_BYTES, whole // 2)
    return _tried(payload.load if is_most else payload.take, fd, contents.value_at)


def _tried(read: Callable[[int, int], Any], fd: int, at: int) -> tuple[Any, str]:
    try:
        return read(fd, at), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"

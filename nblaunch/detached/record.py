"""Facts about a detached job that need no pickle: its record and its end, as JSON.

Any version of nblaunch can list the jobs of any other: if ``format`` differs, nothing else is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from nblaunch.events import JobEnded
from nblaunch.host.machine import ProcessMark
from nblaunch.wire import schema

FORMAT = 1
"""Format of these files and of the pickles beside them. Raise it with every change of :class:`Record` or
:class:`End`."""


class OtherFormat(ValueError):
    """A file comes from another version of nblaunch."""


@dataclass(frozen=True)
class Record:
    """What was launched, and the process that supervises it.

    Args:
        format: :data:`FORMAT`.
        id: short name of the job.
        function_name: name of the user's function.
        num_processes: number of ranks.
        backend: name of the device family.
        process: the process that runs the job.
        address: additional address for requests, besides the socket in its folder (``requests.py``).
        started_s: ``time.time()`` of the launch.
    """

    format: int
    id: str
    function_name: str
    num_processes: int
    backend: str
    process: ProcessMark
    address: str
    started_s: float


@dataclass(frozen=True)
class End:
    """How a job ended.

    Args:
        format: :data:`FORMAT`.
        event: its last event.
        unsaved: why the result could not be written; empty if it was.
        has_weights: there are trained weights.
        unsaved_weights: why the weights could not be written; empty if they were.
        unsaved_error: why the job's error could not be written; empty if it was.
        partial_rank: the rank whose value is the ``partial`` of the error; None = no partial value.
    """

    format: int
    event: JobEnded
    unsaved: str
    has_weights: bool
    unsaved_weights: str
    unsaved_error: str
    partial_rank: int | None


_Stored = TypeVar("_Stored", Record, End)


def dump(value: Record | End) -> bytes:
    """Return the text of a file."""
    return schema.dump(value) + b"\n"


def load(cls: type[_Stored], text: bytes) -> _Stored:
    """Read what :func:`dump` wrote.

    Raises:
        OtherFormat: another version of nblaunch wrote it.
        ValueError: it is damaged; the message says how.
    """
    if not text:
        raise ValueError("it is empty")
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    written = plain.get("format") if isinstance(plain, dict) else None
    if isinstance(written, int) and written != FORMAT:
        raise OtherFormat(f"it has the format {written}; this version of nblaunch reads {FORMAT}")
    return schema.load(cls, text)

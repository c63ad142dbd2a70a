"""The record of a detached job and of its end, as JSON.

Any version of nblaunch can list and end the jobs of any other version. If ``format`` differs, nblaunch reads only the
fields of :class:`Head`, which keep their names and types forever.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from nblaunch.events import JobEnded
from nblaunch.host.machine import ProcessMark
from nblaunch.wire import schema

FORMAT = 2
"""Format of these files. Increment it with every change to :class:`Record` or :class:`End`. The pickles next to them
are compared by layout (``folder.py``).
"""


class OtherFormat(ValueError):
    """A file comes from another version of nblaunch.

    Args:
        head: the part that this version can read.
    """

    def __init__(self, message: str, head: Head) -> None:
        super().__init__(message)
        self.head = head


@dataclass(frozen=True)
class Head:
    """The part of a record that any version can read.

    Args:
        version: version of nblaunch that wrote it; empty = unknown.
        process: the process that runs the job; None = unknown.
        address: as in :class:`Record`; empty = unknown.
    """

    version: str = ""
    process: ProcessMark | None = None
    address: str = ""

    @property
    def launcher(self) -> str:
        """The version of nblaunch that launched the job, for display."""
        if not self.version:
            return "another version of nblaunch"
        is_own = self.version == sys.modules["nblaunch"].__version__
        return f"another build of nblaunch {self.version}" if is_own else f"nblaunch {self.version}"


@dataclass(frozen=True)
class Record:
    """The record of a launch, and of the process that supervises it.

    Args:
        format: :data:`FORMAT`.
        version: version of nblaunch that launched the job.
        layout: layout of the pickles next to the record.
        id: short name of the job.
        function_name: name of the user's function.
        num_processes: number of ranks.
        backend: name of the device family.
        process: the process that runs the job.
        address: address for requests, in addition to the socket in the job's folder (``requests.py``).
        started_s: ``time.time()`` of the launch.
    """

    format: int
    version: str
    layout: str
    id: str
    function_name: str
    num_processes: int
    backend: str
    process: ProcessMark
    address: str
    started_s: float

    @property
    def head(self) -> Head:
        """The part that any version can read."""
        return Head(self.version, self.process, self.address)


@dataclass(frozen=True)
class End:
    """The end of a job: how it ended, and what was saved.

    Args:
        format: :data:`FORMAT`.
        event: last event of the job.
        unsaved: why the result could not be written; empty if it was written.
        has_weights: whether there are trained weights.
        unsaved_weights: why the weights could not be written; empty if they were written.
        unsaved_error: why the job's error could not be written; empty if it was written.
        partial_rank: the rank whose value is the error's ``partial``; None = no partial value.
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
    """Return the contents of a file as JSON text."""
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
        raise OtherFormat(f"it has the format {written}, but this version reads {FORMAT}", _head_of(plain))
    return schema.load(cls, text)


def _head_of(plain: Mapping[str, Any]) -> Head:
    version, address, process = (plain.get(name) for name in ("version", "address", "process"))
    mark = None
    with suppress(ValueError):
        mark = schema.load(ProcessMark, json.dumps(process).encode())
    return Head(
        version if isinstance(version, str) else "", mark, address if isinstance(address, str) else ""
    )

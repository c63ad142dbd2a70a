"""The last collectives of each rank, in memory that survives the rank: the calls, their lines, and their order.

    worker  CallWriter ──> texts: lines of code and groups, each once │ ring: the last calls ──> CallReader  launcher

Each call has a number within its group and a chain: a digest of everything that must be equal on all ranks, in this
call and in all earlier ones. If two ranks have equal chains for calls with the same number, they agree on all calls up
to that one, so nothing else needs to be compared. Chains are computed from integers, whose hashes do not differ between
processes.

``backward``, the forward pass of ``DistributedDataParallel`` and optimizer steps also count as calls, with their own
counts, because collectives that torch starts from C++ leave no other trace here. They are only evidence: ranks need not
agree on them, so they are not part of a chain. The same applies to ``send``, ``recv`` and new groups.

All memory has a fixed size. When the text region is full, texts and calls are dropped, and recording starts over.
Recording a call takes less than a microsecond and needs no system call. The launcher may read while a rank is writing;
it omits entries that were overwritten in the meantime.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from time import monotonic
from typing import Any

NUM_CALLS = 256
"""Number of calls that are recorded per rank."""

_ENTRY = struct.Struct("@9q2d")
_ENTRY_BYTES = _ENTRY.size
_NOTE = struct.Struct("@3q48s2d")  # the same entry; the bytes are the fields that only collectives have
_SERIAL = struct.Struct("<q")  # the first field of an entry
_MAX_SPLITS = 32
_SPLITS = 8  # word of the header
_HEADER_BYTES = 8 * (_SPLITS + 2 + 2 * _MAX_SPLITS)
_TEXT_BYTES = 12 << 10
_FIRST_ENTRY = _HEADER_BYTES + _TEXT_BYTES
REGION_BYTES = -(-(_FIRST_ENTRY + NUM_CALLS * _ENTRY_BYTES) // 4096) * 4096
"""Size of a rank's memory; the system provides only the pages that are written to."""

_PLACES = tuple(_FIRST_ENTRY + index * _ENTRY_BYTES for index in range(NUM_CALLS))
"""Offsets of the entries."""

_VERSION, _HEAD, _FIRST, _TEXT_LENGTH = range(4)  # words of the header
_MAX_READS = 3

UNCOUNTED = -1
"""The recorded size of a call whose actual size may differ between ranks."""

_NUM_DIMENSIONS = 4
_NO_SHAPE = (0, 0, 0, 0)
_ONLY_NOTED = struct.pack("@6q", 0, UNCOUNTED, *_NO_SHAPE)
_MAX_RANKS_TEXT = 2000  # characters

# Kinds of calls; the first tuple holds the collectives.
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "DistributedDataParallel",
)
POINT_TO_POINT = ("send", "recv")
_CHAINED = frozenset(COLLECTIVES)
BACKWARD, FORWARD, STEP, NEW_GROUP = "backward", "forward", "step", "new_group"
UNEVEN = "uneven"
"""The detail of optimizer steps after uneven inputs were joined, where ranks take different numbers of steps."""


@dataclass(frozen=True)
class Group:
    """A process group.

    Args:
        ranks: ranks of the job, in the order of the group.
        number: number of the process's earlier groups with the same ranks.
        is_default: whether it is the group of the whole job.
    """

    ranks: tuple[int, ...] = ()
    number: int = 0
    is_default: bool = False

    @cached_property
    def digest(self) -> int:
        """A number for the group that is the same in all processes."""
        return zlib.crc32(f"{self.ranks} {self.number} {self.is_default}".encode())


@dataclass(frozen=True)
class Site:
    """The kind and place of a call, which are the same in all iterations of a loop.

    Args:
        kind: one of :data:`COLLECTIVES` or :data:`POINT_TO_POINT`, or :data:`BACKWARD`, :data:`FORWARD`, :data:`STEP`
            or :data:`NEW_GROUP`.
        group: its process group; None if the call has none.
        dtype: data type of the tensors; empty if there are none.
        num_tensors: number of the call's tensors with this shape.
        num_dimensions: number of dimensions of the shape.
        reduction: name of the reduction, such as ``SUM``; empty if the call has none.
        root: the sender's, receiver's or peer's rank in the job; -1 if there is none.
        name: name of the library function that the user's code called.
        filename: file of the user's code; empty if unknown.
        line: line in that file.
        detail: any other property that distinguishes the call.
    """

    kind: str
    group: Group | None = None
    dtype: str = ""
    num_tensors: int = 0
    num_dimensions: int = 0
    reduction: str = ""
    root: int = -1
    name: str = ""
    filename: str = ""
    line: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    Args:
        serial: number among all calls of the rank, from 1.
        site: kind and place.
        number: number in its group, or among calls of its kind if it is not a collective, from 1.
        chain: digest of all collectives of the group up to this one.
        size: number of elements if it must be equal on all ranks; :data:`UNCOUNTED` otherwise.
        shape: shape of the tensor, up to four dimensions.
        time_s: ``monotonic()`` at the call. If the rank is on another machine, only its last call is sure to have the
            rank's own time.
        value: learning rate of a step; 1.0 for a forward pass after which gradients are exchanged.
    """

    serial: int
    site: Site
    number: int
    chain: int
    size: int
    shape: tuple[int, ...]
    time_s: float
    value: float

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of the group must make this call."""
        return self.site.kind in _CHAINED

    @property
    def signature(self) -> tuple[object, ...]:
        """The properties that must be equal on all ranks."""
        site = self.site
        return site.kind, self.size, site.dtype, site.reduction, site.root, site.detail


@dataclass(frozen=True)
class Splits:
    """Rows that the last ``all_to_all`` with unequal parts sends to, and receives from, each rank of the group.

    ``number`` is the number of that call in its group.
    """

    number: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class RankCalls:
    """The last calls of a rank, oldest first; ``num_calls`` counts all its calls.

    ``has_joined`` is False if the rank has never joined a process group with other ranks.
    """

    calls: tuple[Call, ...] = ()
    num_calls: int = 0
    splits: Splits | None = None
    has_joined: bool = True

    @property
    def last(self) -> Call | None:
        """The last call; None if there is none."""
        return self.calls[-1] if self.calls else None


class WrittenSite:
    """A :class:`Site` on the writer's side, made once for many calls.

    Args:
        fields: the arguments of :class:`Site`, in order; the group as returned by :meth:`CallWriter.add_group`, or -1.

    Attributes:
        handle: the group.
        position: position among the texts of the writer's ``version``; -1 before the first call.
    """

    __slots__ = ("fields", "handle", "position", "version")

    def __init__(self, *fields: Any) -> None:
        self.fields = fields
        self.handle: int = fields[1]
        self.position = -1
        self.version = 0


class CallWriter:
    """The writer's side of a rank's region.

    Args:
        memory: :data:`REGION_BYTES` bytes of the board; None = own memory, in a process without a launcher.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._serials = count(1)
        self._version = 0
        self._groups: list[Group] = []
        self._write_to(memory)

    def _write_to(self, memory: memoryview | None) -> None:
        self._memory = memoryview(bytearray(REGION_BYTES)) if memory is None else memory
        self._words = self._memory[:_HEADER_BYTES].cast("q")
        self._begin_anew(1)

    def detach(self) -> None:
        """Write to private memory from now on, in a process that the rank has forked."""
        self._write_to(None)

    def _begin_anew(self, first: int) -> None:
        words = self._words
        words[_VERSION] = self._version = max(self._version, words[_VERSION]) + 1
        words[_TEXT_LENGTH], words[_FIRST] = 0, first
        self._positions: dict[Any, int] = {}  # positions of the texts of sites and groups; never negative
        self._text_length = 0

    def add_group(self, group: Group) -> int:
        """Register a group; return its identifier for sites."""
        self._groups.append(group)
        return len(self._groups) - 1

    def put(
        self,
        site: WrittenSite,
        number: int,
        chain: int = 0,
        size: int = UNCOUNTED,
        shape: tuple[int, int, int, int] = _NO_SHAPE,
        value: float = 0.0,
    ) -> int:
        """Record a call; return its serial number.

        Args:
            site: the kind and place of the call.
            number: as in :class:`Call`.
            chain: as in :class:`Call`.
            size: as in :class:`Call`.
            shape: as in :class:`Call`, padded with zeros.
            value: value of a step or forward pass.
        """
        serial = next(self._serials)
        if site.version != self._version:
            self._place(site, serial)
        _ENTRY.pack_into(
            self._memory, _PLACES[serial % NUM_CALLS],
            serial, site.position, number, chain, size, *shape, monotonic(), value,
        )  # fmt: skip
        self._words[_HEAD] = serial
        return serial

    def notes(self) -> Callable[[WrittenSite, float], None]:
        """Return a function that records calls of one kind; they are not collectives and have no tensors.

        The function takes the kind and place of a call, and its value. It runs at every step, so it does less than
        :meth:`put`. It counts the calls in each group itself.
        """
        numbers: defaultdict[int, int] = defaultdict(int)
        take_serial, pack = self._serials.__next__, _NOTE.pack_into

        def note(site: WrittenSite, value: float) -> None:
            serial = take_serial()
            if site.version != self._version:
                self._place(site, serial)
            numbers[site.handle] = number = numbers[site.handle] + 1
            place = _PLACES[serial % NUM_CALLS]
            pack(self._memory, place, serial, site.position, number, _ONLY_NOTED, monotonic(), value)
            self._words[_HEAD] = serial

        return note

    def withdraw(self, serial: int) -> None:
        """Remove a call that torch has rejected, so that no reader sees it."""
        start = _PLACES[serial % NUM_CALLS]
        if _SERIAL.unpack_from(self._memory, start)[0] == serial:
            _SERIAL.pack_into(self._memory, start, 0)

    def put_splits(self, number: int, sent: Sequence[int], received: Sequence[int]) -> None:
        """Record the parts of the next ``all_to_all``, unless its group is large.

        Args:
            number: number of the call in its group.
            sent: rows for each rank of the group.
            received: rows from each rank of the group.
        """
        size = len(sent)
        if size != len(received) or size > _MAX_SPLITS:
            return
        words = self._words
        words[_SPLITS] = 0  # invalid during the write
        for place, rows in enumerate((*sent, *received), start=_SPLITS + 2):
            words[place] = rows
        words[_SPLITS + 1] = size
        words[_SPLITS] = number

    def _place(self, site: WrittenSite, serial: int) -> None:
        """Set the position of a site, and write the site if its text is new."""
        fields = site.fields
        position = self._positions.get(fields)
        site.position = self._add(fields, serial) if position is None else position
        site.version = self._version

    def _add(self, fields: tuple[Any, ...], serial: int) -> int:
        """Write a site, and its group if the group is new; return the site's position among the texts."""
        handle = fields[1]
        added: dict[Any, str] = {}
        if handle >= 0 and handle not in self._positions:
            added[handle] = _group_line(self._groups[handle])
        place = self._positions.get(handle, len(self._positions)) if handle >= 0 else -1
        added[fields] = json.dumps([fields[0], place, *fields[2:]])
        text = "".join(f"{line}\n" for line in added.values()).encode()
        if self._text_length + len(text) > _TEXT_BYTES:
            if not self._positions:  # the text is longer than the whole region
                return -1
            self._begin_anew(serial)
            return self._add(fields, serial)
        start = _HEADER_BYTES + self._text_length
        self._memory[start : start + len(text)] = text
        for key in added:
            self._positions[key] = len(self._positions)
        self._text_length += len(text)
        self._words[_TEXT_LENGTH] = self._text_length
        return self._positions[fields]


def _group_line(group: Group) -> str:
    """Return a group as text; omit the ranks if they would make the text too long."""
    line = json.dumps([_spans(group.ranks), group.number, group.is_default])
    return line if len(line) <= _MAX_RANKS_TEXT else json.dumps([[], group.number, group.is_default])


def _spans(numbers: tuple[int, ...]) -> list[list[int]]:
    """Return numbers as a list of ``[first, step, count]``, in order."""
    spans: list[list[int]] = []
    for number in numbers:
        last = spans[-1] if spans else None
        if last is not None and (last[2] == 1 or number == last[0] + last[1] * last[2]):
            if last[2] == 1:
                last[1] = number - last[0]
            last[2] += 1
        else:
            spans.append([number, 1, 1])
    return spans


@lru_cache(maxsize=4096)
def _group_of(line: str) -> Group:
    """Return the group that a line describes; ranks with the same group get the same object."""
    spans, number, is_default = json.loads(line)
    return Group(_from_spans(spans), number, is_default)


def _from_spans(spans: list[list[int]]) -> tuple[int, ...]:
    return tuple(first + step * index for first, step, length in spans for index in range(length))


class CallReader:
    """The reader's side of a rank's region; caches the texts that it has read."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[:_HEADER_BYTES].cast("q")
        self._version = self._length = 0
        self._sites: list[Site | Group] = []

    @property
    def num_calls(self) -> int:
        """Number of calls that the rank has made; cheap to read."""
        return self._words[_HEAD]

    def digests(self, limit: int) -> dict[tuple[int, int], float]:
        """Return a digest for each of the last calls, for a quick check of whether ranks differ.

        Digests of different ranks under the same key must be equal. Keys are the same in all processes.

        Args:
            limit: number of calls to read.
        """
        words = self._words
        version, head, first = words[_VERSION], words[_HEAD], words[_FIRST]
        digests: dict[tuple[int, int], float] = {}
        self._read_texts(version)
        for wanted in range(max(first, head - min(limit, NUM_CALLS - 1) + 1, 1), head + 1):
            entry = _ENTRY.unpack_from(self._memory, _PLACES[wanted % NUM_CALLS])
            site = self._sites[entry[1]] if 0 <= entry[1] < len(self._sites) else None
            if entry[0] == wanted and isinstance(site, Site) and site.group is not None:
                if site.kind in _CHAINED:
                    digests[site.group.digest, entry[2]] = entry[3]
                elif site.kind == STEP:
                    digests[site.group.digest, -entry[2]] = entry[-1]
        return digests if words[_VERSION] == version else {}

    def read(self) -> RankCalls:
        """Read the last calls; return no calls if recording starts over during every attempt."""
        words = self._words
        for _ in range(_MAX_READS):
            version, head, first = words[_VERSION], words[_HEAD], words[_FIRST]
            if head == 0:
                return RankCalls(has_joined=version > 0)
            data = bytes(self._memory[_FIRST_ENTRY : _FIRST_ENTRY + NUM_CALLS * _ENTRY_BYTES])
            self._read_texts(version)
            head_after = words[_HEAD]
            if words[_VERSION] == version:
                # The entry after the head may be half-written.
                oldest = max(first, head_after - NUM_CALLS + 2, 1)
                return RankCalls(self._calls(data, range(oldest, head + 1)), head, self._splits())
        return RankCalls(num_calls=words[_HEAD])

    def _splits(self) -> Splits | None:
        words = self._words
        number, size = words[_SPLITS], words[_SPLITS + 1]
        rows = tuple(words[_SPLITS + 2 : _SPLITS + 2 + 2 * size])
        if not number or words[_SPLITS] != number:
            return None
        return Splits(number, rows[:size], rows[size:])

    def _read_texts(self, version: int) -> None:
        if version != self._version:
            self._version, self._length, self._sites = version, 0, []
        length = self._words[_TEXT_LENGTH]
        new = bytes(self._memory[_HEADER_BYTES + self._length : _HEADER_BYTES + length])
        self._length = max(length, self._length)
        for line in new.decode(errors="replace").splitlines():
            self._sites.append(self._parse(line))

    def _parse(self, line: str) -> Site | Group:
        try:
            values = json.loads(line)
            if isinstance(values[0], list):
                return _group_of(line)
            group = self._sites[values[1]] if values[1] >= 0 else None
            return Site(values[0], group if isinstance(group, Group) else None, *values[2:])
        except (ValueError, IndexError, TypeError):  # the rank has dropped its texts and started over
            return Site("")

    def _calls(self, data: bytes, serials: range) -> tuple[Call, ...]:
        calls = []
        for wanted in serials:
            serial, index, number, chain, size, *shape, time_s, value = _ENTRY.unpack_from(
                data, wanted % NUM_CALLS * _ENTRY_BYTES
            )
            site = self._sites[index] if 0 <= index < len(self._sites) else None
            if serial == wanted and isinstance(site, Site):
                dimensions = tuple(shape[: min(site.num_dimensions, _NUM_DIMENSIONS)])
                calls.append(Call(serial, site, number, chain, size, dimensions, time_s, value))
        return tuple(calls)

    def release(self) -> None:
        """Release the memory."""
        self._words.release()
        self._memory.release()

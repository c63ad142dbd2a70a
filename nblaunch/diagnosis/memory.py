"""Evidence that host memory ran out: the host's memory, the control group's counters, and the workers' memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch import formatting
from nblaunch.host import proc
from nblaunch.host.memory import limit_and_available
from nblaunch.wire.board import SlotReading

_SCARCE_SHARE = 0.05
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|std::bad_alloc|MemoryError",
    re.I,
)
_KILLED_CHILD = re.compile(
    r"is killed by signal|\) exited unexpectedly|terminated abruptly|unexpectedly terminated|"
    r"died with <Signals\.SIGKILL"
)
"""Messages from torch's DataLoader, ``concurrent.futures``, joblib and ``subprocess`` about a killed process."""


@dataclass(frozen=True)
class MemoryFacts:
    """Host memory at one moment, in bytes.

    Args:
        available: bytes that can still be allocated within the tightest limit; None if unknown.
        limit: the control group's limit, or the host's memory if the group has none; None if unknown.
        oom_kills: number of processes in this control group that Linux's OOM killer has killed so far.
        shm_used: used bytes in /dev/shm.
        shm_size: size of /dev/shm.
    """

    available: int | None
    limit: int | None
    oom_kills: int
    shm_used: int
    shm_size: int


def read_facts() -> MemoryFacts:
    """Return the current facts, read from a few small files."""
    limit, available = limit_and_available()
    shm_used, shm_size = _shm()
    return MemoryFacts(available, limit, _oom_kills(), shm_used, shm_size)


@dataclass
class MemoryRecord:
    """The host's memory during one attempt, in bytes.

    Args:
        before: facts at the start.
        lowest_available: minimum of the available memory; None if unknown.
    """

    before: MemoryFacts = field(default_factory=read_facts)
    lowest_available: int | None = None

    def update(self) -> None:
        """Record the memory that is available now."""
        available = read_facts().available
        if available is not None:
            lowest = self.lowest_available
            self.lowest_available = available if lowest is None else min(available, lowest)


def judge(
    record: MemoryRecord,
    peaks: Mapping[int, int],
    readings: Sequence[SlotReading],
    *,
    is_killed: bool,
    message: str = "",
) -> list[str]:
    """Return evidence that a lack of memory caused a failure, as lines of text; empty if there is none.

    The system counts kills in the whole container, where other kernels may run. The count is therefore evidence only if
    a process was killed, or if an error mentions the death of a process.

    Args:
        record: memory during the attempt that has just ended.
        peaks: rank -> peak memory of its process.
        readings: last readings of the board.
        is_killed: the process died by SIGKILL, SIGSEGV or SIGBUS.
        message: message of the exception, if there was one.
    """
    before, lowest = record.before, record.lowest_available
    kills = read_facts().oom_kills - before.oom_kills
    allocation_failed = bool(_OUT_OF_MEMORY.search(message))
    is_scarce = lowest is not None and before.limit is not None and lowest < _SCARCE_SHARE * before.limit
    if kills > 0 and (is_killed or allocation_failed or _KILLED_CHILD.search(message)):
        first = f"Memory ran out: the system killed {formatting.count(kills, 'process')} of this job."
    elif allocation_failed:
        first = "Memory ran out: an allocation failed."
    elif is_killed and is_scarce:
        first = "Memory probably ran out: almost none was left at that time."
    else:
        return []
    host = _host_line(before, lowest)
    return [first, host, *_worker_lines(peaks), _advice(readings, before)]


def _host_line(before: MemoryFacts, lowest: int | None) -> str:
    parts = [f"limit {formatting.size(before.limit)}" if before.limit else ""]
    parts.append(
        f"available at the start {formatting.size(before.available)}" if before.available is not None else ""
    )
    if lowest is not None:
        parts.append(f"at the lowest {formatting.size(min(lowest, before.available or lowest))}")
    return "Host memory: " + ", ".join(part for part in parts if part) + "."


def _worker_lines(peaks: Mapping[int, int]) -> list[str]:
    """Return the memory of each process, in one line."""
    if not peaks:
        return []
    texts = [f"rank {rank} {formatting.size(taken)}" for rank, taken in sorted(peaks.items())]
    return [f"Peak memory of each process: {formatting.first(texts, 8)}."]


def _advice(readings: Sequence[SlotReading], before: MemoryFacts) -> str:
    built = [reading.built_bytes for reading in readings if reading.built_bytes > 1 << 20]
    if built:
        each = formatting.size(max(built))
        host = f" on a host with {formatting.size(before.limit)}" if before.limit else ""
        return (
            f"{len(built)} process{'es each' if len(built) > 1 else ''} built a model of {each}{host}: "
            "build it once in a cell and pass it as in notebook_launcher(train, (model,)), so that it is in "
            "memory only once."
        )
    return (
        "Use fewer processes, a smaller batch, fewer data loader workers (num_workers), or a smaller model."
    )


def shm_line(facts: MemoryFacts) -> str:
    """Return a line about /dev/shm if it is nearly full; an empty string if it is not."""
    if facts.shm_size and facts.shm_used > 0.9 * facts.shm_size:
        used = f"{formatting.size(facts.shm_used)} of {formatting.size(facts.shm_size)}"
        return (
            f"/dev/shm is full ({used}): data loaders and collectives put their buffers there. Use fewer data loader "
            "workers, or a container with a larger --shm-size."
        )
    return ""


def _oom_kills() -> int:
    """Return the number of processes in this control group that the OOM killer has killed.

    Source: cgroup-v2 ("memory.events", oom_kill) and cgroup-v1 memory ("memory.oom_control", oom_kill).
    """
    for folder in proc.cgroup_folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            for line in proc.read(folder / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _shm() -> tuple[int, int]:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return (status.f_blocks - status.f_bavail) * status.f_frsize, status.f_blocks * status.f_frsize

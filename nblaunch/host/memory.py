"""Host memory: what a process uses, how its allocator returns memory, and how much is still available.

When a model moves from the host to a device, private copies of its parameters are made. glibc allocates these copies on
its heap and keeps the heap, so eight workers would end up with eight models' worth of unused host memory.
:func:`tune_allocator` makes glibc take large blocks directly from the system, which gets them back when they are freed;
:func:`trim` returns the rest. Both do nothing if another allocator is preloaded.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nblaunch.host import proc

_M_MMAP_THRESHOLD = -3  # source: mallopt(3), <malloc.h>
_LARGE_BLOCK_BYTES = 1 << 20


def tune_allocator() -> bool:
    """Make the allocator return blocks of 1 MiB and more to the system when they are freed; return whether that worked.

    Setting the threshold also stops glibc from raising it when the first large block is freed.
    """
    try:
        return ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES) == 1
    except (OSError, AttributeError):
        return False


def trim() -> None:
    """Return unused heap memory to the system, if the allocator can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def proportional_bytes(pid: int | str = "self") -> int | None:
    """Return the memory of a process in bytes, with shared pages divided by the number of processes that share them.

    The sum over a kernel and its workers is their total memory. Return None if the system does not report it. Source:
    proc_pid_smaps(5), "Pss" in ``smaps_rollup``.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def is_shared(address: int, num_bytes: int) -> bool:
    """Return whether other processes share this memory, for example after a fork; False if unknown.

    The function checks three pages.

    Source: kernel documentation, admin-guide/mm/pagemap: bit 63 "present", bit 56 "exclusively mapped".
    """
    if num_bytes == 0:
        return False
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for eighths in (1, 4, 7):
                pages.seek((address + num_bytes * eighths // 8) // mmap.PAGESIZE * 8)
                entry = int.from_bytes(pages.read(8), "little")
                if not entry >> 63 & 1 or entry >> 56 & 1:
                    return False
    except OSError:
        return False
    return True


def limit_and_available() -> tuple[int | None, int | None]:
    """Return the tightest limit in bytes (without one, the host's memory), and the memory available within it.

    Either value is None if the system does not report it. The function reads a few small files.
    """
    return within(_host_memory(), proc.cgroup_folders("memory"))


def within(host: Mapping[str, int], folders: Iterable[Path]) -> tuple[int | None, int | None]:
    """Return the limit and the available memory, given the host's memory and its control groups.

    Args:
        host: ``MemTotal`` and ``MemAvailable`` in bytes, if known.
        folders: folders of the control groups that may have limits.

    Source: Linux's documentation, admin-guide/cgroup-v2 ("memory.max") and cgroup-v1/memory ("memory.limit_in_bytes").
    """
    limit, available = host.get("MemTotal"), host.get("MemAvailable")
    for folder in folders:
        bound = _number(folder, "memory.max", "memory.limit_in_bytes")
        if bound is None or limit is None or bound >= limit:
            continue  # the group has no limit; version 1 writes a huge number
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        free = max(0, bound - used + _reclaimable(folder))
        limit, available = bound, min(free, available if available is not None else free)
    return limit, available


def _host_memory() -> dict[str, int]:
    """Return the first values in /proc/meminfo, converted from KiB to bytes. Source: proc_meminfo(5)."""
    values = {}
    for line in proc.read("/proc/meminfo").splitlines()[:5]:
        name, _, value = line.partition(":")
        values[name] = int(value.split()[0]) * 1024
    return values


def _reclaimable(folder: Path) -> int:
    """Return how much page cache the group would release before the system kills a process."""
    values = dict(line.split() for line in proc.read(folder / "memory.stat").splitlines())
    # cgroup v1 reports both values, and its usage includes the groups below this one.
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        text = proc.read(f"{folder}/{name}")  # faster than a Path
        if text.isdigit():
            return int(text)
    return None

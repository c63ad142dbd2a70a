"""How much memory this host can still give to processes of this one's control group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nblaunch.host import cgroup, proc


def limit_and_available() -> tuple[int | None, int | None]:
    """Bytes: the tightest limit, which is the host's memory where there is none, and what can still be had within it.

    None where the system does not tell. Reads a handful of small files.
    """
    return within(_host_memory(), cgroup.folders("memory"))


def within(host: Mapping[str, int], folders: Iterable[Path]) -> tuple[int | None, int | None]:
    """The same by given facts.

    Args:
        host: ``MemTotal`` and ``MemAvailable`` in bytes, as far as they are known.
        folders: of the control groups that may hold limits.

    Source: kernel documentation, admin-guide/cgroup-v2 ("memory.max") and cgroup-v1/memory ("memory.limit_in_bytes").
    """
    limit, available = host.get("MemTotal"), host.get("MemAvailable")
    for folder in folders:
        bound = _number(folder, "memory.max", "memory.limit_in_bytes")
        if bound is None or limit is None or bound >= limit:
            continue  # no limit of its own; version 1 writes that as a huge number
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        free = max(0, bound - used + _reclaimable(folder))
        limit, available = bound, min(free, available if available is not None else free)
    return limit, available


def _host_memory() -> dict[str, int]:
    """Source: proc_meminfo(5); values are in KiB."""
    values = {}
    for line in proc.read(Path("/proc/meminfo")).splitlines()[:5]:
        name, _, value = line.partition(":")
        values[name] = int(value.split()[0]) * 1024
    return values


def _reclaimable(folder: Path) -> int:
    """Page cache that the group would give up before anything is killed."""
    values = dict(line.split() for line in proc.read(folder / "memory.stat").splitlines())
    # Version 1 tells both, and what is in use there counts groups below this one.
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        text = proc.read(folder / name)
        if text.isdigit():
            return int(text)
    return None

"""Reads the state of the system, of running processes and of control groups from ``/proc`` and ``/sys``."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from nblaunch.host import exhaustion

_PART_BYTES = 1 << 16
_STEAL = 8  # index in the first line of /proc/stat
_NUM_FIELDS = 37  # of /proc/PID/stat after the name, up to the last one that is read
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "blocked inside the system"}


def read(path: Path | str) -> str:
    """Return a file's text without its line ending; empty if it can't be read."""
    return read_bytes(path).decode(errors="replace").strip()


def read_bytes(path: Path | str) -> bytes:
    """Return a file's contents; empty if it can't be read, for example because its process has ended."""
    try:
        return _contents(path)
    except OSError:
        return b""


def _contents(path: Path | str) -> bytes:
    fd = os.open(path, os.O_RDONLY)  # not open(), which makes three more system calls
    try:
        parts = [os.read(fd, _PART_BYTES)]
        while parts[-1]:
            parts.append(os.read(fd, _PART_BYTES))
        return b"".join(parts)
    finally:
        os.close(fd)


def open_files(folder: Path) -> list[str]:
    """Return the targets of a process's open descriptors, from its folder ``/proc/N/fd``."""
    targets = []
    beginning = f"{folder}/"
    for name in _names_in(folder):
        try:
            targets.append(os.readlink(beginning + name))
        except OSError:  # closed since; in this process, always the descriptor that listed the folder
            continue
    return targets


class Process(NamedTuple):
    """A process, or one of its threads. Source: proc_pid_stat(5).

    Args:
        pid: process id.
        name: name of its program.
        state: one letter, such as ``R``; ``Z`` and ``X`` mean that it has ended.
        parent: process id of its parent.
        group: its process group.
        posix_session: leader of its POSIX session.
        cpu_s: processor time since its start.
        started: clock ticks from the start of the machine to its start.
        processor: processor that it last ran on.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    posix_session: int
    cpu_s: float
    started: int
    processor: int


def process(pid: int) -> Process | None:
    """Return a process; None if it has ended, or if the system has no ``/proc``."""
    return _parsed(pid, _read(pid, "stat"))


def _parsed(pid: int, stat: str) -> Process | None:
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    if not fields:
        return None
    fields += ["0"] * (_NUM_FIELDS - len(fields))
    return Process(
        pid,
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        posix_session=int(fields[3]),
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        started=int(fields[19]),
        processor=int(fields[36]),
    )


def processes() -> dict[int, Process]:
    """Return all visible processes by pid. Reads one file per process."""
    return {pid: entry for pid in all_pids() if (entry := process(pid)) is not None}


def main_thread_cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process's first thread."""
    thread = _parsed(pid, _read(pid, f"task/{pid}/stat"))
    return None if thread is None else thread.cpu_s


def posix_session_cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Return the processor time of each POSIX session, keyed by the session's leader."""
    seconds = dict.fromkeys(pids, 0.0)
    for entry in processes().values():
        if entry.posix_session in seconds:
            seconds[entry.posix_session] += entry.cpu_s
    return seconds


def descendants(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in processes().values():
        children.setdefault(entry.parent, []).append(entry.pid)
    seen: set[int] = set()
    pending = [pid]
    while pending:
        new = children.get(pending.pop(), ())
        seen.update(new)
        pending.extend(new)
    return seen


def all_pids() -> list[int]:
    """Return the ids of the processes that this process may see."""
    return [int(name) for name in _names_in("/proc") if name.isdigit()]


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine started; 0 if it has ended, or if unknown."""
    return _started(process(pid))


def _started(entry: Process | None) -> int:
    return 0 if entry is None or entry.state in "ZX" else entry.started


def is_running(pid: int, started: int) -> bool:
    """Return whether process ``pid`` is running and was started at ``started`` (:func:`start_ticks`; 0 = unknown).

    While this process has no free descriptor, the other process is assumed to be running.
    """
    if started:
        try:
            stat = _contents(f"/proc/{pid}/stat")
        except OSError as error:
            return exhaustion.is_exhausted(error)
        return _started(_parsed(pid, stat.decode(errors="replace"))) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


def boot_time_s() -> float:
    """Return when the machine started, as a ``time.time()`` value; 0.0 if unknown. Source: proc_stat(5), btime."""
    for line in read("/proc/stat").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def own_bytes(pid: int) -> int | None:
    """Return the part of a process's resident memory that is backed by neither files nor shared mappings.

    Source: proc_pid_statm(5), resident - shared. This includes pages that a forked worker still shares with the
    kernel, because separating them takes milliseconds.
    """
    fields = _read(pid, "statm").split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE if len(fields) > 2 else None


def unusual_state(pid: int) -> str | None:
    """Return the reason why a process can't respond to a signal; None if it can."""
    entry = process(pid)
    return None if entry is None else _STATES.get(entry.state)


def catches(pid: int, signum: int) -> bool:
    """Return whether the process has its own handler for a signal."""
    return bool(caught_signals(pid) >> (signum - 1) & 1)


def caught_signals(pid: int) -> int:
    """Return a mask of the signals that a process handles; bit 0 is signal 1. Source: proc_pid_status(5), SigCgt."""
    for line in _read(pid, "status").splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return int(mask, 16)
    return 0


def _read(pid: int, name: str) -> str:
    return read(f"/proc/{pid}/{name}")


CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, root: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> list[Path]:
    """Return the folders that may hold ``controller``'s files for this process: its group's, then the parent groups'.

    Source: cgroups(7), "/proc files". Inside a container the path is the host's, but the files are at the root, so
    the root of each hierarchy is always included.
    """
    return list(_cgroup_folders(controller, root, read(own_groups)))


@lru_cache(maxsize=16)
def _cgroup_folders(controller: str, root: Path, groups: str) -> tuple[Path, ...]:
    folders: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(base)), base]
    return tuple(dict.fromkeys(folders))


@dataclass(frozen=True)
class ThreadTimes:
    """Seconds that a thread has spent running, and waiting for a processor, since it started."""

    run_s: float = 0.0
    wait_s: float = 0.0


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """Return the times of each thread; empty if the system does not report them. Source:
    Documentation/scheduler/sched-stats.
    """
    times = {}
    for name in _names_in(f"/proc/{pid}/task"):
        fields = _read(pid, f"task/{name}/schedstat").split()
        if len(fields) >= 2:
            times[int(name)] = ThreadTimes(int(fields[0]) / 1e9, int(fields[1]) / 1e9)
    return times


def allowed_processors(pid: int) -> set[int]:
    """Return the processors that a process may run on; empty if unknown."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            return os.sched_getaffinity(pid)
    return set()


def stolen_seconds() -> float:
    """Return the processor time that this virtual machine's host has withheld from it. Source: proc_stat(5)."""
    fields = read("/proc/stat").partition("\n")[0].split()
    return int(fields[_STEAL]) / os.sysconf("SC_CLK_TCK") if len(fields) > _STEAL else 0.0


def throttled_seconds() -> float:
    """Return how long this process's control groups were throttled by their limit on processor time."""
    for folder in cgroup_folders("cpu"):
        for line in read(folder / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time") and int(value):
                return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return 0.0


def _names_in(folder: Path | str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # its process has ended, or belongs to another user, or there is no /proc
        return []

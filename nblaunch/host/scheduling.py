"""Measures how processes share this machine's processors: times of threads, processes per processor. Linux only."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nblaunch.host import proc

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_STEAL = 8  # index in the first line of /proc/stat
_PROCESSOR = 36  # field of /proc/PID/stat after the name; see proc_pid_stat(5)


@dataclass(frozen=True)
class ThreadTimes:
    """Seconds that a thread has run, and has waited for a processor, since its start."""

    run_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class ProcessUse:
    """A process on the machine.

    Args:
        pid: process id.
        name: name of its program.
        posix_session: leader of its POSIX session.
        processor: processor on which it last ran.
        cpu_s: processor time since its start.
    """

    pid: int
    name: str
    posix_session: int
    processor: int
    cpu_s: float


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """Return the times of each thread; empty if the system does not report them. Source:
    Documentation/scheduler/sched-stats.
    """
    times = {}
    for name in _names_in(Path(f"/proc/{pid}/task")):
        fields = proc.read(f"/proc/{pid}/task/{name}/schedstat").split()
        if len(fields) >= 2:
            times[int(name)] = ThreadTimes(int(fields[0]) / 1e9, int(fields[1]) / 1e9)
    return times


def processes() -> dict[int, ProcessUse]:
    """Return all visible processes by pid. Reads one file per process."""
    uses = {}
    for name in _names_in(Path("/proc")):
        if not name.isdigit():
            continue
        head, _, rest = proc.read(f"/proc/{name}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) > _PROCESSOR:
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
            title = head.partition("(")[2]
            uses[int(name)] = ProcessUse(int(name), title, int(fields[3]), int(fields[_PROCESSOR]), cpu_s)
    return uses


def allowed_processors(pid: int) -> set[int]:
    """Return the processors on which a process may run; empty if unknown."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            return os.sched_getaffinity(pid)
    return set()


def stolen_seconds() -> float:
    """Return the processor time that this virtual machine's host has given to others. Source: proc_stat(5)."""
    fields = proc.read("/proc/stat").partition("\n")[0].split()
    return int(fields[_STEAL]) / _TICKS_A_SECOND if len(fields) > _STEAL else 0.0


def throttled_seconds() -> float:
    """Return how long this process's control groups were throttled by their limit of processor time."""
    for folder in proc.cgroup_folders("cpu"):
        for line in proc.read(folder / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time") and int(value):
                return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return 0.0


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the process has ended, or there is no /proc
        return []

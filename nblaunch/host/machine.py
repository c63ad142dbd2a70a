"""Identifies this machine, and finds out whether a marked process runs here, has ended, or runs elsewhere.

    process ── ProcessMark.own() ──> a file, perhaps on a disk that machines share
    later, any process ── mark.state(...) ──> it runs | has ended | the machine was restarted | it is elsewhere

A machine's name can change (for example, when a laptop joins another network), and containers on one kernel have their
own names. nblaunch therefore identifies a machine by ``/etc/machine-id``, its running kernel by the boot id, and the
set of visible processes by their namespace. The name is for display; it identifies a machine only if the file is
missing.
"""

from __future__ import annotations

import enum
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nblaunch.host import exhaustion, proc

_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_PATIENCE_S = 10.0
_CLOCK_SLACK_S = 60.0
"""Maximum difference in seconds between the clocks of two machines that share a disk."""


class ProcessState(enum.Enum):
    """The state of the process that a :class:`ProcessMark` identifies."""

    RUNS = "runs"
    ENDED = "has ended"
    RESTARTED = "ended when this machine restarted"
    HIDDEN = "is in another container on this machine"
    ELSEWHERE = "is on another machine"


@dataclass(frozen=True)
class Machine:
    """A machine from one boot to the next, as seen by one of its processes.

    Args:
        id: id of the installation; the machine's name if there is none.
        boot_id: id of the current run of its kernel, which containers share; empty if there is none.
        pid_namespace: namespace of the visible processes; empty if unknown.
        name: name for display.
    """

    id: str
    boot_id: str
    pid_namespace: str
    name: str


@dataclass(frozen=True)
class ProcessMark:
    """One process on one machine, distinct from later processes with the same process id.

    Args:
        pid: process id.
        started: clock ticks from the start of the machine to the start of the process; 0 if unknown.
        machine: the machine that it runs on.
    """

    pid: int
    started: int
    machine: Machine

    @classmethod
    def own(cls) -> ProcessMark:
        """Return the mark of this process."""
        return cls(os.getpid(), proc.start_ticks(os.getpid()), this_machine())

    def state(self, written_s: float) -> ProcessState:
        """Return the state of the process.

        Args:
            written_s: ``time.time()`` of the last write, taken from a file's modification time. Cloned machines share
                an id; if the file was written after this machine started, another machine wrote it.
        """
        here = this_machine()
        if self.machine.boot_id == here.boot_id and (here.boot_id or self.machine.id == here.id):
            if self.machine.pid_namespace != here.pid_namespace:
                return ProcessState.HIDDEN
            return ProcessState.RUNS if proc.is_running(self.pid, self.started) else ProcessState.ENDED
        if self.machine.id == here.id and written_s < proc.boot_time_s() + _CLOCK_SLACK_S:
            return ProcessState.RESTARTED
        return ProcessState.ELSEWHERE


def this_machine() -> Machine:
    """Return the machine that this process is running on."""
    name = socket.gethostname()
    installed, boot_id, namespace = _lasting_ids(os.getpid())
    return Machine(installed or name, boot_id, namespace, name)


@cache
def _lasting_ids(pid: int) -> tuple[str, str, str]:
    """Return the ids in :class:`Machine` that stay the same while this process (``pid``) is running.

    Raises:
        OSError: this process had no free descriptor for ten seconds; without ids, its jobs would seem to run elsewhere.
    """
    installed = next(filter(None, map(_read, _MACHINE_IDS)), "")
    try:
        namespace = str(_PID_NAMESPACE.stat().st_ino)
    except OSError:  # no /proc
        namespace = ""
    return installed, _read(_BOOT_ID), namespace


def _read(path: Path) -> str:
    """Return a file's text without its line ending; empty if the system has no such file."""
    try:
        return exhaustion.when_free(path.read_text, _PATIENCE_S).strip()
    except OSError as error:
        if exhaustion.is_exhausted(error):
            raise
        return ""

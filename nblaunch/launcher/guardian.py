"""A process that ends the workers when the kernel dies.

    kernel ── pipe that only the kernel holds open ──> guardian (/bin/sh, own POSIX session)
                                    a line: one more group to watch, or one fewer (with a minus)
                                    end of file: SIGKILL to every worker's process group, and to every process
                                    with the job's tag (host/descendants.py); a line in the log

Workers, and children that they fork, ask the system to kill them with their parent. Commands, spawned processes
and their children do not. The guardian is a shell, not a Python process, so it needs almost no memory. Starting it
takes a few milliseconds, so it starts after the workers, and short jobs end before it starts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from nblaunch import env
from nblaunch.host import descriptors

_SCRIPT = (
    'tag=$1; log=$2; line_of_log=$3; shift 3; groups="$*"; while read -r line; do case "$line" in '
    '-*) rest=""; for group in $groups; do [ "-$group" = "$line" ] || rest="$rest $group"; done; groups="$rest";; '
    '*) groups="$groups $line";; esac; done; '
    # "-s KILL": dash takes no "--" after "-KILL".
    'for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done; '
    '[ -z "$log" ] || printf "\\n%s\\n" "$line_of_log" >> "$log" 2>/dev/null; '
    # Repeat this, because a killed process may have started another.
    'for round in 1 2 3; do for file in $(grep -ls "$tag" /proc/[0-9]*/limits); do '
    'pid="${file#/proc/}"; kill -s KILL "${pid%/limits}" 2>/dev/null; done; done'
)

_KILLED = (
    "nblaunch: process {pid}, which launched this job, has ended, so the ranks were killed. Return values and weights "
    "that they had not delivered are lost"
)


class Guardian:
    """Kills processes when this one ends for any reason, from :meth:`start` until :meth:`dismiss`.

    Args:
        process_groups: process groups of the workers.
        tag: tag of their descendants.
        log: file for a line that the guardian appends when it kills; None = no file.
    """

    def __init__(self, process_groups: Iterable[int], tag: int, log: Path | None = None) -> None:
        self._tag = tag
        self._log = log
        self._groups = set(process_groups)
        self._process: subprocess.Popen[bytes] | None = None
        self._writing = -1

    @property
    def is_started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._process is not None

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: a process or a pipe could not be created.
        """
        with descriptors.forks_held_back():
            reading, self._writing = os.pipe()
            descriptors.keep_from_children(self._writing)
            try:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _SCRIPT, "nblaunch-guardian", *self._arguments()],
                    stdin=reading,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                    env=env.split_by_size(env.snapshot())[0],  # PATH is all that it needs
                )
            except OSError:
                descriptors.close(self._writing)
                raise
            finally:
                os.close(reading)

    def _arguments(self) -> list[str]:
        log = "" if self._log is None else str(self._log)
        return [str(self._tag), log, _KILLED.format(pid=os.getpid()), *map(str, self._groups)]

    def watch_only(self, process_groups: Collection[int]) -> None:
        """Watch only these groups from now on.

        Some groups appear later, such as the groups of a forkserver's workers. A group whose leader was reaped must be
        removed, because the system may reuse its id.
        """
        wanted = set(process_groups)
        lines = [b"-%d\n" % group for group in self._groups - wanted]
        lines += [b"%d\n" % group for group in wanted - self._groups]
        self._groups = wanted
        if lines and self._process is not None:
            # The guardian may have been killed; workers still die with their parent.
            with suppress(BrokenPipeError):
                os.write(self._writing, b"".join(lines))

    def dismiss(self) -> None:
        """End the guardian without killing anything. Called when every worker has ended."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        descriptors.close(self._writing)

"""Control groups of the tests' own, with a limit on memory or on processes. Needs root, and version 1 or 2 of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
# By controller: its hierarchy in version 1 and the file of its limit there, then the file in version 2.
_LIMITS = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}


@dataclass(frozen=True)
class ControlGroup:
    """An empty group; ``folder`` shows it, ``limit`` is the file of its limit."""

    folder: Path
    limit: Path

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))


@contextmanager
def control_group(controller: str) -> Iterator[ControlGroup]:
    """A new group for the block, after which its processes are killed; skips the test where none can be made."""
    first, second = _LIMITS[controller]
    for parent, name in ((_ROOT / controller, first), (_ROOT, second)):
        folder = parent / f"nblaunch-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / name).exists():
                yield ControlGroup(folder, folder / name)
                return
        finally:
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), 9)
            folder.rmdir()
    pytest.skip(f"no control group with a limit on {controller} can be made here")

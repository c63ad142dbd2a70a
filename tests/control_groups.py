"""Control groups for tests, with a limit on memory or on processes. They need root, and cgroups of version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
# Controller -> its hierarchy and limit file in version 1, and its limit file in version 2.
_LIMITS = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}


@dataclass(frozen=True)
class ControlGroup:
    """An empty group: its ``folder``, and the file of its ``limit``."""

    folder: Path
    limit: Path

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))


@contextmanager
def control_group(controller: str) -> Iterator[ControlGroup]:
    """Create a group for the block, and kill its processes afterwards; skip the test if that is impossible."""
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

"""Where the limits of this process's control groups stand, for version 1 and 2 of the hierarchy."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from nblaunch.host import proc

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> list[Path]:
    """Return the folders that may hold ``controller``'s files for this process: its group's, then its parents'.

    Source: cgroups(7), "/proc files". Inside a container the path is the host's while the files lie at the root, so
    the root of each hierarchy is always among them.
    """
    return list(_folders(controller, root, proc.read(own_groups)))


@lru_cache(maxsize=16)
def _folders(controller: str, root: Path, groups: str) -> tuple[Path, ...]:
    found: list[Path] = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        found += [folder, *(parent for parent in folder.parents if parent.is_relative_to(base)), base]
    return tuple(dict.fromkeys(found))

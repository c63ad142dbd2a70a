"""CPU cores, joined by gloo."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nblaunch.backends.base import Backend
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class CpuBackend(Backend):
    """Plain CPU processes. A "device" is a core that this process may use."""

    name = "cpu"
    device_noun = "CPU core"
    process_group = "gloo"
    is_oversubscribable = True

    def affinity(self) -> int:
        return 1

    def unavailable_reason(self) -> str:
        raise AssertionError("a CPU is always there")

    def device_count(self) -> int:
        return usable_cores()

    def fork_hazard(self) -> str | None:
        return None

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        # Accelerate would otherwise make N unconnected processes of N workers on a machine without a GPU.
        changes: dict[str, str | None] = {"ACCELERATE_USE_CPU": "true"}
        if topology.num_nodes == 1:
            # Gloo listens on the address that the host name resolves to; nothing of one machine's job leaves it.
            changes["GLOO_SOCKET_IFNAME"] = _LOOPBACK
        return changes

    def device(self, topology: Topology) -> torch.device:
        import torch

        return torch.device("cpu")

    def supports_precision(self, precision: str) -> str | None:
        if precision == "fp16":
            return "fp16 needs a GPU's gradient scaling; on the CPU use mixed_precision='bf16'"
        return None


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, limited by the quota of its control group; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def cgroup_cpu_quota(root: Path, own_groups: Path) -> float | None:
    """The CPU quota in cores of the control group, or of the tightest of its parents; None where there is none.

    Source: kernel documentation, admin-guide/cgroup-v2 ("cpu.max") and scheduler/sched-bwc ("cpu.cfs_quota_us").
    """
    quotas = []
    for folder in _cgroup_folders(root, own_groups):
        text = _read(folder / "cpu.max").split()
        if len(text) == 2 and text[0] != "max":
            quotas.append(int(text[0]) / int(text[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(root: Path, own_groups: Path) -> list[Path]:
    """This process's group in the unified (v2) and the cpu (v1) hierarchy, with all their parents."""
    folders = []
    for line in _read(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        folder = base / path.lstrip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
        folders.append(base)  # inside a container the path is the host's, while the files lie at the root
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


BACKEND = CpuBackend()

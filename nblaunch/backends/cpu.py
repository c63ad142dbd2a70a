"""CPU cores, connected by gloo."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from nblaunch.backends import first_use
from nblaunch.backends.base import NO_FP8, Backend
from nblaunch.host import proc
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch


class CpuBackend(Backend):
    """CPU processes. A "device" is a core that this process may use."""

    name = "cpu"
    device_noun = "CPU core"
    title = "CPU"
    dist_backend = "gloo"
    is_oversubscribable = True

    def affinity(self) -> int:
        return 2  # 1 is for families that compute on the CPU only at the user's request

    def unavailable_reason(self) -> str:
        raise AssertionError("a CPU is always available")

    def device_count(self) -> int:
        return usable_cores()

    def fork_hazard(self) -> str | None:
        # Accelerate looks for torch_xla when Accelerate itself is imported, and only then.
        if getattr(sys.modules.get("accelerate.utils.imports"), "_torch_xla_available", False):
            return "Hugging Face Accelerate was imported in this process and uses torch_xla as its device"
        runtime = first_use.gpu_in_use()
        if runtime is not None:
            return (
                f"this process has used {runtime}, which backward() and optimizers need, and which does not work "
                "in a forked process"
            )
        return None

    def first_use(self) -> tuple[tuple[str, int, str], ...]:
        return first_use.gpu_first_use()

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        # Without this, Accelerate would turn N workers on a machine without a GPU into N unconnected processes.
        return {
            **super().worker_env(topology),
            "ACCELERATE_USE_CPU": "true",
            "USE_TORCH_XLA": "false",  # an installed torch_xla takes precedence in Accelerate and transformers
        }

    def device(self, topology: Topology) -> torch.device:
        import torch

        return torch.device("cpu")

    def precision_problem(self, precision: str) -> str | None:
        if precision == "fp16":
            return "fp16 needs a GPU, so the CPU computes in full precision; mixed_precision='bf16' works on CPUs"
        if precision == "fp8":
            return NO_FP8
        return None

    def computes_in_full(self, precision: str) -> bool:
        return precision == "fp16"  # as in Accelerate, so that a script for GPUs runs unchanged


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity mask, limited by its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _own_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


@cache
def _own_quota() -> float | None:
    """Read the quota once per process: reading the control groups' files takes a third of a millisecond."""
    return cpu_quota(proc.cgroup_folders("cpu"))


def cpu_quota(folders: Iterable[Path]) -> float | None:
    """Return the CPU quota, in cores, of the tightest control group among ``folders``; None if there is none.

    Source: Linux's documentation, admin-guide/cgroup-v2 ("cpu.max") and scheduler/sched-bwc ("cpu.cfs_quota_us").
    """
    quotas = []
    for folder in folders:
        text = proc.read(folder / "cpu.max").split()
        if len(text) == 2 and text[0] != "max":
            quotas.append(int(text[0]) / int(text[1]))
        if text:
            continue
        quota, period = (proc.read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


BACKEND = CpuBackend()

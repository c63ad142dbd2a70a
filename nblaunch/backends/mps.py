"""The GPU of a Mac with Apple silicon: torch's device ``mps``, through Metal, for one process. Ranks can't share it.

The worker is a fresh interpreter (spawn), like every worker on macOS: Metal and other system libraries do not work in
a fork of a process that has used them. This code has not run on a Mac yet.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nblaunch.backends.base import NO_FP8, Backend
from nblaunch.packages import release
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch


class MpsBackend(Backend):
    """One process on a Mac's GPU."""

    name = "mps"
    title = "Apple GPU"
    device_noun = "Apple GPU"
    dist_backend = "gloo"  # for a single rank; torch has no collectives across ranks here
    is_oversubscribable = False
    exchanges_on_host = True

    def affinity(self) -> int:
        return 10 if self.device_count() else 0

    def unavailable_reason(self) -> str:
        if not self.is_present():
            return "it is for Macs with Apple silicon (M1 and later)"
        import torch

        if not torch.backends.mps.is_built():
            return "the installed torch was built without MPS; `pip install torch` installs a build with MPS"
        return (
            "torch finds no Metal device; torch needs macOS 14, and a virtual machine may lack a Metal device"
        )

    def device_count(self) -> int:
        if not self.is_present():
            return 0
        import torch

        return int(torch.backends.mps.is_available())

    def is_present(self) -> bool:
        return sys.platform == "darwin" and platform.machine() == "arm64"

    def fork_hazard(self) -> str | None:
        if not self.is_present() or "torch" not in sys.modules:
            return None
        import torch

        if torch.mps.current_allocated_memory() == 0:
            return None
        return "this process has tensors on the GPU, and Metal can't be used in a fork of this process"

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        # Fall back to the CPU for operations that Metal lacks, as Accelerate does.
        return {**super().worker_env(topology), "PYTORCH_ENABLE_MPS_FALLBACK": "1"}

    def device(self, topology: Topology) -> torch.device:
        import torch

        return torch.device("mps")

    def precision_problem(self, precision: str) -> str | None:
        if precision == "fp8":
            return NO_FP8
        needed = {"fp16": "2.8", "bf16": "2.6"}.get(precision)  # fp16 for gradient scaling, bf16 for autocast
        torch: Any = sys.modules.get("torch")
        if needed is None or torch is None or release(torch.__version__)[:2] >= release(needed):
            return None
        return f"{precision} on Apple's GPUs needs torch {needed} or newer"

    def rng_state(self) -> Mapping[str, Any]:
        import torch

        return {"mps": torch.mps.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.mps.set_rng_state(state["mps"])

    def empty_cache(self) -> None:
        if "torch" in sys.modules:
            import torch

            torch.mps.empty_cache()


BACKEND = MpsBackend()

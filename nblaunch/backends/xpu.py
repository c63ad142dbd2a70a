"""Intel GPUs: torch's device ``xpu``, connected by XCCL.

``host/gpus.py`` reads the machine from files below /sys. This code has not run on a GPU yet. Workers start from a clean
process, because a fork of a kernel with SYCL's libraries has not been tested.
"""

from __future__ import annotations

from nblaunch.backends import first_use
from nblaunch.backends.gpu import GpuBackend
from nblaunch.host import gpus


class XpuBackend(GpuBackend):
    """One process per Intel GPU."""

    name = "xpu"
    title = "Intel GPUs"
    device_noun = "Intel GPU"
    dist_backend = "xccl"
    distributed_type = "MULTI_XPU"
    runtime = first_use.LEVEL_ZERO

    def affinity(self) -> int:
        # If there is also an NVIDIA or AMD GPU, an Intel GPU is probably integrated into the processor.
        return min(super().affinity(), 9)

    def build_problem(self) -> str | None:
        import torch

        if torch.xpu._is_compiled():
            return None
        return "the installed torch was built without XPU; install an XPU build from https://pytorch.org"

    def unavailable_reason(self) -> str:
        num_physical = gpus.num_intel_gpus()
        if not num_physical:
            return "the system lists no Intel GPU in /sys/class/drm; does the container have it (--device=/dev/dri)?"
        if not self.device_count():
            return f"ZE_AFFINITY_MASK or ONEAPI_DEVICE_SELECTOR hides all {num_physical} GPUs"
        return self.build_problem() or ""

    def overlooked(self) -> str | None:
        return None  # nearly every Intel processor has a GPU, but few users want to train on it

    def device_count(self) -> int:
        return gpus.num_visible_intel_gpus()

    def is_present(self) -> bool:
        return gpus.num_intel_gpus() > 0

    def count_problem(self, num_processes: int) -> str | None:
        import torch.distributed as dist

        if num_processes == 1 or dist.is_backend_available(self.dist_backend):
            return None
        # Gloo, which other GPUs could fall back on, does not accept tensors on Intel GPUs.
        return "the installed torch has no XCCL, which connects Intel GPUs; XPU builds of torch 2.8 and newer have it"

    def clean_start_reason(self) -> str | None:
        return "Intel's driver, Level Zero, has not been tested in a fork of a kernel"


BACKEND = XpuBackend()

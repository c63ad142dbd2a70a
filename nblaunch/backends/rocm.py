"""AMD GPUs through ROCm: torch's device ``cuda``, connected by RCCL, which torch calls ``nccl``.

``host/gpus.py`` reads information about the GPUs from files under /sys. This code has not run on a GPU yet. Workers
start from a clean process, because a fork of a kernel with ROCm's libraries has not been tested.
"""

from __future__ import annotations

from nblaunch.backends import first_use
from nblaunch.backends.gpu import GpuBackend
from nblaunch.host import gpus
from nblaunch.host.gpus import DeviceMeter


class RocmBackend(GpuBackend):
    """One process per AMD GPU."""

    name = "rocm"
    title = "AMD GPUs"
    device_noun = "AMD GPU"
    device_type = "cuda"
    dist_backend = "nccl"
    distributed_type = "MULTI_GPU"
    shares_devices = True
    runtime = first_use.ROCM

    def build_problem(self) -> str | None:
        import torch

        if torch.version.hip is not None:
            return None
        return "the installed torch was built without ROCm; install a ROCm build from https://pytorch.org"

    def unavailable_reason(self) -> str:
        num_physical = len(gpus.amd_gpus())
        if not num_physical:
            return (
                "the system lists no AMD compute GPU in /sys/class/kfd; is its driver (amdgpu) loaded, and does "
                "the container have the GPU (--device=/dev/kfd --device=/dev/dri)?"
            )
        if not self.device_count():
            return f"HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES hides all {num_physical} GPUs"
        return self.build_problem() or ""

    def device_count(self) -> int:
        return len(gpus.visible_amd_gpus())

    def is_present(self) -> bool:
        return bool(gpus.amd_gpus())

    def clean_start_reason(self) -> str | None:
        return "ROCm has not been tested in a fork of a kernel"

    def open_meter(self) -> DeviceMeter:
        return gpus.AmdMeter(gpus.visible_amd_gpus())


BACKEND = RocmBackend()

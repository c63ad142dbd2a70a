"""NVIDIA GPUs, connected by NCCL. ``host/gpus.py`` finds the GPUs that workers may use."""

from __future__ import annotations

import sys
from typing import Any

from nblaunch import env
from nblaunch.backends import first_use
from nblaunch.backends.base import NO_FP8
from nblaunch.backends.gpu import GpuBackend
from nblaunch.host import gpus
from nblaunch.host.gpus import DeviceMeter
from nblaunch.packages import is_installed
from nblaunch.topology import Topology

_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of GPUs that multiply matrices of 8-bit floating-point numbers (Ada Lovelace)."""


class CudaBackend(GpuBackend):
    """One process per GPU, or per MIG instance."""

    name = "cuda"
    dist_backend = "nccl"
    distributed_type = "MULTI_GPU"
    compilers = ("inductor", "cudagraphs")
    shares_devices = True
    runtime = first_use.CUDA

    def build_problem(self) -> str | None:
        import torch

        if torch.version.cuda is not None:
            return None
        return "the installed torch was built without CUDA; install a CUDA build from https://pytorch.org"

    def unavailable_reason(self) -> str:
        physical = gpus.physical_gpus()
        if not physical:
            return gpus.uncounted() or "NVML, the driver's library, finds no NVIDIA GPU on this machine"
        if self.device_count() == 0:
            value = env.read("CUDA_VISIBLE_DEVICES")
            if value is None:
                return (
                    "MIG is enabled on the GPUs, but there are no instances: `nvidia-smi mig -lgip` lists the "
                    "profiles, `nvidia-smi mig -cgi PROFILE -C` creates an instance"
                )
            return f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(physical)} GPUs"
        return self.build_problem() or ""

    def overlooked(self) -> str | None:
        return super().overlooked() if self.device_count() else gpus.uncounted()

    def device_count(self) -> int:
        return len(gpus.visible())

    def is_present(self) -> bool:
        return bool(gpus.physical_gpus() or gpus.uncounted())

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        notes = list(super().launch_notes(num_processes))
        if not notes and num_processes > 1 and self._instances():
            notes.append(
                "each worker has its own MIG instance; the workers communicate over gloo through host memory, "
                "because NCCL does not connect instances"
            )
        model = gpus.lacks_p2p()
        if model is not None and num_processes > 1 and env.read("NCCL_P2P_DISABLE") is None:
            notes.append(
                "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are set for the workers: with this driver, direct "
                f"connections between {model} cards hang. Drivers 550.40.07 and later need neither variable"
            )
        return tuple(notes)

    def open_meter(self) -> DeviceMeter:
        return gpus.open_meter()

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        changes = super().worker_env(topology)
        is_set = env.read("NCCL_P2P_DISABLE") is not None
        if topology.local_world_size > 1 and not is_set and gpus.lacks_p2p() is not None:
            changes |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
        instances = self._instances()
        if instances:
            changes["CUDA_VISIBLE_DEVICES"] = instances[topology.local_rank % len(instances)]
        return changes

    def precision_problem(self, precision: str) -> str | None:
        if precision != "fp8":
            return super().precision_problem(precision)
        if not is_installed("torchao"):
            return "fp8 needs torchao, which is not installed: pip install torchao"
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None  # only a worker may ask the GPU
        has_fp8 = torch.cuda.get_device_capability() >= _FP8_CAPABILITY
        return None if has_fp8 else f"{torch.cuda.get_device_name()} does not support fp8; {NO_FP8}"

    def _instances(self) -> list[str]:
        """Return the MIG instances that workers compute on; CUDA shows each process only one of them."""
        return [uuid for uuid in gpus.visible() if uuid.startswith(gpus.INSTANCE)]


BACKEND = CudaBackend()

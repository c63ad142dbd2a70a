"""NVIDIA GPUs, joined by NCCL.

    kernel      counts GPUs and reads their memory through the driver (host/gpus.py); never makes a CUDA context
    worker      device by local rank -> context -> process group (gloo where ranks share a GPU)

Beside it are ``host/gpus.py`` (the machine, and which GPUs a process is shown), ``first_use.py`` (whether a fork is
possible) and ``cuda_errors.py`` (what errors mean).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nblaunch import env
from nblaunch.backends import cuda_errors, first_use, process_group
from nblaunch.backends.base import NO_FP8, Backend
from nblaunch.backends.cpu import LOOPBACK
from nblaunch.host import gpus
from nblaunch.host.meter import DeviceMeter
from nblaunch.packages import is_installed
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

_FP8_CAPABILITY = (8, 9)
"""Least compute capability of a GPU that multiplies matrices of 8-bit floating-point numbers; Ada Lovelace."""


class CudaBackend(Backend):
    """One process per GPU."""

    name = "cuda"
    device_noun = "GPU"
    dist_backend = "nccl"
    distributed_type = "MULTI_GPU"
    compilers = ("inductor", "cudagraphs")
    is_oversubscribable = False
    shares_devices = True

    def __init__(self) -> None:
        self._last_step = cuda_errors.NO_STEP
        self._note: Callable[[str], None] | None = None

    # --- launcher's half -----------------------------------------------------------------------------------------

    def affinity(self) -> int:
        return 10 if self.device_count() > 0 and _is_cuda_build() else 0

    def unavailable_reason(self) -> str:
        physical = gpus.physical_gpus()
        if not physical:
            return gpus.uncounted() or "NVML, the driver's library, finds no NVIDIA GPU on this machine"
        if self.device_count() == 0:
            value = env.read("CUDA_VISIBLE_DEVICES")
            if value is None:
                return (
                    "MIG is enabled on the GPUs, and they have no instances: `nvidia-smi mig -lgip` lists the "
                    "profiles, `nvidia-smi mig -cgi PROFILE -C` makes an instance"
                )
            return f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(physical)} GPUs"
        return "the installed torch was built without CUDA; install a CUDA build from https://pytorch.org"

    def overlooked(self) -> str | None:
        count = self.device_count()
        if not count:
            return gpus.uncounted()
        if _is_cuda_build():
            return None
        return f"{count} GPU{'s are' if count > 1 else ' is'} here, but can't be used: {self.unavailable_reason()}"

    def device_count(self) -> int:
        return len(gpus.visible())

    def is_present(self) -> bool:
        return bool(gpus.physical_gpus() or gpus.uncounted())

    def fork_hazard(self) -> str | None:
        hazard = first_use.cuda_hazard()
        return f"this process {hazard}" if hazard is not None else None

    def first_use(self) -> tuple[tuple[str, int, str], ...]:
        return first_use.cuda_first_use()

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        notes = []
        count = self.device_count()
        if num_processes > count > 0:
            shared = "one GPU" if count == 1 else f"{count} GPUs"
            notes.append(
                f"{num_processes} workers share {shared} and talk by gloo, through host memory: good for trying out, "
                "slower than a worker per GPU"
            )
        model = gpus.lacks_p2p()
        if model is not None and num_processes > 1 and env.read("NCCL_P2P_DISABLE") is None:
            notes.append(
                f"NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 are set for the workers: with this driver, direct "
                f"connections of {model} cards hang. A driver from 550.40.07 on needs neither"
            )
        return tuple(notes)

    def open_meter(self) -> DeviceMeter:
        return gpus.open_meter()

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        changes: dict[str, str | None] = {**process_group.ALL_JOIN_BEFORE_ANY_GOES_ON}
        is_set = env.read("NCCL_P2P_DISABLE") is not None
        if topology.local_world_size > 1 and not is_set and gpus.lacks_p2p() is not None:
            changes |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
        if topology.num_nodes == 1:
            # Rendezvous of one machine's processes only; their data goes through NVLink, PCIe or shared memory.
            changes |= {"NCCL_SOCKET_IFNAME": LOOPBACK, "GLOO_SOCKET_IFNAME": LOOPBACK}
        return changes

    # --- worker's half -------------------------------------------------------------------------------------------

    def device(self, topology: Topology) -> torch.device:
        import torch

        # Before, torch would ask NVML how many there are: that takes a while to start, and counts whole GPUs where CUDA
        # shows one MIG instance.
        torch.cuda.init()
        # More workers than GPUs share them in turn, for tests on small machines.
        device = torch.device("cuda", topology.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        import torch
        import torch.distributed as dist

        # NCCL refuses two ranks on one GPU; gloo does not mind.
        fits = topology.local_world_size <= torch.cuda.device_count()
        dist_backend = self.dist_backend if fits and dist.is_nccl_available() else "gloo"
        process_group.join(dist_backend, topology, timeout_s)

    def precision_refusal(self, precision: str) -> str | None:
        torch: Any = sys.modules.get("torch")
        if precision == "fp8" and not is_installed("torchao"):
            return "fp8 needs torchao, which is not installed: pip install torchao"
        # The launcher asks too, before it forks; torch would make a context to answer. Workers find out by themselves.
        if precision not in ("bf16", "fp8") or torch is None or not torch.cuda.is_initialized():
            return None
        if precision == "fp8":
            has_fp8 = torch.cuda.get_device_capability() >= _FP8_CAPABILITY
            return None if has_fp8 else f"{torch.cuda.get_device_name()} has no fp8; {NO_FP8}"
        if not torch.cuda.is_bf16_supported():
            return f"{torch.cuda.get_device_name()} has no bf16; use mixed_precision='fp16'"
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            self._report_once(
                f"{torch.cuda.get_device_name()} has no bf16 of its own, and torch imitates it, several times slower: "
                "mixed_precision='fp16' is what this GPU is fast at"
            )
        return None

    def set_reporters(
        self,
        *,
        note: Callable[[str], None],
        compiling: Callable[[bool], None],
        fact: Callable[[str, str], None],
    ) -> None:
        self._note = note

    def _report_once(self, text: str) -> None:
        """Send ``text`` once in a process."""
        if self._note is not None:
            self._note(text)
        self._note = None

    def rng_state(self) -> Mapping[str, Any]:
        import torch

        return {"cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.cuda.set_rng_state(state["cuda"])

    def empty_cache(self) -> None:
        torch: Any = sys.modules.get("torch")
        if torch is not None:  # or no GPU can have been used through it
            torch.cuda.empty_cache()

    def begin_step(self, phase: str, batch: Any) -> None:
        self._last_step = cuda_errors.Step(phase, cuda_errors.shapes_of(batch))

    def device_memory(self) -> tuple[int, int, int] | None:
        import torch

        if not torch.cuda.is_initialized():
            return None
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved(), total

    def explain_failure(self, error: BaseException) -> tuple[str, ...]:
        return cuda_errors.explain(error, self._last_step)


def _is_cuda_build() -> bool:
    import torch

    return torch.version.cuda is not None


BACKEND = CudaBackend()

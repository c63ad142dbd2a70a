"""GPUs that torch drives by modules of one shape: ``torch.cuda`` for NVIDIA's and AMD's, ``torch.xpu`` for Intel's.

    kernel      counts GPUs without the driver's runtime; never makes a context
    worker      device by local rank -> context -> process group (gloo where ranks share a GPU)

How the GPUs of a host are found, and which variables choose among them, is each family's own. Beside it are
``first_use.py`` (whether a fork is possible) and ``gpu_errors.py`` (what errors mean).
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nblaunch import formatting
from nblaunch.backends import first_use, gpu_errors, process_group
from nblaunch.backends.base import LOOPBACK, NO_FP8, Backend
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch


class GpuBackend(Backend):
    """One process per GPU."""

    device_noun = "GPU"
    is_oversubscribable = False
    runtime: first_use.GpuRuntime
    """What shows in a process that uses such a GPU."""

    def __init__(self) -> None:
        self._last_step = gpu_errors.NO_STEP
        self._note: Callable[[str], None] | None = None

    # --- launcher's half -----------------------------------------------------------------------------------------

    @abstractmethod
    def build_refusal(self) -> str | None:
        """Return why the installed torch can't compute on such GPUs, and what to install; None where it can."""

    def affinity(self) -> int:
        return 10 if self.device_count() > 0 and self.build_refusal() is None else 0

    def overlooked(self) -> str | None:
        count = self.device_count()
        refusal = self.build_refusal() if count else None
        if refusal is None:
            return None
        verb = "are" if count > 1 else "is"
        return f"{formatting.count(count, self.device_noun)} {verb} here, but can't be used: {refusal}"

    def fork_hazard(self) -> str | None:
        hazard = first_use.gpu_hazard(self.runtime)
        return f"this process {hazard}" if hazard is not None else None

    def first_use(self) -> tuple[tuple[str, int, str], ...]:
        return first_use.gpu_first_use()

    def launch_notes(self, num_processes: int) -> tuple[str, ...]:
        count = self.device_count()
        if not num_processes > count > 0:
            return ()
        shared = "one GPU" if count == 1 else f"{count} GPUs"
        return (
            f"{num_processes} workers share {shared} and talk by gloo, through host memory: good for trying out, "
            "slower than a worker per GPU",
        )

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        changes = super().worker_env(topology)
        if self.dist_backend == "nccl" and topology.num_nodes == 1:
            # Rendezvous of one machine's processes only; their data goes through links of GPUs or shared memory.
            changes["NCCL_SOCKET_IFNAME"] = LOOPBACK
        return changes

    # --- worker's half -------------------------------------------------------------------------------------------

    def device(self, topology: Topology) -> torch.device:
        import torch

        gpu = self._torch_module()
        # Before, torch would ask the driver's library how many there are: that takes a while to start, and counts whole
        # GPUs where CUDA shows one MIG instance.
        gpu.init()
        # More workers than GPUs share them in turn, for tests on small machines.
        device = torch.device(self.device_type, topology.local_rank % max(1, gpu.device_count()))
        gpu.set_device(device)
        return device

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        import torch.distributed as dist

        # NCCL refuses two ranks on one GPU, as it does instances of one; gloo does not mind.
        fits = topology.local_world_size <= self._torch_module().device_count()
        dist_backend = self.dist_backend if fits and dist.is_backend_available(self.dist_backend) else "gloo"
        process_group.join(dist_backend, topology, timeout_s)

    def precision_refusal(self, precision: str) -> str | None:
        if precision == "fp8":
            return NO_FP8
        # The launcher asks too, before it forks; torch would make a context to answer. Workers find out by themselves.
        gpu = self._torch_module() if "torch" in sys.modules else None
        if precision != "bf16" or gpu is None or not gpu.is_initialized():
            return None
        if not gpu.is_bf16_supported():
            return f"{gpu.get_device_name()} has no bf16; use mixed_precision='fp16'"
        if not gpu.is_bf16_supported(including_emulation=False):
            self._report_once(
                f"{gpu.get_device_name()} has no bf16 of its own, and torch imitates it, several times slower: "
                "mixed_precision='fp16' is what this GPU is fast at"
            )
        return None

    def has_bf16(self) -> bool:
        return False  # not known without a context

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
        return {self.device_type: self._torch_module().get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        self._torch_module().set_rng_state(state[self.device_type])

    def empty_cache(self) -> None:
        if "torch" in sys.modules:  # or no GPU can have been used through it
            self._torch_module().empty_cache()

    def begin_step(self, phase: str, batch: Any) -> None:
        self._last_step = gpu_errors.LastStep(phase, gpu_errors.shapes_of(batch))

    def device_memory(self) -> tuple[int, int, int] | None:
        gpu = self._torch_module()
        if not gpu.is_initialized():
            return None
        total = gpu.get_device_properties(gpu.current_device()).total_memory
        return gpu.memory_reserved(), gpu.max_memory_reserved(), total

    def explain_failure(self, error: BaseException) -> tuple[str, ...]:
        return gpu_errors.explain(error, self._last_step)

    def _torch_module(self) -> Any:
        import torch

        return getattr(torch, self.device_type)

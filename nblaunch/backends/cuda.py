"""NVIDIA GPUs, joined by NCCL."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nblaunch import env
from nblaunch.backends import autograd_probe, process_group
from nblaunch.backends.base import Backend
from nblaunch.topology import Topology

if TYPE_CHECKING:
    import torch

_SMI_TIMEOUT_S = 30.0
_WSL_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # where the Windows driver puts it, outside of PATH
_UVM_DEVICE = "/dev/nvidia-uvm"
_GPU_LINE = re.compile(r"^GPU \d+:.*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (?P<uuid>MIG-[^)]+)\)")


@dataclass(frozen=True)
class Gpu:
    """One GPU of this host: its UUID, and those of the MIG instances it is partitioned into."""

    uuid: str
    mig_uuids: tuple[str, ...] = field(default=())


class CudaBackend(Backend):
    """One process per GPU."""

    name = "cuda"
    device_noun = "GPU"
    process_group = "nccl"
    is_oversubscribable = False

    # --- launcher's half -----------------------------------------------------------------------------------------

    def affinity(self) -> int:
        return 10 if self.device_count() > 0 and _is_cuda_build() else 0

    def unavailable_reason(self) -> str:
        if not physical_gpus():
            return "neither NVML nor nvidia-smi finds an NVIDIA GPU on this machine"
        if self.device_count() == 0:
            value = env.read("CUDA_VISIBLE_DEVICES")
            return f"CUDA_VISIBLE_DEVICES={value!r} hides all {len(physical_gpus())} GPUs"
        return "the installed torch was built without CUDA; install a CUDA build from https://pytorch.org"

    def device_count(self) -> int:
        return len(visible_devices(physical_gpus(), env.read("CUDA_VISIBLE_DEVICES")))

    def fork_hazard(self) -> str | None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "this process has used CUDA through torch, and CUDA can't be used in a forked copy of it"
        if has_open_device(Path("/proc/self/fd")):
            return f"a library of this process has used CUDA ({_UVM_DEVICE} is open), and a forked copy can't"
        failure = autograd_probe.fork_failure()
        if failure is not None:
            return f"backward() ran in this process, and would fail in every forked worker ({failure})"
        return None

    def worker_env(self, topology: Topology) -> dict[str, str | None]:
        if topology.num_nodes > 1:
            return {}
        # Rendezvous of one machine's processes only; their data goes through NVLink, PCIe or shared memory.
        return {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}

    # --- worker's half -------------------------------------------------------------------------------------------

    def device(self, topology: Topology) -> torch.device:
        import torch

        # More workers than GPUs share them in turn, for tests on small machines.
        device = torch.device("cuda", topology.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device

    def join(self, topology: Topology, device: torch.device, timeout_s: float | None = None) -> None:
        import torch
        import torch.distributed as dist

        # NCCL refuses two ranks on one GPU; gloo does not mind.
        fits = topology.local_world_size <= torch.cuda.device_count()
        group = self.process_group if fits and dist.is_nccl_available() else "gloo"
        process_group.join(group, topology, timeout_s)

    def supports_precision(self, precision: str) -> str | None:
        import torch

        if precision == "bf16" and not torch.cuda.is_bf16_supported():
            return f"{torch.cuda.get_device_name()} has no bf16; use mixed_precision='fp16'"
        return None

    def rng_state(self) -> Mapping[str, Any]:
        import torch

        return {"cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        import torch

        torch.cuda.set_rng_state(state["cuda"])

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()


# --- counting GPUs without a CUDA context ----------------------------------------------------------------------------


def physical_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this host in the driver's order, whatever CUDA_VISIBLE_DEVICES says. Asked once per process."""
    program = shutil.which("nvidia-smi") or (_WSL_SMI if os.path.exists(_WSL_SMI) else None)
    return _query_gpus(program)


@cache
def _query_gpus(smi: str | None) -> tuple[Gpu, ...]:
    if importlib.util.find_spec("pynvml") is not None:
        found = _ask_nvml()
        if found is not None:
            return found
    return parse_smi(_run_smi(smi)) if smi is not None else ()


def _ask_nvml() -> tuple[Gpu, ...] | None:
    """None where NVML can't be asked: no driver, or one that does not fit its library."""
    pynvml: Any = importlib.import_module("pynvml")  # optional, and without types

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(text(pynvml.nvmlDeviceGetUUID(handle)), tuple(map(text, _mig_uuids(pynvml, handle))))
            for handle in handles
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _mig_uuids(pynvml: Any, handle: Any) -> list[Any]:
    uuids = []
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuids.append(pynvml.nvmlDeviceGetUUID(instance))
    except pynvml.NVMLError:
        return uuids  # a GPU that can't be partitioned, or the end of its instances
    return uuids


def _run_smi(smi: str) -> str:
    try:
        answer = subprocess.run(
            [smi, "-L"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # a driver in a bad state: as good as no GPU
    return answer.stdout if answer.returncode == 0 else ""


def parse_smi(listing: str) -> tuple[Gpu, ...]:
    """GPUs in the output of ``nvidia-smi -L``."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        if gpu := _GPU_LINE.match(line):
            gpus.append(Gpu(gpu["uuid"]))
        elif gpus and (mig := _MIG_LINE.match(line)):
            gpus[-1] = Gpu(gpus[-1].uuid, (*gpus[-1].mig_uuids, mig["uuid"]))
    return tuple(gpus)


def visible_devices(gpus: Sequence[Gpu], setting: str | None) -> list[str]:
    """UUIDs of the devices that CUDA would show, in its order.

    Args:
        gpus: those of the host.
        setting: ``CUDA_VISIBLE_DEVICES``: indices, or UUIDs that may be abbreviated, separated by commas. The list ends
            at the first entry that names no device, and a device that is named twice makes it empty. None: all.

    Of a GPU that is partitioned CUDA shows one instance, and at most one instance in all.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
    """
    if setting is None:
        chosen = [gpu.mig_uuids[0] if gpu.mig_uuids else gpu.uuid for gpu in gpus]
    else:
        chosen = []
        for entry in setting.split(","):
            uuid = _named_device(gpus, entry.strip())
            if uuid is None:
                break
            if uuid in chosen:
                return []
            chosen.append(uuid)
    if any(uuid.startswith("MIG-") for uuid in chosen):
        return chosen[:1]
    return chosen


def _named_device(gpus: Sequence[Gpu], entry: str) -> str | None:
    if entry.isdigit():
        index = int(entry)
        if index >= len(gpus):
            return None
        return gpus[index].mig_uuids[0] if gpus[index].mig_uuids else gpus[index].uuid
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    known = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids)]
    matching = [uuid for uuid in known if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def has_open_device(descriptors: Path) -> bool:
    """Whether a descriptor in the folder (``/proc/self/fd``) is that of a CUDA context."""
    try:
        entries = list(descriptors.iterdir())
    except OSError:
        return False  # no /proc on this system: torch's own flag has to do
    for entry in entries:
        try:
            if os.readlink(entry).startswith(_UVM_DEVICE):
                return True
        except OSError:
            continue  # closed meanwhile: the folder's own descriptor always is
    return False


def _is_cuda_build() -> bool:
    import torch

    return torch.version.cuda is not None


BACKEND = CudaBackend()

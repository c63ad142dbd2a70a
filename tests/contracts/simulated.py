"""Simulated GPUs: the answers of a driver and of the system, and a torch that seems to be built for them.

There are two GPUs, or the single GPU of a Mac. The CPU computes for them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nblaunch.backends import mps
from nblaunch.host import gpus
from tests.host.fake_nvml import FakeGpu, FakeNvml

KINDS = ("cuda", "rocm", "xpu", "mps")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip


class FakeModule:
    """Replaces ``torch.cuda``, ``torch.xpu`` or ``torch.mps`` as with GPUs; all other attributes come from the real
    module.
    """

    def __init__(self, real: Any, count: int = 2) -> None:
        self.real, self.count, self.is_on, self.chosen = real, count, False, 0
        self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def init(self) -> None:
        self.is_on = True

    def is_initialized(self) -> bool:
        return self.is_on

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.chosen = device.index

    def current_device(self) -> int:
        return self.chosen

    def get_rng_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def draw(self) -> list[float]:
        return torch.rand(8, generator=self.generator).tolist()

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def get_device_name(self, device: int = 0) -> str:
        return "Fake GPU"

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(total_memory=16 << 30)

    def memory_reserved(self, device: int = 0) -> int:
        return 3 << 30

    max_memory_reserved = memory_reserved

    def current_allocated_memory(self) -> int:
        return 0

    def empty_cache(self) -> None:
        assert self.is_on or self.count == 1

    def _is_compiled(self) -> bool:
        return True


def install(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> FakeModule:
    """Make this process see a host with such GPUs.

    Args:
        kind: name of the backend.
        folder: folder for the files of the host.
        patch: undoes the changes, except for those that ``forget()`` undoes.
    """
    for name in VARIABLES:
        patch.delenv(name, raising=False)
    forget()
    patch.setattr(gpus, "_CLASSES", folder)
    patch.setitem(
        sys.modules, "pynvml", FakeNvml([FakeGpu("GPU-0"), FakeGpu("GPU-1")] if kind == "cuda" else [])
    )
    if kind == "cuda":
        patch.setattr(torch.version, "cuda", "12.8")
    if kind == "rocm":
        patch.setattr(torch.version, "hip", "6.4")
        write_amd(folder)
    if kind == "xpu":
        write_intel(folder, "0000:03:00.0", "0000:83:00.0")
    if kind == "mps":
        patch.setattr(mps.MpsBackend, "is_present", lambda self: True)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
    patch.setattr(dist, "is_backend_available", lambda name: True)
    name = {"rocm": "cuda"}.get(kind, kind)
    fake = FakeModule(getattr(torch, name), count=1 if kind == "mps" else 2)
    patch.setattr(torch, name, fake)
    return fake


def forget() -> None:
    """Clear this process's cached facts about GPUs."""
    gpus._listed.cache_clear()
    gpus._driver_version.cache_clear()


def write_amd(folder: Path, unique_ids: tuple[int, ...] = (0xAB01, 0xCD02)) -> None:
    """Write the Linux kernel's files for a processor and for GPUs with these numbers; 0 means none."""
    for number, unique_id in enumerate((None, *unique_ids)):
        node, render = folder / f"kfd/kfd/topology/nodes/{number}", f"renderD{127 + number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(
            f"cpu_cores_count {16 if unique_id is None else 0}\nsimd_count {0 if unique_id is None else 304}\n"
            f"drm_render_minor {127 + number}\nunique_id {unique_id or 0}\n"
        )
        if unique_id is not None:
            device = folder / "drm" / render / "device"
            device.mkdir(parents=True)
            (device / "gpu_busy_percent").write_text("25\n")


def write_intel(folder: Path, *addresses: str, num_tiles: int = 0, vendor: str = "0x8086") -> None:
    """Write the Linux kernel's files for GPUs at these PCI addresses."""
    (folder / "drm").mkdir(exist_ok=True, parents=True)
    for address in addresses:
        device = folder / "devices" / address
        for tile in range(num_tiles):
            (device / f"tile{tile}").mkdir(parents=True)
        device.mkdir(parents=True, exist_ok=True)
        (device / "vendor").write_text(f"{vendor}\n")
        number = len(list((folder / "drm").glob("card?")))
        for name in (f"card{number}", f"card{number}-DP-1"):  # a connector is listed as well
            (folder / "drm" / name).mkdir()
            (folder / "drm" / name / "device").symlink_to(device)

"""AMD and Intel GPUs as listed by the Linux kernel: files below ``/sys/class``; no driver library, no program.

Reading these files starts neither ROCm nor Level Zero, so the process can still be forked.

Source: Linux kernel documentation, gpu/amdgpu (``gpu_busy_percent``), gpu/xe; for
``/sys/class/kfd``, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nblaunch import env
from nblaunch.host import proc
from nblaunch.host.gpus import DeviceMeter, Gpu, visible_devices

_CLASSES = Path("/sys/class")
_INTEL = "0x8086"
_INTEGRATED = "0000:00:02.0"  # PCI address of the GPU inside Intel's processors


def amd_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs that ROCm can compute on, in its order, including hidden ones; ``name`` is the render node.

    A container sees all GPUs of the host, but can't read the files of GPUs that it may not use.
    """
    nodes = _CLASSES.glob("kfd/kfd/topology/nodes/[0-9]*/properties")
    gpus = []
    for file in sorted(nodes, key=lambda path: int(path.parent.name)):
        values = dict(line.split() for line in proc.read(file).splitlines() if len(line.split()) == 2)
        if int(values.get("simd_count", 0)) == 0:
            continue  # a node without GPU cores, that is, a CPU
        node = f"renderD{values.get('drm_render_minor')}"
        unique_id = int(values.get("unique_id", 0))
        gpus.append(Gpu(f"GPU-{unique_id:016x}" if unique_id else f"GPU-{node}", name=node))
    return tuple(gpus)


def visible_amd_gpus() -> list[Gpu]:
    """Return the AMD GPUs that HIP shows in this process, in its order.

    ROCR_VISIBLE_DEVICES chooses first; HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES if it is unset) chooses among
    these.
    """
    shown = amd_gpus()
    hip = env.read("HIP_VISIBLE_DEVICES")
    for setting in (
        env.read("ROCR_VISIBLE_DEVICES"), env.read("CUDA_VISIBLE_DEVICES") if hip is None else hip,
    ):  # fmt: skip
        by_uuid = {gpu.uuid: gpu for gpu in shown}
        shown = tuple(by_uuid[uuid] for uuid in visible_devices(shown, setting))
    return list(shown)


class AmdMeter(DeviceMeter):
    """Reads AMD GPUs from files of their driver.

    Args:
        gpus: GPUs in the order of local ranks.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._files = [_CLASSES / "drm" / gpu.name / "device/gpu_busy_percent" for gpu in gpus]

    def read(self) -> list[float | None]:
        texts = [proc.read(file) for file in self._files]
        return [int(text) / 100 if text.isdigit() else None for text in texts]


def num_intel_gpus() -> int:
    """Return the number of Intel GPUs as torch counts them: tiles of cards; without cards, integrated GPUs."""
    folders = [
        card / "device"
        for card in _CLASSES.glob("drm/card[0-9]*")
        if re.fullmatch(r"card\d+", card.name) and proc.read(card / "device/vendor") == _INTEL
    ]
    cards = [folder for folder in folders if folder.resolve().name != _INTEGRATED] or folders
    is_whole = (env.read("ZE_FLAT_DEVICE_HIERARCHY") or "").upper() == "COMPOSITE"
    return sum(1 if is_whole else max(1, len(list(card.glob("tile[0-9]*")))) for card in cards)


def num_visible_intel_gpus() -> int:
    """Return the number of Intel GPUs that Level Zero shows in this process."""
    count = num_intel_gpus()
    mask, selector = env.read("ZE_AFFINITY_MASK"), env.read("ONEAPI_DEVICE_SELECTOR")
    if mask:
        # "1.0" is a tile of a card.
        chosen = {entry.strip() for entry in mask.split(",") if entry.strip().partition(".")[0].isdigit()}
        count = sum(int(entry.partition(".")[0]) < count for entry in chosen)
    if selector:
        count = len(_selected(selector, count))
    return count


def _selected(selector: str, count: int) -> set[int]:
    """Return which of ``count`` devices ``ONEAPI_DEVICE_SELECTOR``, such as ``"level_zero:0,1;opencl:*"``, selects."""
    chosen: set[int] = set()
    for term in selector.lower().split(";"):
        interface, _, devices = term.strip().partition(":")
        if interface not in ("*", "level_zero"):
            continue
        for device in devices.split(","):
            if device in ("*", "gpu"):
                chosen |= set(range(count))
            elif device.isdigit():
                chosen |= {int(device)} & set(range(count))
    return chosen

"""Which GPUs of a host CUDA would show a process: CUDA_VISIBLE_DEVICES read as CUDA reads it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """One GPU of this host.

    Args:
        uuid: its own.
        mig_uuids: those of the MIG instances that it is partitioned into.
        name: its model, as ``"Tesla T4"``.
    """

    uuid: str
    mig_uuids: tuple[str, ...] = field(default=())
    name: str = field(default="", compare=False)


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

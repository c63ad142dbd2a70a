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
        is_partitioned: MIG is enabled on it, so that CUDA shows instances or nothing.
    """

    uuid: str
    mig_uuids: tuple[str, ...] = field(default=())
    name: str = field(default="", compare=False)
    is_partitioned: bool = field(default=False, compare=False)

    @property
    def shown(self) -> str | None:
        """The UUID of what CUDA shows of it; None for nothing."""
        if self.mig_uuids:
            return self.mig_uuids[0]
        return None if self.is_partitioned else self.uuid


def visible_devices(gpus: Sequence[Gpu], setting: str | None) -> list[str]:
    """UUIDs of the devices that CUDA would show, in its order.

    Args:
        gpus: those of the host.
        setting: ``CUDA_VISIBLE_DEVICES``: indices, or UUIDs that may be abbreviated, separated by commas. The list ends
            at the first entry that names no device, and a device that is named twice makes it empty. None: all.

    Of a GPU that is partitioned CUDA shows one instance, and no other device where it shows an instance.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
    """
    if setting is None:
        chosen = [uuid for gpu in gpus if (uuid := gpu.shown) is not None]
    else:
        chosen = []
        for entry in setting.split(","):
            uuid = _named_device(gpus, entry.strip())
            if uuid is None:
                break
            if uuid in chosen:
                return []
            chosen.append(uuid)
    instances = [uuid for uuid in chosen if uuid.startswith("MIG-")]
    return instances[:1] or chosen


def _named_device(gpus: Sequence[Gpu], entry: str) -> str | None:
    if entry.isdigit():
        index = int(entry)
        return gpus[index].shown if index < len(gpus) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    known = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids)]
    matching = [uuid for uuid in known if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None

"""What is known of this host's NVIDIA GPUs without a CUDA context: how many, which, and what they lack.

All of it comes from NVML, the driver's library. No program is started: nvidia-smi takes seconds where a driver is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nblaunch import env
from nblaunch.host import nvml
from nblaunch.host.meter import DeviceMeter
from nblaunch.host.nvml import Gpu

INSTANCE = "MIG-"
"""Beginning of the UUID of a MIG instance."""

_DEVICES = Path("/dev")
_WITHOUT_P2P = "RTX 40"
_TRUTHFUL_DRIVER = (550, 40, 7)  # from here on the driver no longer claims P2P for them


def physical_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this host in the driver's order, whatever CUDA_VISIBLE_DEVICES says.

    NVML is asked until it answers, which it may do once nvidia-ml-py has been installed from a cell.
    """
    try:
        return _listed()
    except LookupError:
        return ()


@cache
def _listed() -> tuple[Gpu, ...]:
    found = nvml.list_gpus()
    if found is None:
        raise LookupError("NVML does not answer")  # which the cache does not keep
    return found


def uncounted() -> str | None:
    """Return why GPUs that are here can't be counted; None where they can, or there are none."""
    device = next(iter(sorted(_DEVICES.glob("nvidia[0-9]*"))), None)
    refusal = nvml.refusal() if device is not None else None
    return f"there is {device}, but NVML can't be asked for GPUs: {refusal}" if refusal is not None else None


def visible() -> list[str]:
    """Return the UUIDs of the devices that CUDA shows in workers of this process, in its order."""
    return visible_devices(physical_gpus(), env.read("CUDA_VISIBLE_DEVICES"))


def open_meter() -> DeviceMeter:
    """Open what reads the visible devices."""
    uuids = visible()
    if not uuids:
        return DeviceMeter()
    return nvml.NvmlMeter.open(uuids) or DeviceMeter()


def lacks_p2p() -> str | None:
    """Return the model of the visible GPUs if their direct connections fail though the driver claims them; or None.

    Collectives over them hang or fail. It concerns several cards of the GeForce RTX 40 series with a driver before
    550.40.07. Source: NVIDIA/nccl-tests issue 117; huggingface/accelerate issue 2328 (3090s are not concerned).
    """
    shown = visible()
    names = [gpu.name for gpu in physical_gpus() if gpu.uuid in shown and _WITHOUT_P2P in gpu.name]
    if not names or len(shown) < 2:
        return None
    version = _driver_version()
    return names[0] if version is None or version < _TRUTHFUL_DRIVER else None


@cache
def _driver_version() -> tuple[int, ...] | None:
    parts = (nvml.driver_version() or "").split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None


def visible_devices(gpus: Sequence[Gpu], setting: str | None) -> list[str]:
    """Return the UUIDs of the devices that CUDA would show, in its order.

    Args:
        gpus: those of the host.
        setting: ``CUDA_VISIBLE_DEVICES``: indices, or UUIDs that may be abbreviated, separated by commas. The list ends
            at the first entry that names no device, and a device that is named twice makes it empty. None: all.

    To one process CUDA shows a single MIG instance, and no other device then. All of them are returned here, since
    each worker is shown its own. An index, or a GPU's own UUID, stands for all instances of that GPU.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
    """
    if setting is None:
        chosen = [uuid for gpu in gpus for uuid in gpu.devices]
    else:
        chosen = []
        for entry in setting.split(","):
            uuids = _named_devices(gpus, entry.strip())
            if not uuids:
                break
            if set(uuids) & set(chosen):
                return []
            chosen += uuids
    return [uuid for uuid in chosen if uuid.startswith(INSTANCE)] or chosen


def _named_devices(gpus: Sequence[Gpu], entry: str) -> tuple[str, ...]:
    if entry.isdigit():
        index = int(entry)
        return gpus[index].devices if index < len(gpus) else ()
    if not entry.startswith(("GPU-", INSTANCE)):
        return ()
    known = {uuid: (uuid,) for gpu in gpus for uuid in gpu.mig_uuids} | {
        gpu.uuid: gpu.devices for gpu in gpus
    }
    matching = [uuids for uuid, uuids in known.items() if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else ()

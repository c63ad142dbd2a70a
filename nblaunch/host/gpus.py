"""What is known of this host's NVIDIA GPUs without a CUDA context: how many, which, and what they lack.

All of it comes from NVML, the driver's library. No program is started: nvidia-smi takes seconds where a driver is slow.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from nblaunch import env
from nblaunch.host import nvml
from nblaunch.host.cuda_visible import Gpu, visible_devices
from nblaunch.host.meter import DeviceMeter

_DEVICES = Path("/dev")
_WITHOUT_P2P = "RTX 40"
_TRUTHFUL_DRIVER = (550, 40, 7)  # from here on the driver no longer claims P2P for them


@cache
def physical_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this host in the driver's order, whatever CUDA_VISIBLE_DEVICES says. Asked once per process."""
    return nvml.list_gpus() or ()


def uncounted() -> str | None:
    """Why GPUs that are here can't be counted; None where they can, or there are none."""
    device = next(iter(sorted(_DEVICES.glob("nvidia[0-9]*"))), None)
    refusal = nvml.refusal() if device is not None else None
    return f"there is {device}, but NVML can't be asked for GPUs: {refusal}" if refusal is not None else None


def visible() -> list[str]:
    """UUIDs of the devices that CUDA shows in this process, in its order."""
    return visible_devices(physical_gpus(), env.read("CUDA_VISIBLE_DEVICES"))


def open_meter() -> DeviceMeter:
    """What reads the visible devices; to be closed."""
    uuids = visible()
    if not uuids:
        return DeviceMeter()
    return nvml.NvmlMeter.open(uuids) or DeviceMeter()


def lacks_p2p() -> str | None:
    """The model of the visible GPUs whose direct connections do not work though the driver claims them; or None.

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

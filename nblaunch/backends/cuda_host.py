"""What is known of this host's NVIDIA GPUs without a CUDA context: how many, which, and what they lack.

NVML is asked where nvidia-ml-py is installed, else the program nvidia-smi.
"""

from __future__ import annotations

from functools import cache

from nblaunch import env
from nblaunch.backends import nvidia_smi, nvml
from nblaunch.backends.cuda_visible import Gpu, visible_devices
from nblaunch.backends.meter import DeviceMeter

_WITHOUT_P2P = "RTX 40"
_TRUTHFUL_DRIVER = (550, 40, 7)  # from here on the driver no longer claims P2P for them


def physical_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this host in the driver's order, whatever CUDA_VISIBLE_DEVICES says. Asked once per process."""
    return _query_gpus(nvidia_smi.program())


@cache
def _query_gpus(program: str | None) -> tuple[Gpu, ...]:
    found = nvml.list_gpus()
    if found is not None:
        return found
    return nvidia_smi.list_gpus(program) if program is not None else ()


def visible() -> list[str]:
    """UUIDs of the devices that CUDA shows in this process, in its order."""
    return visible_devices(physical_gpus(), env.read("CUDA_VISIBLE_DEVICES"))


def open_meter() -> DeviceMeter:
    """What reads the visible devices; to be closed."""
    uuids = visible()
    if not uuids:
        return DeviceMeter()
    program = nvidia_smi.program()
    meter = nvml.NvmlMeter.open(uuids)
    return meter or (nvidia_smi.SmiMeter(uuids, program) if program is not None else DeviceMeter())


def lacks_p2p() -> str | None:
    """The model of the visible GPUs whose direct connections do not work though the driver claims them; or None.

    Collectives over them hang or fail. It concerns several cards of the GeForce RTX 40 series with a driver before
    550.40.07. Source: NVIDIA/nccl-tests issue 117; huggingface/accelerate issue 2328 (3090s are not concerned).
    """
    shown = visible()
    names = [gpu.name for gpu in physical_gpus() if gpu.uuid in shown and _WITHOUT_P2P in gpu.name]
    if not names or len(shown) < 2:
        return None
    version = _driver_version(nvidia_smi.program())
    return names[0] if version is None or version < _TRUTHFUL_DRIVER else None


@cache
def _driver_version(program: str | None) -> tuple[int, ...] | None:
    text = nvml.driver_version() or (nvidia_smi.driver_version(program) if program is not None else None)
    parts = (text or "").split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None

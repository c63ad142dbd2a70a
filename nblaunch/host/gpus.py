"""This host's GPUs, inspected without a device context: which ones workers may use, and how busy they are.

All information about NVIDIA GPUs comes from NVML, the driver's own library, through nvidia-ml-py (module ``pynvml``).
NVML does not initialise CUDA, so the process can still be forked. nblaunch does not start nvidia-smi, which takes
seconds with a slow driver.

Information about AMD and Intel GPUs is read from the Linux kernel's files under ``/sys/class``. Reading them starts
neither ROCm nor Level Zero. Source: Linux kernel documentation, gpu/amdgpu (``gpu_busy_percent``), gpu/xe; for
``/sys/class/kfd``, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from nblaunch import env
from nblaunch.host import proc
from nblaunch.packages import is_installed

_Result = TypeVar("_Result")

INSTANCE = "MIG-"
"""Prefix of a MIG instance's UUID."""

_DEVICES = Path("/dev")
_CLASSES = Path("/sys/class")
_INTEL = "0x8086"
_INTEGRATED = "0000:00:02.0"  # PCI address of the GPU inside Intel's processors
_WITHOUT_P2P = "RTX 40"
_TRUTHFUL_DRIVER = (550, 40, 7)  # as of this version, drivers no longer claim P2P where it fails: lacks_p2p()


# --- utilisation of devices, of any family ---------------------------------------------------------------------------


class DeviceMeter:
    """Reads how busy a backend's devices are, from outside the workers, until it is closed. This base class does not
    read any device.

    The launcher uses it while workers are running, so it must not create a device context. Workers report device memory
    themselves (``Backend.device_memory``).
    """

    def read(self) -> list[float | None]:
        """Return the utilisation of each device, in the order of local ranks; raise no error.

        The utilisation is the fraction of recent time in which the device was computing, from 0 to 1; None if unknown.
        """
        return []

    def close(self) -> None:
        """Release the resources used for reading."""


# --- which GPUs workers may use --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One GPU of this host.

    Args:
        uuid: UUID of the GPU.
        mig_uuids: UUIDs of the MIG instances that it is partitioned into.
        name: its model, such as ``"Tesla T4"``.
        is_partitioned: whether MIG is enabled; CUDA then shows instances or nothing.
    """

    uuid: str
    mig_uuids: tuple[str, ...] = ()
    name: str = field(default="", compare=False)
    is_partitioned: bool = field(default=False, compare=False)

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of the devices that workers can use: the instances of a partitioned GPU, or the GPU itself."""
        return self.mig_uuids or (() if self.is_partitioned else (self.uuid,))


def physical_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this host in the driver's order, regardless of CUDA_VISIBLE_DEVICES.

    Each call queries NVML until one has succeeded, because a cell may install nvidia-ml-py in between.
    """
    try:
        return _listed()
    except LookupError:
        return ()


@cache
def _listed() -> tuple[Gpu, ...]:
    return _ask(lambda pynvml: tuple(_describe(pynvml, handle) for handle in _handles(pynvml)))


def uncounted() -> str | None:
    """Return the reason why this host's GPUs can't be counted; None if they can, or if there are none."""
    device = next(iter(sorted(_DEVICES.glob("nvidia[0-9]*"))), None)
    if device is None:
        return None
    try:
        _ask(lambda pynvml: None)
    except LookupError as error:
        return f"{device} exists, but NVML can't list GPUs: {error.args[0]}"
    return None


def visible() -> list[str]:
    """Return the UUIDs of the devices that CUDA shows to workers of this process, in CUDA's order."""
    return visible_devices(physical_gpus(), env.read("CUDA_VISIBLE_DEVICES"))


def visible_devices(gpus: Sequence[Gpu], setting: str | None) -> list[str]:
    """Return the UUIDs of the devices that CUDA would show, in CUDA's order.

    Args:
        gpus: GPUs of the host.
        setting: ``CUDA_VISIBLE_DEVICES``: indices or (possibly abbreviated) UUIDs, separated by commas. The list ends
            at the first entry that names no device, and is empty if a device is named twice. None: all devices.

    If there are MIG instances, CUDA shows a process only one of them and no other device. This function returns all
    instances, because each worker sees its own. An index, or a GPU's own UUID, stands for all instances of that GPU.
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
    devices = {uuid: (uuid,) for gpu in gpus for uuid in gpu.mig_uuids} | {
        gpu.uuid: gpu.devices for gpu in gpus
    }
    matching = [uuids for uuid, uuids in devices.items() if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else ()


def _may_be_visible() -> list[Gpu]:
    """Return the GPUs that CUDA may show in workers; all of them if CUDA numbers GPUs differently from NVML."""
    shown = visible()
    is_numbered_alike = _is_numbered_alike()
    return [gpu for gpu in physical_gpus() if not is_numbered_alike or {*gpu.devices} & {*shown}]


def _is_numbered_alike() -> bool:
    """Return whether CUDA, like NVML, numbers GPUs by PCI bus, or whether the user chose GPUs by UUID.

    If models differ, CUDA puts the fastest first. Source: CUDA C++ Programming Guide, "CUDA Environment Variables",
    CUDA_DEVICE_ORDER.
    """
    if env.read("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    chosen: str | None = env.read("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not any(entry.strip().isdigit() for entry in chosen.split(",")):
        return True
    return len({gpu.name for gpu in physical_gpus()}) < 2


def lacks_p2p() -> str | None:
    """Return the model of the visible GPUs if the driver reports direct connections that fail; else None.

    Collectives over such connections hang or fail. The fault affects machines with several GeForce RTX 40 cards and a
    driver older than 550.40.07. Source: NVIDIA/nccl-tests issue 117; huggingface/accelerate issue 2328 (3090s are not
    affected).
    """
    names = [gpu.name for gpu in _may_be_visible() if _WITHOUT_P2P in gpu.name]
    if not names or len(visible()) < 2:
        return None
    version = _driver_version()
    return names[0] if version is None or version < _TRUTHFUL_DRIVER else None


@cache
def _driver_version() -> tuple[int, ...] | None:
    try:
        parts = _ask(lambda pynvml: _text(pynvml.nvmlSystemGetDriverVersion())).split(".")
    except LookupError:
        return None
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None


def descriptions() -> list[str]:
    """Return the name, driver and memory of each GPU on this host: ``"Tesla T4, 550.54.15, 15360 MiB"``."""
    try:
        return _ask(_descriptions)
    except LookupError:
        return []


def open_meter() -> DeviceMeter:
    """Open a meter for the visible devices; it reads nothing if CUDA's numbers for them are unknown."""
    uuids = visible() if _is_numbered_alike() else []
    try:
        return NvmlMeter(uuids, _initialised()) if uuids else DeviceMeter()
    except LookupError:
        return DeviceMeter()


class NvmlMeter(DeviceMeter):
    """Reads GPUs through NVML, which stays open until :meth:`close`.

    Args:
        uuids: UUIDs of the devices that it reads, in the order of local ranks.
        pynvml: the module, with NVML initialised.
    """

    def __init__(self, uuids: Sequence[str], pynvml: Any) -> None:
        self._pynvml = pynvml
        self._handles = [self._open(uuid) for uuid in uuids]

    def _open(self, uuid: str) -> Any:
        try:
            return self._pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._pynvml.NVMLError:
            return None  # the GPU is lost

    def read(self) -> list[float | None]:
        return [None if handle is None else self._utilisation(handle) for handle in self._handles]

    def _utilisation(self, handle: Any) -> float | None:
        try:
            return int(self._pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._pynvml.NVMLError:
            return None  # the GPU is lost, or it is a MIG instance, which has no such counter

    def close(self) -> None:
        self._pynvml.nvmlShutdown()


# --- NVML ------------------------------------------------------------------------------------------------------------


def _initialised() -> Any:
    """Return the module with NVML initialised.

    Raises:
        LookupError: the driver is missing, or does not match its library; the message gives the reason.
    """
    if not is_installed("pynvml"):
        raise LookupError("nvidia-ml-py is not installed: pip install nvidia-ml-py")
    pynvml: Any = importlib.import_module("pynvml")  # without types; may be missing on other systems
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise LookupError(str(error)) from error
    return pynvml


def _ask(question: Callable[[Any], _Result]) -> _Result:
    """Call ``question`` while NVML is open and return its result; raise LookupError if NVML is unavailable."""
    pynvml = _initialised()
    try:
        return question(pynvml)
    except pynvml.NVMLError as error:
        raise LookupError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def _handles(pynvml: Any) -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _descriptions(pynvml: Any) -> list[str]:
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    return [
        f"{_text(pynvml.nvmlDeviceGetName(handle))}, {driver}, "
        f"{pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20} MiB"
        for handle in _handles(pynvml)
    ]


def _describe(pynvml: Any, handle: Any) -> Gpu:
    uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
    try:
        is_partitioned = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:
        is_partitioned = False  # this GPU does not support MIG
    instances = tuple(_mig_uuids(pynvml, handle)) if is_partitioned else ()
    return Gpu(uuid, instances, name, is_partitioned)


def _mig_uuids(pynvml: Any, handle: Any) -> Iterator[str]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield _text(pynvml.nvmlDeviceGetUUID(instance))
        except pynvml.NVMLError:
            continue  # no instance has this number, but later ones may exist: instances come and go


def _text(value: Any) -> str:
    """Return a string from NVML, which older versions of pynvml return as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


# --- AMD and Intel GPUs -----------------------------------------------------------------------------------------------


def amd_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs that ROCm can compute on, in ROCm's order, including hidden ones; ``name`` is the render node.

    A container sees all GPUs of the host, but can't read the files of GPUs that it is not allowed to use.
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
    """Return the AMD GPUs that HIP shows in this process, in HIP's order.

    ROCR_VISIBLE_DEVICES is applied first; HIP_VISIBLE_DEVICES (or, if that is unset, CUDA_VISIBLE_DEVICES) then selects
    from the remaining GPUs.
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
    """Reads the utilisation of AMD GPUs from their driver's files.

    Args:
        gpus: GPUs in the order of local ranks.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._files = [_CLASSES / "drm" / gpu.name / "device/gpu_busy_percent" for gpu in gpus]

    def read(self) -> list[float | None]:
        texts = [proc.read(file) for file in self._files]
        return [int(text) / 100 if text.isdigit() else None for text in texts]


def num_intel_gpus() -> int:
    """Return how many Intel GPUs torch counts: tiles of cards, or integrated GPUs if there are no cards."""
    folders = [
        card / "device"
        for card in _CLASSES.glob("drm/card[0-9]*")
        if re.fullmatch(r"card\d+", card.name) and proc.read(card / "device/vendor") == _INTEL
    ]
    cards = [folder for folder in folders if folder.resolve().name != _INTEGRATED] or folders
    is_whole = (env.read("ZE_FLAT_DEVICE_HIERARCHY") or "").upper() == "COMPOSITE"
    return sum(1 if is_whole else max(1, len(list(card.glob("tile[0-9]*")))) for card in cards)


def num_visible_intel_gpus() -> int:
    """Return the number of Intel GPUs that are visible to this process through Level Zero."""
    count = num_intel_gpus()
    mask, selector = env.read("ZE_AFFINITY_MASK"), env.read("ONEAPI_DEVICE_SELECTOR")
    if mask:
        # An entry such as "1.0" names a tile of a card.
        chosen = {entry.strip() for entry in mask.split(",") if entry.strip().partition(".")[0].isdigit()}
        count = sum(int(entry.partition(".")[0]) < count for entry in chosen)
    if selector:
        count = len(_selected(selector, count))
    return count


def _selected(selector: str, count: int) -> set[int]:
    """Return which of ``count`` devices an ``ONEAPI_DEVICE_SELECTOR`` such as ``"level_zero:0,1;opencl:*"`` selects."""
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

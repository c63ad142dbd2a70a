"""Readings of this host's GPUs by NVML, the driver's own library; asked through nvidia-ml-py (module ``pynvml``).

NVML makes no CUDA context and does not open ``/dev/nvidia-uvm``, so that a process which asks it can still be forked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nblaunch.host.meter import DeviceMeter, DeviceReading
from nblaunch.packages import is_installed

_Answer = TypeVar("_Answer")

_LIBRARY_NOT_FOUND = 12  # source: nvml.h, nvmlReturn_t
_without_driver: Any = None
"""``pynvml``, once it has found no driver: none is installed under a running kernel."""


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
    def devices(self) -> tuple[str, ...]:
        """Return the UUIDs of what workers can compute on: the instances of a GPU that is partitioned, or itself."""
        return self.mig_uuids or (() if self.is_partitioned else (self.uuid,))


def list_gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs of this host in the driver's order; None where NVML can't be asked."""
    return _ask(_gpus, otherwise=None)


def driver_version() -> str | None:
    """Return the version as ``"550.54.15"``; None where NVML can't be asked."""
    return _ask(lambda pynvml: _text(pynvml.nvmlSystemGetDriverVersion()), otherwise=None)


def refusal() -> str | None:
    """Return why NVML can't be asked; None where it can."""
    if not is_installed("pynvml"):
        return "nvidia-ml-py is not installed: pip install nvidia-ml-py"
    pynvml: Any = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    pynvml.nvmlShutdown()
    return None


def descriptions() -> list[str]:
    """Return name, driver and memory of each GPU of this host, as ``"Tesla T4, 550.54.15, 15360 MiB"``."""
    return _ask(_descriptions, otherwise=[])


class NvmlMeter(DeviceMeter):
    """Reads GPUs and MIG instances through NVML, which stays open meanwhile.

    Args:
        uuids: of what is read, in the order of local ranks.
        pynvml: the module, with NVML initialised.
    """

    def __init__(self, uuids: Sequence[str], pynvml: Any) -> None:
        self._pynvml = pynvml
        self._handles: list[tuple[int, Any]] = []
        self.num_devices = len(uuids)
        for index, uuid in enumerate(uuids):
            try:
                self._handles.append((index, pynvml.nvmlDeviceGetHandleByUUID(uuid)))
            except pynvml.NVMLError:
                continue

    @classmethod
    def open(cls, uuids: Sequence[str]) -> NvmlMeter | None:
        """Open a meter; None where NVML can't be asked."""
        pynvml = _initialised()
        return None if pynvml is None else cls(uuids, pynvml)

    def read(self) -> tuple[DeviceReading, ...]:
        readings = []
        for index, handle in self._handles:
            try:
                memory = self._pynvml.nvmlDeviceGetMemoryInfo(handle)
            except self._pynvml.NVMLError:
                continue
            readings.append(
                DeviceReading(
                    f"GPU {index}",
                    int(memory.used),
                    int(memory.total),
                    self._utilisation(handle),
                    position=index,
                )
            )
        return tuple(readings)

    def _utilisation(self, handle: Any) -> float | None:
        try:
            return int(self._pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._pynvml.NVMLError:
            return None  # MIG instances have no such counter

    def close(self) -> None:
        self._handles = []
        self._pynvml.nvmlShutdown()


def _initialised() -> Any:
    """Return the module with NVML initialised; None without a driver, or with one that does not fit its library."""
    global _without_driver
    if not is_installed("pynvml"):
        return None
    pynvml: Any = importlib.import_module("pynvml")  # without types; may be missing on other systems
    if pynvml is _without_driver:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # Each try searches the system's folders for the library, at every launch.
        if error.value == _LIBRARY_NOT_FOUND:
            _without_driver = pynvml
        return None
    return pynvml


def _ask(question: Callable[[Any], _Answer], otherwise: _Answer) -> _Answer:
    """Return what ``question`` learns from the module, while NVML is open; ``otherwise`` where it can't be asked."""
    pynvml = _initialised()
    if pynvml is None:
        return otherwise
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return otherwise
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


def _gpus(pynvml: Any) -> tuple[Gpu, ...]:
    return tuple(_describe(pynvml, handle) for handle in _handles(pynvml))


def _describe(pynvml: Any, handle: Any) -> Gpu:
    uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
    is_partitioned = _is_partitioned(pynvml, handle)
    instances = tuple(_mig_uuids(pynvml, handle)) if is_partitioned else ()
    return Gpu(uuid, instances, name, is_partitioned)


def _is_partitioned(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:
        return False  # it can't be


def _mig_uuids(pynvml: Any, handle: Any) -> Iterator[str]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield _text(pynvml.nvmlDeviceGetUUID(instance))
        except pynvml.NVMLError:
            continue  # there is none by this number, and may be by the next: instances come and go


def _text(value: Any) -> str:
    """Return a text of NVML, which older versions of pynvml give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)

"""A stub of ``pynvml`` with any number of GPUs, which records what is opened and closed."""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class NVMLError(Exception):
    """The base of all errors, as in pynvml."""


@dataclass
class FakeGpu:
    """NVML's answers about one GPU or MIG instance. ``None`` means that NVML does not support the query.

    In ``instances``, None is a number without an instance; ``is_mig``: MIG is enabled.
    """

    uuid: str
    name: str = "Tesla T4"
    total: int = 16 << 30
    utilisation: int | None = 0
    instances: list[FakeGpu | None] = field(default_factory=list)
    is_mig: bool = False
    is_lost: bool = False


class FakeNvml(types.ModuleType):
    """A driver with these GPUs; ``has_driver=False``: no driver is installed."""

    NVMLError = NVMLError

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        driver: str = "550.54.15",
        has_driver: bool = True,
    ) -> None:
        super().__init__("pynvml")
        self.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
        self.gpus = list(gpus)
        self.driver = driver
        self.has_driver = has_driver
        self.num_open = 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("Library Not Found")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        assert self.num_open
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            for one in (gpu, *gpu.instances):
                if one is not None and one.uuid == uuid and not one.is_lost:
                    return one
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> Any:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu) -> Any:
        return handle.name.encode()

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        if device.name == "Tesla T4":
            raise NVMLError("Not Supported")
        return [int(device.is_mig or bool(device.instances)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeGpu:
        instance = device.instances[index] if index < len(device.instances) else None
        if instance is None:
            raise NVMLError("Not Found")
        return instance

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        assert self.num_open
        return types.SimpleNamespace(total=handle.total)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        assert self.num_open
        if handle.is_lost:
            raise NVMLError("GPU is lost")
        if handle.utilisation is None:
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=handle.utilisation)

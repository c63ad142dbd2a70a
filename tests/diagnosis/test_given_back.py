"""Memory of devices before and after a launch, with made-up devices."""

from __future__ import annotations

import os

from nblaunch.backends.cpu import CpuBackend
from nblaunch.diagnosis.given_back import MemoryBalance
from nblaunch.host.meter import DeviceMeter, DeviceReading

GB = 1_000_000_000


class _Readings(DeviceMeter):
    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        backend.num_open += 1

    def read(self) -> tuple[DeviceReading, ...]:
        readings = self._backend.readings
        return readings.pop(0) if len(readings) > 1 else readings[0]

    def close(self) -> None:
        self._backend.num_open -= 1


class _Backend(CpuBackend):
    """Devices that read as given, one reading after the other, the last one again and again."""

    def __init__(self, *readings: tuple[DeviceReading, ...]) -> None:
        self.readings = list(readings)
        self.num_open = 0

    def open_meter(self) -> DeviceMeter:
        return _Readings(self)


def _gpu(used: float, by_process: dict[int, int] | None = None, name: str = "GPU 0") -> DeviceReading:
    return DeviceReading(name, int(used * GB), 16 * GB, None, by_process or {})


def test_nothing_is_said_where_all_was_given_back() -> None:
    backend = _Backend((_gpu(1.0), _gpu(2.0, name="GPU 1")), (_gpu(1.05), _gpu(1.0, name="GPU 1")))
    assert MemoryBalance(backend).lines() == []
    assert backend.num_open == 0


def test_the_driver_gets_a_moment_to_free_memory() -> None:
    backend = _Backend((_gpu(1.0),), (_gpu(9.0),), (_gpu(5.0),), (_gpu(1.0),))
    assert MemoryBalance(backend, patience_s=60).lines() == []


def test_a_process_that_holds_on_is_named() -> None:
    mine, hosts = os.getpid(), 2**31 - 7
    before, after = {mine: GB // 2, 5: GB}, {mine: GB, hosts: 2 * GB, 5: GB}
    (line,) = MemoryBalance(_Backend((_gpu(1.0, before),), (_gpu(3.5, after),)), patience_s=0).lines()
    assert line.startswith(
        "GPU 0: 2.50 GB more of its memory are taken than before the launch: "
        f"process {hosts} of the host took 2.00 GB, process {mine} ("
    )
    assert line.endswith("took 500 MB")


def test_an_unknown_holder() -> None:
    (line,) = MemoryBalance(_Backend((_gpu(1.0),), (_gpu(2.0),)), patience_s=0).lines()
    assert "though all its processes have ended; another program took them" in line


def test_a_backend_without_devices_of_its_own_has_nothing_to_compare() -> None:
    assert MemoryBalance(CpuBackend()).lines() == []

"""Whether a launch has given its devices' memory back: what was taken before it, compared with what is afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from nblaunch import formatting
from nblaunch.backends.base import Backend
from nblaunch.host import proc
from nblaunch.host.meter import DeviceReading

_NOTICED_BYTES = 64 << 20
"""Less comes and goes with the driver's own tables, and with what else uses a GPU that shows a desktop."""

_PATIENCE_S = 1.0
_INTERVAL_S = 0.05


class MemoryBalance:
    """Reads the devices when it is made, which is before workers start, and once more when all have ended.

    Args:
        backend: whose devices.
        patience_s: how long the driver may take to free what ended processes had.
    """

    def __init__(self, backend: Backend, patience_s: float = _PATIENCE_S) -> None:
        self._backend = backend
        self._patience_s = patience_s
        self._before = {reading.name: reading for reading in self._read()}

    def lines(self) -> list[str]:
        """A sentence for each device with clearly more taken than before; none where all was given back."""
        if not self._before:
            return []
        deadline_s = time.monotonic() + self._patience_s
        while True:
            grown = [reading for reading in self._read() if self._growth(reading) > _NOTICED_BYTES]
            if not grown or time.monotonic() >= deadline_s:
                return [self._describe(reading) for reading in grown]
            time.sleep(_INTERVAL_S)

    def _read(self) -> tuple[DeviceReading, ...]:
        meter = self._backend.open_meter()
        try:
            return meter.read()
        finally:
            meter.close()

    def _growth(self, reading: DeviceReading) -> int:
        before = self._before.get(reading.name)
        return 0 if before is None else reading.used_bytes - before.used_bytes

    def _describe(self, reading: DeviceReading) -> str:
        growth = formatting.size(self._growth(reading))
        text = f"{reading.name}: {growth} more of its memory are taken than before the launch"
        owners = _growing(self._before[reading.name].by_process, reading.by_process)
        if not owners:
            return f"{text}, though all its processes have ended; another program took them (nvidia-smi lists who)"
        return f"{text}: " + ", ".join(f"{_name(pid)} took {formatting.size(taken)}" for pid, taken in owners)


def _growing(before: Mapping[int, int], after: Mapping[int, int]) -> list[tuple[int, int]]:
    """Processes that take more than they did, with how much more; the greatest first."""
    more = {pid: taken - before.get(pid, 0) for pid, taken in after.items()}
    return sorted(
        ((pid, taken) for pid, taken in more.items() if taken > 0), key=lambda one: one[1], reverse=True
    )


def _name(pid: int) -> str:
    command = proc.read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    if not command:
        return f"process {pid} of the host"  # this is a container, which sees its own processes only
    return f"process {pid} ({command:.60})"

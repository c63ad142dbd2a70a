"""How busy the workers' devices are, looked at from outside while they run.

A look costs about a millisecond (NVML for GPUs). What a worker has taken of its device's memory it reports by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nblaunch.backends.base import Backend
from nblaunch.events import DeviceUse
from nblaunch.host.meter import DeviceMeter

_INTERVAL_S = 1.0


class DeviceWatch:
    """Reads the devices of this machine's workers now and then, until it is closed. Made once they have started.

    Args:
        backend: whose devices.
        first_rank: of the workers of this machine.
        num_workers: on this machine; where there are more than devices, they take devices in turn.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        backend: Backend,
        first_rank: int,
        num_workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_rank = first_rank
        self._num_workers = num_workers
        self._clock = clock
        self._next_s = clock() + _INTERVAL_S  # workers have not touched their devices before
        self._meter: DeviceMeter = backend.open_meter()

    def look(self) -> list[DeviceUse]:
        """Return what there is to report about each rank; nothing most of the time."""
        if self._clock() < self._next_s:
            return []
        self._next_s = self._clock() + _INTERVAL_S
        readings = self._meter.read()
        # One that can't be read, as a GPU that is lost, must not move the others to its neighbours' ranks.
        count = self._meter.num_devices or len(readings)
        placed = {index if one.position is None else one.position: one for index, one in enumerate(readings)}
        events = []
        for local_rank in range(self._num_workers if readings else 0):
            reading = placed.get(local_rank % count)
            if reading is not None and reading.utilisation is not None:
                events.append(DeviceUse(self._first_rank + local_rank, time.time(), reading.utilisation))
        return events

    def close(self) -> None:
        """Stop reading."""
        self._meter.close()

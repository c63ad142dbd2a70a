"""The workers' use of the host and its devices, read from outside while they run.

    MemorySampler   events about each rank's host memory, once a second and when its peak rises
    DeviceSampler   events about the utilisation of each rank's device, once a second

Workers are not disturbed. Reading a device takes about a millisecond (NVML for GPUs). Workers report their own use of
device memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nblaunch.backends.base import Backend
from nblaunch.events import DeviceUse, HostMemory
from nblaunch.host import memory, proc
from nblaunch.host.gpus import DeviceMeter

INTERVAL_S = 1.0
"""Seconds between events about a rank."""

_READING_S = 0.25  # between readings of a rank's memory
_RISE = 1.05  # a peak that rises by this factor is reported at once: the process may die soon

_MAX_SHARE = 0.01  # fraction of the launcher's time, for readings of proportional memory


class DeviceSampler:
    """Reads the utilisation of the devices that this machine's workers use.

    It is created once the workers have started.

    Args:
        backend: device family of the workers.
        first_rank: first rank of this machine.
        num_workers: number of workers on this machine; if there are more workers than devices, they share the devices.
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
        self._next_s = clock() + INTERVAL_S  # workers have not used their devices yet
        self._meter: DeviceMeter = backend.open_meter()

    def sample(self) -> list[DeviceUse]:
        """Return the utilisation of each rank's device if a reading is due; otherwise nothing."""
        if self._clock() < self._next_s:
            return []
        self._next_s = self._clock() + INTERVAL_S
        shares = self._meter.read()
        events = []
        for local_rank in range(self._num_workers if shares else 0):
            share = shares[local_rank % len(shares)]
            if share is not None:
                events.append(DeviceUse(self._first_rank + local_rank, share=share))
        return events

    def close(self) -> None:
        """Close the meter."""
        self._meter.close()


@dataclass
class _Sample:
    """The memory of a rank at the time when its proportional memory was last read.

    The proportional memory is None if the system does not report it.
    """

    proportional: int | None
    own_bytes: int
    read_s: float


@dataclass
class _Use:
    """Memory of a rank: the last reading, the peak, the peak at the last report, and the time of the next report."""

    num_bytes: int = 0
    is_proportional: bool = True
    peak_bytes: int = 0
    reported_bytes: int = 0
    next_s: float = 0.0


class MemorySampler:
    """Reads the host memory of workers four times a second, to record its peaks.

    Proportional memory, which counts shared pages only in part, is expensive to read: the system walks all
    pages of the process, which takes 12 ms per GB. It is therefore read for one rank at a time, and takes at
    most a hundredth of the launcher's time. Between two readings, it is extrapolated from the growth of the
    process's own pages, which is cheap to read.

    Args:
        proportional_bytes: reads the proportional memory of a process; None = the system does not report it.
        own_bytes: reads the size of a process's own pages; returns None if the process has ended.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        proportional_bytes: Callable[[int], int | None] = memory.proportional_bytes,
        own_bytes: Callable[[int], int | None] = proc.own_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proportional_bytes = proportional_bytes
        self._own_bytes = own_bytes
        self._clock = clock
        self._samples: dict[int, _Sample] = {}
        self._uses: dict[int, _Use] = {}
        self._job_peak_bytes = 0
        self._next_proportional_s = self._next_s = 0.0

    def sample(self, pids: Mapping[int, int]) -> list[HostMemory]:
        """Return the memory of the ranks in ``pids`` (rank -> process), once a second or when the peak rises."""
        now_s = self._clock()
        if pids and now_s >= self._next_proportional_s:
            self._read_one(pids, now_s)
        # If a rank is missing, its function has ended; in a session, another command may follow.
        self._uses = {rank: use for rank, use in self._uses.items() if rank in pids}
        due = set(pids)
        if now_s < self._next_s:
            # Ranks without a reading stay due; otherwise a short job would end without one.
            due -= self._uses.keys()
        else:
            self._next_s = now_s + _READING_S
        for rank in due:
            self._estimate(rank, pids[rank])
        taken = sum(use.num_bytes for use in self._uses.values())
        self._job_peak_bytes = max(taken, self._job_peak_bytes) if pids else 0
        return [self._report(rank, now_s) for rank in sorted(due) if self._is_news(rank, now_s)]

    def _read_one(self, pids: Mapping[int, int], now_s: float) -> None:
        """Read the rank whose reading is the oldest. A slow reading delays the next one."""
        rank = min(pids, key=lambda rank: self._samples[rank].read_s if rank in self._samples else 0.0)
        own_bytes = self._own_bytes(pids[rank])
        if own_bytes is None:
            return
        self._samples[rank] = _Sample(self._proportional_bytes(pids[rank]), own_bytes, now_s)
        self._next_proportional_s = self._clock() + (self._clock() - now_s) / _MAX_SHARE

    def _estimate(self, rank: int, pid: int) -> None:
        # Workers of a job share the same pages. Until a rank's proportional memory has been read, the shared
        # part of another rank is used for it, because a table without some ranks would show an incorrect sum.
        sample = self._samples.get(rank) or next(iter(self._samples.values()), None)
        own_bytes = self._own_bytes(pid)
        if own_bytes is None or sample is None:
            return
        use = self._uses.setdefault(rank, _Use())
        use.is_proportional = sample.proportional is not None
        use.num_bytes = (
            own_bytes
            if sample.proportional is None
            else max(sample.proportional + own_bytes - sample.own_bytes, 0)
        )
        use.peak_bytes = max(use.num_bytes, use.peak_bytes)

    def _is_news(self, rank: int, now_s: float) -> bool:
        use = self._uses.get(rank)
        return use is not None and (now_s >= use.next_s or use.peak_bytes > _RISE * use.reported_bytes)

    def _report(self, rank: int, now_s: float) -> HostMemory:
        use = self._uses[rank]
        use.reported_bytes, use.next_s = use.peak_bytes, now_s + INTERVAL_S
        return HostMemory(
            rank,
            num_bytes=use.num_bytes,
            is_proportional=use.is_proportional,
            peak_bytes=use.peak_bytes,
            job_peak_bytes=self._job_peak_bytes,
        )

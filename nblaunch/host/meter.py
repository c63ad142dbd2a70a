"""Readings of devices from outside of the workers: memory in use, and utilisation.

Done by the launcher while workers run, so it must not create a device context. What a worker knows of its own memory
it reports by itself (``Backend.device_memory``).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceReading:
    """One device at one moment.

    Args:
        name: as users count them: ``"GPU 0"``. In the order of local ranks.
        used_bytes: of its memory, by all processes of the host.
        total_bytes: of its memory.
        utilisation: share of the last moments in which it computed, 0 to 1; None where it is not known.
        position: its number among all devices of the meter, where others may be missing; None: none is.
    """

    name: str
    used_bytes: int
    total_bytes: int
    utilisation: float | None = None
    position: int | None = field(default=None, compare=False)


class DeviceMeter:
    """Reads the devices of a backend until it is closed. This one knows of none."""

    num_devices = 0
    """How many it would read if all could be read; 0: those that it reads."""

    def read(self) -> tuple[DeviceReading, ...]:
        """Read the devices in the order of local ranks, without those that can't be read. Never raises."""
        return ()

    def close(self) -> None:
        """Release what reading needs."""

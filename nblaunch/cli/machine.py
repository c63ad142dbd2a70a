"""What this machine has, as far as a questionnaire wants to know it. Looks without touching a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nblaunch import backends


@dataclass(frozen=True)
class Machine:
    """The devices of a machine.

    Args:
        num_devices: name of a backend that can be used here -> number of its devices.
        best: the backend that a launch would choose by itself.
    """

    num_devices: Mapping[str, int]
    best: str

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        found = backends.discover()
        usable = {name: backend.device_count() for name, backend in found.items() if backend.affinity() > 0}
        return cls(usable, backends.choose("auto").name)

    def count(self, backend: str) -> int:
        """Devices of a family; 1 where this machine has none and another one must be meant."""
        return max(1, self.num_devices.get(self.best if backend == "auto" else backend, 1))

    def precision(self, backend: str) -> str:
        """The mixed precision that suits a family best; bf16 where its devices can do it."""
        family = backends.discover()[self.best if backend == "auto" else backend]
        if family.name not in self.num_devices or family.name == "cpu":
            return "no"
        return "no" if family.supports_precision("bf16") else "bf16"

"""The simulated host with GPUs from the tests of ``nblaunch/host``."""

from tests.host.conftest import nvml

__all__ = ["nvml"]

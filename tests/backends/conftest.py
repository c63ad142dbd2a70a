"""A host with GPUs as the tests of ``nblaunch/host`` make it."""

from tests.host.conftest import nvml

__all__ = ["nvml"]

"""A launch is planned while workers are kept for the debugger, which may have the only devices."""

from __future__ import annotations

import pytest

from nblaunch.backends.cpu import CpuBackend
from nblaunch.errors import LaunchError
from nblaunch.launcher.debug_client import DebugClient, KeptFailure
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec


class _Kept(KeptFailure):
    def _release(self) -> None:
        """Nothing is kept in truth."""


def _train() -> None:
    """Never called here: the launch is only planned."""


@pytest.mark.parametrize("has_devices", [False, True])
def test_kept_workers_are_given_up_for_the_devices_that_they_have(
    monkeypatch: pytest.MonkeyPatch, has_devices: bool
) -> None:
    kept = _Kept(DebugClient({}), 0)

    def refusal(backend: CpuBackend) -> str | None:
        return "taken" if has_devices and not kept.is_released else None

    monkeypatch.setattr(CpuBackend, "launch_refusal", refusal)
    plan_launch(LaunchSpec(_train, num_processes=1, backend="cpu"))
    assert kept.is_released is has_devices
    kept.release()


def test_devices_that_others_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "launch_refusal", lambda backend: "taken by others")
    with pytest.raises(LaunchError, match="taken by others"):
        plan_launch(LaunchSpec(_train, num_processes=1, backend="cpu"))

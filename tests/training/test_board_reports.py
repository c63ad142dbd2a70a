"""What a rank shows of itself while it trains: its own part of each step, and the memory of its device."""

from __future__ import annotations

import pytest

from nblaunch.backends.cpu import BACKEND, CpuBackend
from nblaunch.training.board_reports import DeviceMemoryReport, LossReport, OwnTime
from nblaunch.wire.board import private_slot


class Device(CpuBackend):
    """A backend that counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def own_memory(self) -> tuple[int, int, int] | None:
        self.num_calls += 1
        return (self.num_calls, 10, 100)


def test_device_memory_is_asked_for_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("nblaunch.training.board_reports.monotonic", lambda: now[0])
    slot, device = private_slot(), Device()
    losses = LossReport(slot, DeviceMemoryReport(slot, device))
    for _ in range(50):
        losses.flush()
        now[0] += 0.1
    assert device.num_calls == 5
    shown = slot.read(0)
    assert (shown.device_bytes, shown.device_peak_bytes, shown.device_limit_bytes) == (5, 10, 100)


def test_a_device_that_tells_nothing_shows_nothing() -> None:
    slot = private_slot()
    DeviceMemoryReport(slot, BACKEND).show_due()
    assert slot.read(0).device_bytes == 0


def test_own_time_lies_between_one_backward_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("nblaunch.training.board_reports.monotonic", lambda: now[0])
    slot = private_slot()
    own = OwnTime(slot)
    for forward_s, backward_s in ((1.0, 5.0), (2.0, 5.0), (3.0, 5.0)):
        now[0] += forward_s
        own.begin_backward()
        now[0] += backward_s
        own.end_backward()
    assert (slot.read(0).own_time_s, slot.read(0).own_steps) == (
        5.0,
        2,
    )  # before the first, there is no backward
    own.pause()
    now[0] += 60
    own.begin_backward()
    assert slot.read(0).own_steps == 2

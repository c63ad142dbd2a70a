"""A rank's reports while it trains: its busy time in each step, losses, and the memory of its device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, context
from nblaunch.backends.cpu import BACKEND, CpuBackend
from nblaunch.events import Event
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.progress.board_reports import BusyTime, LossReport
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import MAX_BINS, LossCurve, Slot, SlotReading, private_slot


class Device(CpuBackend):
    """A backend that counts the requests."""

    def __init__(self) -> None:
        self.num_calls = 0

    def device_memory(self) -> tuple[int, int, int] | None:
        self.num_calls += 1
        return (self.num_calls, 10, 100)


def test_device_memory_is_asked_for_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("nblaunch.progress.board_reports.monotonic", lambda: now[0])
    slot, device = private_slot(), Device()
    losses = LossReport(slot, device)
    for _ in range(50):
        losses.flush()
        now[0] += 0.1
    assert device.num_calls == 5
    shown = slot.read(0)
    assert (shown.device_bytes, shown.device_peak_bytes, shown.device_limit_bytes) == (5, 10, 100)


def test_a_device_that_reports_nothing_shows_nothing() -> None:
    slot = private_slot()
    LossReport(slot, BACKEND).flush()
    assert slot.read(0).device_bytes == 0


def test_busy_time_is_measured_between_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("nblaunch.progress.board_reports.monotonic", lambda: now[0])
    slot = private_slot()
    busy = BusyTime(slot)
    for forward_s, backward_s in ((1.0, 5.0), (2.0, 5.0), (3.0, 5.0)):
        now[0] += forward_s
        began_s = now[0]
        now[0] += backward_s
        busy.end_backward(began_s)
    assert (slot.read(0).busy_time_s, slot.read(0).busy_steps) == (
        5.0,
        2,
    )  # there is no backward before the first
    busy.pause()
    now[0] += 60
    busy.end_backward(now[0])
    assert slot.read(0).busy_steps == 2


def shown_losses(losses: list[float], *, per_step: int = 1, flush_every: int = 1_000_000) -> LossCurve:
    """Return the reported losses after these losses, with an optimizer step after every ``per_step`` of them."""
    slot = private_slot()
    report = LossReport(slot, BACKEND)
    for number, loss in enumerate(losses, 1):
        report.note(torch.tensor(loss), None)
        if number % flush_every == 0:
            report.flush()
        if number % per_step == 0:
            slot.num_updates += 1
            slot.num_updates += 1  # a step of another optimizer
    report.flush()
    return slot.read(0).losses


@pytest.mark.parametrize("num_steps", [1, 2, MAX_BINS - 1, MAX_BINS, MAX_BINS + 1, 132, 1000])
def test_losses_do_not_depend_on_the_reads(num_steps: int) -> None:
    losses = [1 / (step + 1) for step in range(num_steps)]
    curve = shown_losses(losses)
    for flush_every in (1, 3, 50):
        assert shown_losses(losses, flush_every=flush_every) == curve
    assert curve.num_steps == num_steps
    assert len(curve.means) == -(-num_steps // curve.steps_per_bin) <= MAX_BINS
    points = curve.points()
    assert points[-1][0] == num_steps
    width = curve.steps_per_bin
    for index, (_, mean) in enumerate(points):
        of_bin = losses[index * width : (index + 1) * width]
        assert mean == pytest.approx(sum(of_bin) / len(of_bin), rel=1e-5)


def test_losses_of_one_step_are_summed() -> None:
    assert shown_losses([1.0, 3.0, 5.0, 5.0, 2.0, 2.0], per_step=2) == LossCurve(3, 1, (2.0, 5.0, 2.0))


def test_a_loss_that_is_not_finite_stays_in_its_bin() -> None:
    curve = shown_losses([float("nan") if step == 5 else 1.0 for step in range(MAX_BINS + 1)])
    assert curve.means == (1.0,) * (MAX_BINS // 2 + 1)


class OutOfMemory(torch.Tensor):
    """A loss that can't be read or added, because its device has no memory left."""

    def item(self) -> float:  # type: ignore[override]
        raise RuntimeError("out of memory")


def test_an_odd_loss_does_not_hide_others() -> None:
    slot = private_slot()
    report = LossReport(slot, BACKEND)
    report.note(torch.tensor(1.0), None)
    slot.num_updates += 1
    with pytest.raises(RuntimeError):
        report.note(torch.ones(1).as_subclass(OutOfMemory), None)
    report.flush()
    assert slot.read(0).losses.points() == ((1.0, 1.0),)


def test_numeric_losses_of_any_form_are_added() -> None:
    numbers = [
        torch.tensor(1.0),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bfloat16) * 4,
    ]
    others = [torch.ones(2), torch.ones((), dtype=torch.complex64), torch.zeros(0)]
    slot = private_slot()
    report = LossReport(slot, BACKEND)
    for loss in numbers + others:
        report.note(loss, None)
    report.flush()
    assert slot.read(0).losses.means == (2.0,)


def test_later_changes_of_a_loss_are_not_shown() -> None:
    slot: Slot = private_slot()
    report = LossReport(slot, BACKEND)
    for value in (4.0, 2.0):
        loss = torch.tensor(value)
        report.note(loss, None)
        slot.num_updates += 1
        loss.zero_()
    report.flush()
    assert slot.read(0).losses.means == (4.0, 2.0)


def test_epoch_means_use_their_own_losses() -> None:
    slot = private_slot()
    report, losses = LossReport(slot, BACKEND), [float(step) for step in range(200)]
    ends, means = (1, 70, 71, 199, 200), []
    for step, loss in enumerate(losses, 1):
        report.note(torch.tensor(loss), None)
        slot.num_updates += 1
        if step in ends:
            report.flush()
            means.append(report.take_mean())
    epochs = [losses[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    assert means == pytest.approx([sum(epoch) / len(epoch) for epoch in epochs])
    report.flush()
    assert report.take_mean() is None


def test_epoch_mean_recovers_after_nonfinite_epoch() -> None:
    slot = private_slot()
    report, means = LossReport(slot, BACKEND), []
    for epoch in range(3):
        for step in range(100):
            report.note(torch.tensor(float("nan") if (epoch, step) == (0, 99) else 1.0), None)
            slot.num_updates += 1
        report.flush()
        means.append(report.take_mean())
    assert str(means) in ("[nan, None, 1.0]", "[nan, 1.0, 1.0]")


class LastReadings:
    """A listener that keeps the ranks' last readings."""

    def __init__(self) -> None:
        self.readings: list[SlotReading] = []

    def on_event(self, event: Event) -> None:
        pass

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        self.readings = list(readings)

    def close(self) -> None:
        pass


def train_by_steps() -> float:
    """Train for ten steps in a loop that is not reported; return the last loss."""
    accelerator = Accelerator()
    linear = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    for step in range(10):
        loss = (model(torch.zeros(1)) * 0 + step).sum()
        accelerator.backward(loss)
        optimizer.step()
    return loss.item()


def test_the_last_loss_is_shown_without_a_loops_end(
    first_store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = count(1)
    monkeypatch.setattr(CpuBackend, "device_memory", lambda self: (1, next(peaks), 10))
    listener = LastReadings()
    spec = LaunchSpec(train_by_steps, (), 2, backend="cpu")
    runner = JobRunner(spec, plan_launch(spec), [listener])
    runner.run()
    assert runner.result() == 9.0
    assert [(one.loss, one.losses.num_steps) for one in listener.readings] == [(9.0, 10), (9.0, 10)]
    assert all(one.device_peak_bytes > 1 for one in listener.readings), (
        "it is read again after the first step"
    )


def train_for_epochs() -> list[int]:
    """Train in a plain loop; return the reported number of epochs at the beginning of each."""
    accelerator = Accelerator()
    linear = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(
        linear, torch.optim.SGD(linear.parameters(), lr=0.1), loader
    )
    announced = []
    for _ in range(4):
        for position, (batch,) in enumerate(loader):
            if position == 0:
                announced.append(context.current().slot.read(0).num_epochs)
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return announced


def test_a_plain_loop_over_a_range_announces_its_number_of_epochs(first_store: None) -> None:
    spec = LaunchSpec(train_for_epochs, (), 2, backend="cpu", return_all=True)
    runner = JobRunner(spec, plan_launch(spec), [])
    runner.run()
    assert runner.result() == [[4, 4, 4, 4]] * 2

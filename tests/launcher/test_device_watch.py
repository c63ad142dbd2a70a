"""How busy devices are, from made-up readings."""

from __future__ import annotations

from nblaunch.backends.cpu import CpuBackend
from nblaunch.dashboard.fold import fold, fold_samples
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.view import JobView
from nblaunch.events import Exited, JobStarted, Started, WorkerState
from nblaunch.host.meter import DeviceMeter, DeviceReading
from nblaunch.host.nvml import NvmlMeter
from nblaunch.launcher.device_watch import DeviceWatch
from nblaunch.wire.board import Sample
from tests.host.fake_nvml import FakeGpu, FakeNvml


class _Backend(CpuBackend, DeviceMeter):
    """Its own meter, with two devices."""

    is_closed = False
    num_reads = 0
    uses: tuple[float | None, ...] = (0.25, None)

    def open_meter(self) -> DeviceMeter:
        return self

    def read(self) -> tuple[DeviceReading, ...]:
        self.num_reads += 1
        return tuple(DeviceReading(f"GPU {index}", 0, 1, use) for index, use in enumerate(self.uses))

    def close(self) -> None:
        self.is_closed = True


def test_ranks_are_told_of_their_devices_once_a_second() -> None:
    backend, now_s = _Backend(), 100.0
    watch = DeviceWatch(backend, first_rank=4, num_workers=3, clock=lambda: now_s)
    assert watch.look() == [], "nobody has used a device yet"
    now_s = 101.5
    assert [(one.rank, one.share) for one in watch.look()] == [(4, 0.25), (6, 0.25)], (
        "devices are taken in turn"
    )
    assert watch.look() == []
    assert backend.num_reads == 1
    now_s = 103.0
    backend.uses = ()
    assert watch.look() == []
    watch.close()
    assert backend.is_closed


def test_a_gpu_that_is_lost_does_not_lend_its_rank_to_another() -> None:
    gpus = [FakeGpu(f"GPU-{index}", utilisation=10 * index) for index in range(3)]
    backend, now_s = _Backend(), 100.0
    backend.open_meter = lambda: NvmlMeter([gpu.uuid for gpu in gpus], driver)  # type: ignore[method-assign]
    driver = FakeNvml(gpus)
    driver.nvmlInit()
    watch = DeviceWatch(backend, 0, 4, clock=lambda: now_s)
    gpus[1].is_lost = True
    now_s = 102.0
    assert [(one.rank, one.share) for one in watch.look()] == [(0, 0.0), (2, 0.2), (3, 0.0)]
    watch.close()


def test_the_table_shows_it_while_the_rank_runs() -> None:
    view = fold(fold(JobView(), JobStarted(-1, 1.0, num_processes=1)), Started(0, 1.0, pid=7))
    now_s = 100.0
    watch = DeviceWatch(_Backend(), 0, 1, clock=lambda: now_s)
    now_s = 102.0
    for event in watch.look():
        view = fold(view, event)
    sample = Sample(0, WorkerState.TRAINING, device_bytes=2_000_000_000, device_limit_bytes=16_000_000_000)
    view = fold_samples(view, [sample], 3.0)
    table = tabulate(view)
    assert "2.00 GB of 16.0 GB, 25% busy" in table.rows[0].cells
    ended = tabulate(fold(view, Exited(0, 4.0)))
    assert not any("busy" in cell for cell in ended.rows[0].cells)

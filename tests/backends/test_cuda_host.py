"""GPUs of a host as fake drivers tell of them, by NVML and nvidia-smi; real ones are in tests/hardware/test_cuda.py."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

import pynvml
import pytest

from nblaunch.backends import cuda_host, nvidia_smi
from nblaunch.backends.cuda_visible import Gpu
from nblaunch.backends.meter import DeviceReading
from tests.backends.conftest import FakeSmi
from tests.backends.fake_nvml import FakeGpu, FakeNvml

TWO = (Gpu("GPU-aaaa1111"), Gpu("GPU-aabb2222"))
PARTITIONED = (Gpu("GPU-cccc3333", ("MIG-1111", "MIG-2222")), Gpu("GPU-dddd4444"))
GIB = 1 << 30

LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-cccc3333)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 3g.20gb     Device  1: (UUID: MIG-2222)
GPU 1: Tesla T4 (UUID: GPU-dddd4444)
"""
NvmlMaker = Callable[..., FakeNvml]


def test_the_fake_has_only_what_the_real_module_has() -> None:
    assert not issubclass(pynvml.NVMLLibraryMismatchError, pynvml.NVMLError)
    names = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real = list(inspect.signature(getattr(pynvml, name)).parameters.values())
        ours = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        assert [one.name for one in real if one.default is one.empty][: len(ours)] == ours or not ours, name
    assert issubclass(pynvml.NVMLError, Exception)


def test_gpus_are_counted_by_nvidia_smi(smi: FakeSmi) -> None:
    smi.answers(L="GPU 0: Tesla T4 (UUID: GPU-aaaa1111)\nGPU 1: Tesla T4 (UUID: GPU-aabb2222)")
    assert cuda_host.physical_gpus() == TWO
    assert [gpu.name for gpu in cuda_host.physical_gpus()] == ["Tesla T4"] * 2


def test_mig_instances_belong_to_their_gpu() -> None:
    assert nvidia_smi.parse_list(LISTING) == PARTITIONED
    assert [gpu.name for gpu in nvidia_smi.parse_list(LISTING)] == ["NVIDIA A100-SXM4-40GB", "Tesla T4"]


@pytest.mark.parametrize(
    "body", ["exit 9", "echo NVIDIA-SMI has failed", "echo 'GPU 0: T4 (UUID: GPU-1)'; exit 1"]
)
def test_a_driver_in_a_bad_state_counts_as_no_gpu(smi: FakeSmi, body: str) -> None:
    smi.does(body)
    assert cuda_host.physical_gpus() == ()
    assert cuda_host.open_meter().read() == ()


def test_no_nvidia_smi_counts_as_no_gpu(smi: FakeSmi) -> None:
    assert cuda_host.physical_gpus() == ()


def test_nvml_is_asked_first(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-aaaa1111"), FakeGpu("GPU-aabb2222", "NVIDIA L4"))
    assert cuda_host.physical_gpus() == TWO
    assert [gpu.name for gpu in cuda_host.physical_gpus()] == ["Tesla T4", "NVIDIA L4"]


def test_nvml_tells_of_instances(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    instances = [
        FakeGpu("MIG-1111", used=GIB, utilisation=None),
        FakeGpu("MIG-2222", used=2 * GIB, utilisation=None),
    ]
    nvml(FakeGpu("GPU-cccc3333", "A100", instances=instances), FakeGpu("GPU-dddd4444"))
    assert cuda_host.physical_gpus() == PARTITIONED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    meter = cuda_host.open_meter()
    assert meter.read() == (DeviceReading("GPU 0", 2 * GIB, 16 * GIB, None),)
    meter.close()


def test_instances_keep_their_numbers_when_others_go(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-cccc3333", "A100", instances=[None, FakeGpu("MIG-2222"), None, FakeGpu("MIG-4444")]))
    assert cuda_host.physical_gpus() == (Gpu("GPU-cccc3333", ("MIG-2222", "MIG-4444")),)


def test_a_driver_that_does_not_tell_of_processes(nvml: NvmlMaker) -> None:
    """Before 510, where the module calls a function by a name that only later drivers have."""
    nvml(FakeGpu("GPU-aaaa1111", used=GIB, utilisation=40, processes={7: GIB}), is_old=True)
    meter = cuda_host.open_meter()
    assert meter.read() == (DeviceReading("GPU 0", GIB, 16 * GIB, 0.4),)
    meter.close()


def test_a_meter_reads_what_is_visible_in_the_order_of_ranks(
    nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FakeGpu("GPU-aaaa1111", used=GIB, utilisation=40, processes={7: GIB, 8: None})
    driver = nvml(first, FakeGpu("GPU-aabb2222"), FakeGpu("GPU-cc"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    meter = cuda_host.open_meter()
    assert meter.is_cheap
    assert driver.num_open == 1
    assert meter.read() == (
        DeviceReading("GPU 0", 0, 16 * GIB, 0.0),
        DeviceReading("GPU 1", GIB, 16 * GIB, 0.4, {7: GIB, 8: 0}),
    )
    first.is_lost = True
    assert [reading.name for reading in meter.read()] == ["GPU 0"]
    meter.close()


def test_a_meter_reads_by_nvidia_smi_where_there_is_no_nvml(smi: FakeSmi) -> None:
    smi.answers(
        L="GPU 0: Tesla T4 (UUID: GPU-aaaa1111)\nGPU 1: Tesla T4 (UUID: GPU-aabb2222)",
        query_gpu="GPU-aabb2222, 300, 15360, [N/A]\nGPU-aaaa1111, 1024, 15360, 25",
        query_compute_apps="GPU-aaaa1111, 4711, 1000\nGPU-aaaa1111, 4712, [N/A]",
    )
    meter = cuda_host.open_meter()
    assert not meter.is_cheap
    assert meter.read() == (
        DeviceReading("GPU 0", GIB, 15 * GIB, 0.25, {4711: 1000 << 20, 4712: 0}),
        DeviceReading("GPU 1", 300 << 20, 15 * GIB, None),
    )
    meter.close()


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        (("NVIDIA GeForce RTX 4090",) * 2, "535.129.03", "NVIDIA GeForce RTX 4090"),
        (("NVIDIA GeForce RTX 4090",) * 2, "550.40.06", "NVIDIA GeForce RTX 4090"),
        (("NVIDIA GeForce RTX 4090",) * 2, "unknown", "NVIDIA GeForce RTX 4090"),
        (("NVIDIA GeForce RTX 4090",) * 2, "550.40.07", None),
        (("NVIDIA GeForce RTX 4090",) * 2, "570.1", None),
        (("NVIDIA GeForce RTX 4090",), "535.129.03", None),
        (("NVIDIA GeForce RTX 3090",) * 2, "535.129.03", None),
        ((), "535.129.03", None),
    ],
)
def test_cards_whose_direct_connections_hang(
    nvml: NvmlMaker, names: tuple[str, ...], driver: str, expected: str | None
) -> None:
    nvml(*(FakeGpu(f"GPU-{index}", name) for index, name in enumerate(names)), driver=driver)
    assert cuda_host.lacks_p2p() == expected


def test_the_driver_is_asked_by_nvidia_smi_where_there_is_no_nvml(smi: FakeSmi) -> None:
    listing = "\n".join(f"GPU {index}: NVIDIA GeForce RTX 4080 (UUID: GPU-{index})" for index in range(2))
    smi.answers(L=listing, query_gpu="535.54\n535.54")
    assert cuda_host.lacks_p2p() == "NVIDIA GeForce RTX 4080"


def test_hidden_cards_do_not_count(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(*(FakeGpu(f"GPU-{index}", "NVIDIA GeForce RTX 4090") for index in range(2)), driver="535.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert cuda_host.lacks_p2p() is None


def test_counting_and_reading_open_no_device(smi: FakeSmi) -> None:
    smi.answers(L=LISTING)
    assert cuda_host.visible() == ["MIG-1111"]
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not any("nvidia" in target for target in opened)


def test_the_real_module_says_that_there_is_no_driver_or_lists_gpus() -> None:
    cuda_host._query_gpus.cache_clear()
    assert isinstance(cuda_host.physical_gpus(), tuple)

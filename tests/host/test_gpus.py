"""GPUs of a host, from a stub of NVML; tests/hardware/test_cuda.py uses real ones."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from nblaunch.host import gpus
from nblaunch.host.gpus import Gpu, descriptions
from tests.host.fake_nvml import FakeGpu, FakeNvml

TWO = (Gpu("GPU-aaaa1111"), Gpu("GPU-aabb2222"))
PARTITIONED = (Gpu("GPU-cccc3333", ("MIG-1111", "MIG-2222")), Gpu("GPU-dddd4444"))

NvmlMaker = Callable[..., FakeNvml]


def test_the_stub_matches_the_real_module() -> None:
    names = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real = list(inspect.signature(getattr(pynvml, name)).parameters.values())
        ours = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
        assert [one.name for one in real if one.default is one.empty][: len(ours)] == ours or not ours, name
    assert issubclass(pynvml.NVMLError, Exception)


@pytest.mark.parametrize("has_device", [False, True])
def test_a_driver_in_a_bad_state_counts_as_no_gpu_and_is_named(
    nvml: NvmlMaker, tmp_path: Path, has_device: bool
) -> None:
    nvml(has_driver=False)
    if has_device:
        (tmp_path / "nvidia0").touch()
    assert gpus.physical_gpus() == ()
    assert gpus.open_meter().read() == []
    reason = gpus.uncounted()
    assert (
        (f"{tmp_path}/nvidia0" in str(reason) and "Library Not Found" in str(reason))
        if has_device
        else not reason
    )


def test_a_missing_package_is_named(nvml: NvmlMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml()
    (tmp_path / "nvidia0").touch()
    assert gpus.uncounted() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus._listed.cache_clear()
    assert gpus.physical_gpus() == ()
    assert "pip install nvidia-ml-py" in str(gpus.uncounted())
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu("GPU-aaaa1111")]))  # a cell has installed it
    assert [gpu.uuid for gpu in gpus.physical_gpus()] == ["GPU-aaaa1111"]


def test_gpus_are_described(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-aaaa1111", total=15360 << 20), FakeGpu("GPU-aabb2222", "NVIDIA L4"))
    assert descriptions() == ["Tesla T4, 550.54.15, 15360 MiB", "NVIDIA L4, 550.54.15, 16384 MiB"]
    nvml(has_driver=False)
    assert descriptions() == []


LAUNCH = """
import sys
sys.modules["pynvml"] = None  # not installed, which is where a program was asked before
from nblaunch import notebook_launcher
from nblaunch.cli import main
def train():
    import time
    time.sleep(0.3)  # workers are watched in the meantime
notebook_launcher(train, num_processes=2)
sys.exit(main(["env"]))
"""


def test_gpu_tools_do_not_run_before_the_first_step(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n")
    program.chmod(0o755)
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NBLAUNCH_LOG_DIR": str(tmp_path / "logs")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (tmp_path / "calls").exists()


def test_nvml_counts_gpus(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-aaaa1111"), FakeGpu("GPU-aabb2222", "NVIDIA L4"))
    assert gpus.physical_gpus() == TWO
    assert [gpu.name for gpu in gpus.physical_gpus()] == ["Tesla T4", "NVIDIA L4"]


def test_nvml_reports_instances(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    instances = [FakeGpu("MIG-1111", utilisation=None), FakeGpu("MIG-2222", utilisation=None)]
    nvml(FakeGpu("GPU-cccc3333", "A100", instances=instances), FakeGpu("GPU-dddd4444"))
    assert gpus.physical_gpus() == PARTITIONED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    meter = gpus.open_meter()
    assert meter.read() == [None]
    meter.close()


def test_instances_keep_their_numbers(nvml: NvmlMaker) -> None:
    nvml(FakeGpu("GPU-cccc3333", "A100", instances=[None, FakeGpu("MIG-2222"), None, FakeGpu("MIG-4444")]))
    assert gpus.physical_gpus() == (Gpu("GPU-cccc3333", ("MIG-2222", "MIG-4444")),)


def test_a_meter_reads_visible_gpus_in_rank_order(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeGpu("GPU-aaaa1111", utilisation=40)
    driver = nvml(first, FakeGpu("GPU-aabb2222"), FakeGpu("GPU-cc"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    meter = gpus.open_meter()
    assert driver.num_open == 1
    assert meter.read() == [0.0, 0.4]
    first.is_lost = True
    assert meter.read() == [0.0, None]
    meter.close()


def test_gpus_of_unknown_number_are_not_metered(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, CUDA puts the fastest GPU first, and NVML the GPU with the lowest bus number."""
    nvml(FakeGpu("GPU-aaaa1111", utilisation=40), FakeGpu("GPU-aabb2222", "NVIDIA A100"))
    assert gpus.open_meter().read() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aab,GPU-aaa")  # by name, in this order
    meter = gpus.open_meter()
    assert meter.read() == [0.0, 0.4]
    meter.close()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    meter = gpus.open_meter()
    assert meter.read() == [0.4, 0.0]
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
    assert gpus.lacks_p2p() == expected


def test_possibly_hidden_cards_count(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(*(FakeGpu(f"GPU-{name}", f"NVIDIA {name}") for name in ("L4", "T4", "RTX 4090")), driver="535.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus.lacks_p2p() == "NVIDIA RTX 4090"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert gpus.lacks_p2p() is None


def test_hidden_cards_do_not_count(nvml: NvmlMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(*(FakeGpu(f"GPU-{index}", "NVIDIA GeForce RTX 4090") for index in range(2)), driver="535.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.lacks_p2p() is None


def test_the_real_module_works_with_and_without_driver() -> None:
    gpus._listed.cache_clear()
    assert isinstance(gpus.physical_gpus(), tuple)

"""AMD and Intel GPUs, from simulated files of the Linux kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from nblaunch.host import gpus
from tests.contracts.simulated import VARIABLES, write_amd, write_intel

FIRST, SECOND, THIRD = "GPU-000000000000ab01", "GPU-000000000000cd02", "GPU-renderD130"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpus, "_CLASSES", tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [FIRST, SECOND, THIRD]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [THIRD, FIRST]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [SECOND]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [FIRST]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000cd02,0"}, [SECOND, FIRST]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [THIRD]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_variables_select_amd_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[str]
) -> None:
    write_amd(folder, (0xAB01, 0xCD02, 0))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [gpu.uuid for gpu in gpus.visible_amd_gpus()] == expected


def test_amd_gpus_that_a_container_lacks_are_not_counted(folder: Path) -> None:
    write_amd(folder)
    properties = folder / "kfd/kfd/topology/nodes/1/properties"
    properties.unlink()
    properties.mkdir()  # can't be read, not even by root
    assert [gpu.uuid for gpu in gpus.amd_gpus()] == [SECOND]


def test_utilisation_of_amd_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_amd(folder)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    meter = gpus.AmdMeter(gpus.visible_amd_gpus())
    assert meter.read() == [0.25, 0.25]
    (folder / "drm/renderD129/device/gpu_busy_percent").unlink()
    assert meter.read() == [None, 0.25]


def test_hosts_without_such_gpus_count_none(folder: Path) -> None:
    write_intel(folder, "0000:01:00.0", vendor="0x10de")
    assert (gpus.amd_gpus(), gpus.num_intel_gpus(), gpus.num_visible_intel_gpus()) == ((), 0, 0)


def test_integrated_gpus_count_only_without_cards(folder: Path) -> None:
    write_intel(folder, "0000:00:02.0")
    assert gpus.num_intel_gpus() == 1
    write_intel(folder, "0000:03:00.0", "0000:83:00.0")
    assert gpus.num_intel_gpus() == 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 4),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 2),
        ({"ZE_AFFINITY_MASK": "0,3"}, 2),
        ({"ZE_AFFINITY_MASK": "1,9"}, 1),
        ({"ZE_AFFINITY_MASK": "0.0,0.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 2),
        ({"ZE_AFFINITY_MASK": ""}, 4),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, 4),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:cpu;level_zero:1,2,7"}, 2),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:*"}, 0),
        ({"ONEAPI_DEVICE_SELECTOR": "*:*"}, 4),
    ],
)
def test_intel_gpus_are_counted_by_visible_tile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    write_intel(folder, "0000:03:00.0", "0000:83:00.0", num_tiles=2)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert gpus.num_visible_intel_gpus() == expected

"""nblaunch interprets CUDA_VISIBLE_DEVICES as CUDA does."""

from __future__ import annotations

import pytest

from nblaunch.host.gpus import Gpu, visible_devices

TWO = (Gpu("GPU-aaaa1111"), Gpu("GPU-aabb2222"))
EMPTY = Gpu("GPU-eeee5555", is_partitioned=True)
PARTITIONED = (Gpu("GPU-cccc3333", ("MIG-1111", "MIG-2222")), Gpu("GPU-dddd4444"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["GPU-aaaa1111", "GPU-aabb2222"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", ["GPU-aabb2222"]),
        ("1, 0", ["GPU-aabb2222", "GPU-aaaa1111"]),
        ("0,-1,1", ["GPU-aaaa1111"]),
        ("0,7,1", ["GPU-aaaa1111"]),
        ("0,0", []),
        ("GPU-aabb", ["GPU-aabb2222"]),
        ("GPU-aa", []),
        ("GPU-aaaa1111,1", ["GPU-aaaa1111", "GPU-aabb2222"]),
        ("GPU-ffff", []),
    ],
)
def test_cuda_visible_devices(setting: str | None, expected: list[str]) -> None:
    assert visible_devices(TWO, setting) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["MIG-1111", "MIG-2222"]),
        ("0", ["MIG-1111", "MIG-2222"]),
        ("GPU-cccc", ["MIG-1111", "MIG-2222"]),
        ("1", ["GPU-dddd4444"]),
        ("MIG-2222", ["MIG-2222"]),
        ("MIG-2222,MIG-1111", ["MIG-2222", "MIG-1111"]),
        ("0,MIG-1111", []),
    ],
)
def test_each_partition_serves_one_worker(setting: str | None, expected: list[str]) -> None:
    assert visible_devices(PARTITIONED, setting) == expected


@pytest.mark.parametrize("setting", [None, "0,1", "GPU-dddd4444,MIG-1111,MIG-2222"])
def test_partitions_hide_whole_gpus(setting: str | None) -> None:
    assert visible_devices(PARTITIONED[::-1], setting) == ["MIG-1111", "MIG-2222"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, ["GPU-aaaa1111"]), ("0", []), ("1", ["GPU-aaaa1111"]), ("1,0", ["GPU-aaaa1111"])],
)
def test_a_gpu_without_partitions_in_mig_mode_is_hidden(setting: str | None, expected: list[str]) -> None:
    assert visible_devices((EMPTY, TWO[0]), setting) == expected

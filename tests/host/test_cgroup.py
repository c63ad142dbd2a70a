"""Limits of control groups of versions 1 and 2, read from simulated file trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from nblaunch.backends.cpu import cpu_quota
from nblaunch.host import memory, proc

HOST = {"MemTotal": 16_000, "MemAvailable": 9_000}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def own(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "own"
    file.write_text(text)
    return file


def test_version_2_reads_from_the_group_to_the_root(tmp_path: Path) -> None:
    found = proc.cgroup_folders("memory", tmp_path, own(tmp_path, "0::/user/notebook\n"))
    assert found == [tmp_path / "user" / "notebook", tmp_path / "user", tmp_path]


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    groups = own(tmp_path, "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n1:name=systemd:/\n")
    base = tmp_path / "cpu"
    assert proc.cgroup_folders("cpu", tmp_path, groups) == [base / "docker" / "ab", base / "docker", base]


def test_without_control_groups_there_are_no_folders(tmp_path: Path) -> None:
    assert proc.cgroup_folders("cpu", tmp_path, tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
        ({"a/cpu.max": "max 100000", "cpu.max": "400000 100000"}, 4.0),
        ({"a/cpu.max": "200000 100000", "cpu.max": "100000 100000"}, 1.0),
        ({"a/cpu.cfs_quota_us": "50000", "a/cpu.cfs_period_us": "100000"}, 0.5),
        ({"a/cpu.cfs_quota_us": "-1", "a/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    root = tree(tmp_path, files)
    assert cpu_quota([root / "a", root]) == quota


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (16_000, 9_000)),
        ({"memory.max": "max", "memory.current": "5000"}, (16_000, 9_000)),
        ({"memory.max": "4000", "memory.current": "1000"}, (4_000, 3_000)),
        (
            {"memory.max": "4000", "memory.current": "3900", "memory.stat": "anon 9\ninactive_file 500"},
            (4_000, 600),
        ),
        ({"memory.max": "12000", "memory.current": "0"}, (12_000, 9_000)),
        ({"memory.max": "4000", "memory.current": "4100"}, (4_000, 0)),
        ({"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1"}, (16_000, 9_000)),
        (
            {
                "memory.limit_in_bytes": "2000",
                "memory.usage_in_bytes": "1900",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 2",
            },
            (2_000, 102),
        ),
        ({"a/memory.max": "4000", "a/memory.current": "0", "memory.max": "3000"}, (3_000, 3_000)),
    ],
)
def test_memory_is_bounded_by_the_tightest_limit(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int]
) -> None:
    root = tree(tmp_path, files)
    assert memory.within(HOST, [root / "a", root]) == expected


def test_a_host_that_reports_nothing_leaves_memory_unknown(tmp_path: Path) -> None:
    root = tree(tmp_path, {"memory.max": "4000", "memory.current": "1000"})
    assert memory.within({}, [root]) == (None, None)

"""Reasons why a file system is full, and the space of parts of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nblaunch.host import files


def problem(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_file_that_can_grow_keeps_size_and_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    assert files.growth_problem(path, 1 << 14) is None
    assert path.read_bytes() == b"text"
    assert files.growth_problem(tmp_path / "none", 1 << 14) is None


@pytest.mark.parametrize(
    ("number", "is_reported"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EOPNOTSUPP, False)]
)
def test_growth_fails_only_without_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_reported: bool
) -> None:
    def reject(*_: object) -> None:
        raise problem(number)

    path = tmp_path / "file"
    path.touch()
    monkeypatch.setattr(files, "_allocate", reject)
    reason = files.growth_problem(path, 1 << 14)
    assert (reason == os.strerror(number)) if is_reported else reason is None


@pytest.mark.parametrize(
    ("used_up", "wanted"),
    [
        ({"f_bfree": 0, "f_bavail": 0}, "is full"),
        ({"f_ffree": 0, "f_favail": 0}, "no inodes"),
        ({}, "No space left"),
    ],
)
def test_the_exhausted_resource_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_up: dict[str, int], wanted: str
) -> None:
    names = (
        "f_bsize",
        "f_frsize",
        "f_blocks",
        "f_bfree",
        "f_bavail",
        "f_files",
        "f_ffree",
        "f_favail",
        "f_flag",
        "f_namemax",
    )
    status = os.statvfs_result([used_up.get(name, 4096) for name in names])
    monkeypatch.setattr(files.os, "statvfs", lambda _: status)
    assert wanted in files.reason_of(tmp_path / "not" / "there", problem(errno.ENOSPC))


def test_other_errors_keep_the_systems_words(tmp_path: Path) -> None:
    assert files.reason_of(tmp_path, problem(errno.EROFS)) == os.strerror(errno.EROFS)


def test_part_of_a_file_can_be_freed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 << 20))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        before = os.fstat(file.fileno()).st_blocks
        files.free_range(file.fileno(), 1 << 20, 1 << 20)
        after = os.fstat(file.fileno())
    assert after.st_size == 3 << 20
    assert (before - after.st_blocks) * 512 == 1 << 20
    assert path.read_bytes() == b"x" * (1 << 20) + b"\0" * (1 << 20) + b"x" * (1 << 20)

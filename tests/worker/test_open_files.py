"""Separate positions in files that a process has inherited."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.files import file_objects
from nblaunch.worker.inheritance.positions import OpenFile

TEXT = b"0123456789"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def opened() -> Iterator[Callable[..., int]]:
    fds: list[int] = []

    def open_it(path: Path, flags: int = os.O_RDONLY) -> int:
        fds.append(os.open(path, flags))
        return fds[-1]

    yield open_it
    for fd in fds:
        os.close(fd)


def files_of(*fds: int) -> list[OpenFile]:
    return [file for file in positions.OpenDescriptors.of_this_process(()).files if set(file.fds) & set(fds)]


def in_child(function: Callable[[], object]) -> bool:
    """Return whether ``function`` is true in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_forked_reads_do_not_move_other_positions(path: Path, opened: Callable[..., int]) -> None:
    fd = opened(path)
    os.read(fd, 4)
    files = files_of(fd)
    assert in_child(lambda: positions.renew(files) == [] and os.read(fd, 10) == b"456789")
    assert os.lseek(fd, 0, os.SEEK_CUR) == 4


def test_file_flags_are_kept(path: Path, opened: Callable[..., int]) -> None:
    fd = opened(path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW)
    os.set_inheritable(fd, True)
    files = files_of(fd)
    assert files[0].flags & os.O_NONBLOCK

    def is_as_before() -> bool:
        shared, flags = positions.renew(files), files_of(fd)[0].flags
        return shared == [] and flags == files[0].flags & ~os.O_NOFOLLOW and os.get_inheritable(fd)

    assert in_child(is_as_before)


def test_shared_positions_stay_shared(path: Path, opened: Callable[..., int]) -> None:
    first, other = opened(path), opened(path)
    second = os.dup(first)
    try:
        files = files_of(first, second, other)
        assert sorted(file.fds for file in files) == sorted([(first, second), (other,)])

        def moves_together() -> bool:
            positions.renew(files)
            os.lseek(first, 7, os.SEEK_SET)
            return os.read(second, 1) == b"7" and os.read(other, 1) == b"0"

        assert in_child(moves_together)
        assert os.lseek(first, 0, os.SEEK_CUR) == 0
    finally:
        os.close(second)


def test_many_descriptors_of_one_file(path: Path, opened: Callable[..., int]) -> None:
    fds = [opened(path) for _ in range(9)]
    copies = [os.dup(fds[number]) for number in (0, 0, 4)]
    try:
        together = sorted(sorted(file.fds) for file in files_of(*fds))
        assert together == sorted(
            [[fds[0], *copies[:2]], [fds[4], copies[2]], *([fd] for fd in fds if fd not in (fds[0], fds[4]))]
        )
    finally:
        for fd in copies:
            os.close(fd)


def test_a_file_without_a_name(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(TEXT)
        file.flush()
        files = files_of(file.fileno())

        def is_read() -> bool:
            positions.renew(files)
            file.seek(2)
            return file.read() == TEXT[2:]

        assert in_child(is_read)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == len(TEXT)


def test_closed_or_replaced_files_are_left_alone(
    path: Path, tmp_path: Path, opened: Callable[..., int]
) -> None:
    closed, replaced = os.open(path, os.O_RDONLY), opened(path)
    os.read(replaced, 3)
    files = files_of(closed, replaced)
    os.close(closed)
    (tmp_path / "other").write_bytes(b"other")
    other = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(other, replaced)
    os.close(other)
    assert positions.renew(files) == []
    assert os.read(replaced, 5) == b"other"


def test_files_that_cannot_be_reopened_are_returned(
    path: Path, opened: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = opened(path)
    files = files_of(fd)
    moved = path.rename(path.with_name("moved"))
    with monkeypatch.context() as patched:
        patched.setattr(positions, "_FOLDER", "/no/such/folder")
        assert positions.renew(files) == files
        assert files[0].name == f"descriptor {fd}"
        assert files_of(fd)  # numbers are tried
    assert files[0].name == str(moved)


def test_concurrently_opened_files_are_tolerated(path: Path, opened: Callable[..., int]) -> None:
    fd = opened(path, os.O_RDWR)
    is_over = threading.Event()

    def open_and_close() -> None:
        while not is_over.is_set():
            first = os.open(path, os.O_RDWR)
            second = os.dup(first)
            os.close(first)
            os.close(second)

    threads = [threading.Thread(target=open_and_close) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            assert any(fd in file.fds for file in positions.OpenDescriptors.of_this_process(()).files)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_concurrently_closed_descriptors_are_left_out(
    path: Path, opened: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = [opened(path, os.O_RDWR), opened(path, os.O_RDWR)]
    closing = os.open(path, os.O_RDWR)
    sharing = positions._sharing

    def close_first(fds: Sequence[int], flags: int) -> Collection[Sequence[int]]:
        if closing in fds:
            os.close(closing)
        return sharing(fds, flags)

    monkeypatch.setattr(positions, "_sharing", close_first)
    assert sorted(file.fds for file in files_of(*fds, closing)) == [(fds[0],), (fds[1],)]


def test_a_file_closed_after_the_listing_has_no_file_objects(path: Path) -> None:
    closed = os.open(path, os.O_RDWR)
    os.close(closed)
    assert not file_objects([closed])


def test_files_of_nblaunch_are_left_out_under_every_descriptor(
    path: Path, opened: Callable[..., int]
) -> None:
    fd = opened(path)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ):  # has its own descriptor
        own = {positions.identity(fd)}
        assert not [
            file for file in positions.OpenDescriptors.of_this_process(own).files if file.name == str(path)
        ]
        assert [
            file for file in positions.OpenDescriptors.of_this_process(()).files if file.name == str(path)
        ]

"""Log files that exceed their limit lose their beginning and keep the newest lines."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.events import Event, LogLines, Note
from nblaunch.host import files
from nblaunch.launcher.logtail import LogTail, read_log
from tests.kernels import Kernel

MAX_BYTES = 1 << 20
LINE_BYTES = 42


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.log"


@pytest.fixture
def tail(path: Path) -> Iterator[LogTail]:
    tail = LogTail(0, path, MAX_BYTES)
    yield tail
    tail.close()


def numbered(start: int, count: int) -> bytes:
    return b"".join(b"line %09d of a rank that prints a lot\n" % i for i in range(start, start + count))


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def numbers(lines: list[str]) -> list[int]:
    return [
        int(match[1])
        for line in lines
        if (match := re.match(r"line (\d{9}) of a rank that prints a lot$", line))
    ]


def shown(events: list[Event]) -> list[str]:
    return [line for event in events if isinstance(event, LogLines) for line in event.lines]


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_the_end_of_a_log_is_kept(tail: LogTail, path: Path) -> None:
    events: list[Event] = []
    for part in range(100):
        append(path, numbered(1000 * part, 1000))
        events += tail.read()
        assert on_disk(path) <= MAX_BYTES + 65536
    assert numbers(shown(events)) == list(range(100_000))  # the launcher has read all of it
    (note,) = notes(events)
    assert str(path) in note
    assert "NBLAUNCH_LOG_LIMIT_MB" in note
    notice, *lines = read_log(path).splitlines()
    kept = numbers(lines)
    assert kept == list(range(kept[0], 100_000))
    assert len(kept) * LINE_BYTES > MAX_BYTES // 2 - 2 * LINE_BYTES
    assert "\0" not in read_log(path)
    assert read_log(path, max_bytes=90).splitlines()[-1] == lines[-1]
    dropped = re.search(r"([\d.]+) MB of output", notice)
    assert dropped is not None
    assert float(dropped[1]) * 1e6 == pytest.approx(path.stat().st_size - on_disk(path), abs=20_000)


def test_output_faster_than_reading_is_skipped(tail: LogTail, path: Path) -> None:
    append(path, numbered(0, 100))
    assert len(shown(tail.read())) == 100
    append(path, numbered(100, 100_000))
    got = shown(list(tail.read_rest()))
    assert on_disk(path) <= MAX_BYTES + 65536
    assert "3.73 MB of output dropped" in got[0]
    assert numbers(got)[-1] == 100_099
    assert numbers(got) == list(range(numbers(got)[0], 100_100))


def test_holes_are_skipped_without_querying_the_file_system(
    tail: LogTail, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems first write a file to the disk or the server when they are queried about it."""
    seek = os.lseek

    def reject(fd: int, position: int, whence: int) -> int:
        assert whence != os.SEEK_DATA
        return seek(fd, position, whence)

    monkeypatch.setattr(os, "lseek", reject)
    append(path, numbered(0, 100_000))
    got = shown(list(tail.read_rest()))
    assert "dropped" in got[0]
    assert "\0" not in "".join(got)
    assert numbers(got) == list(range(numbers(got)[0], 100_000))


def test_concurrent_output_is_not_lost(path: Path) -> None:
    """Its file is never moved, truncated or appended to."""
    append(path, b"")
    tail = LogTail(0, path, MAX_BYTES)
    writer = threading.Thread(
        target=lambda: [append(path, numbered(100 * part, 100)) for part in range(1000)], daemon=True
    )
    writer.start()
    got: list[str] = []
    while writer.is_alive():
        got += shown(tail.read(max_bytes=MAX_BYTES // 4))
    writer.join()
    got += shown(list(tail.read_rest()))
    tail.close()
    kept = numbers(read_log(path).splitlines())
    assert kept == list(range(kept[0], 100_000))
    assert numbers(got)[-1] == 99_999


def test_log_grows_without_hole_support_and_says_so(
    tail: LogTail, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(files, "free_range", reject)
    append(path, numbered(0, 50_000))
    (note,) = notes(tail.read())
    assert "can't free" in note
    append(path, numbered(50_000, 50_000))
    assert notes(tail.read()) == []
    assert len(numbers(read_log(path).splitlines())) == 100_000


def test_the_launcher_keeps_the_log_of_a_rank_within_its_limit(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.run(
        f"""
import os
os.environ.update(NBLAUNCH_LOG_LIMIT_MB="1", NBLAUNCH_LOG_DIR={str(tmp_path)!r})
from nblaunch import last_job, notebook_launcher
def train():
    import subprocess, sys
    for i in range(100_000):
        print("line", i, "x" * 50)
    sys.stdout.flush()
    subprocess.run(["sh", "-c", "echo a child prints; echo to both >&2"], check=True)
notebook_launcher(train, num_processes=1)
path = last_job().log_dir / "attempt_0" / "rank_0.log"
lines = last_job().logs().splitlines()
lines[-2:], sum("MB of output dropped" in line for line in lines), path.stat().st_blocks * 512
"""
    )
    last, num_notices, size = cell.value
    assert last == ["a child prints", "to both"]
    assert num_notices == 1
    assert size < 1_100_000
    assert "NBLAUNCH_LOG_LIMIT_MB" in cell.stdout

"""Conversion of growing log files to lines and status."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.events import LogLines, StatusLine
from nblaunch.launcher import logtail
from nblaunch.launcher.logtail import LogTail, read_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.log"


@pytest.fixture
def tail(path: Path) -> Iterator[LogTail]:
    tail = LogTail(0, path)
    yield tail
    tail.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def lines(events: object) -> list[str]:
    return [line for event in events if isinstance(event, LogLines) for line in event.lines]  # type: ignore[attr-defined]


def status(events: object) -> list[str]:
    return [event.text for event in events if isinstance(event, StatusLine)]  # type: ignore[attr-defined]


def test_unfinished_lines_become_status(tail: LogTail, path: Path) -> None:
    assert tail.read() == []  # the file does not exist yet
    append(path, b"one\ntw")
    events = tail.read()
    assert (lines(events), status(events)) == (["one"], ["tw"])
    assert tail.read() == []
    append(path, b"o\n\nthree")
    events = tail.read()
    assert (lines(events), status(events)) == (["two", ""], ["three"])
    assert lines(tail.read_rest()) == ["three"]
    assert list(tail.read_rest()) == []


def test_harmless_gloo_lines_are_hidden(tail: LogTail, path: Path) -> None:
    """torch 2.8 and 2.9 print them in every rank, for every process group."""
    message = (
        b"[Gloo] Rank 1 is connected to %d peer ranks. Expected number of connected peer ranks is : %d\n"
    )
    append(path, message % (3, 3))
    assert tail.read() == []
    append(
        path, b"one\n" + message % (12, 12) + b"> " + message % (3, 3) + b"[Gloo] two\n" + message % (2, 12)
    )
    shown = [
        "one",
        "> " + (message % (3, 3)).decode().rstrip(),
        "[Gloo] two",
        (message % (2, 12)).decode().rstrip(),
    ]
    assert lines(tail.read()) == shown
    assert read_log(path).splitlines() == shown
    assert path.read_bytes().count(message % (3, 3)) == 2  # nothing is lost


def test_a_bar_is_status_until_its_line_ends(tail: LogTail, path: Path) -> None:
    append(path, b"\r 10%|#   \r 20%|##  ")
    assert status(tail.read()) == [" 20%|##"]
    append(path, b"\r 20%|##  ")
    assert tail.read() == []  # nothing new
    append(path, b"\r100%|####\nnext\n")
    events = tail.read()
    assert (lines(events), status(events)) == (["100%|####", "next"], [""])


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20), max_size=20),
       st.integers(1, 7))  # fmt: skip
def test_no_line_is_lost_for_any_reads(texts: list[str], step: int) -> None:
    fd = os.memfd_create("log")
    os.write(fd, "".join(f"{text}\n" for text in texts).encode())
    tail = LogTail(0, Path(f"/proc/self/fd/{fd}"))
    got = []
    for _ in range(3):
        got += lines(tail.read(max_bytes=step))  # even in the middle of a character
    got += lines(tail.read_rest())
    tail.close()
    os.close(fd)
    assert got == [text.replace("\x1b[A", "").rstrip() for text in texts]


def test_the_rest_is_read_past_empty_parts(
    tail: LogTail, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logtail, "_MAX_BYTES_A_TICK", 100)
    append(path, b"first\n" + b" " * 1000 + b"\n" + b"\r" * 1000 + b"last\nunfinished")
    assert lines(tail.read_rest()) == ["first", "", "last", "unfinished"]


def test_a_large_rest_is_read_in_parts(tail: LogTail, path: Path) -> None:
    append(path, b"a line of 16 B.\n" * (20 << 16))
    rest = tail.read_rest()
    next(rest)
    assert path.stat().st_size == 20 << 20
    assert os.lseek(tail._fd, 0, os.SEEK_CUR) < 10 << 20


def test_a_line_of_many_megabytes_is_cut(tail: LogTail, path: Path) -> None:
    append(path, b"\r" + b"x" * (3 << 20))
    (text,) = status(tail.read())
    assert 100 < len(text) < 10_000
    append(path, b"\nnext\n")
    cut, following = lines(tail.read())
    assert cut.startswith("x" * 1000)
    assert "3.08 MB more" in cut
    assert len(cut) < 100_000
    assert following == "next"
    assert len(read_log(path).splitlines()[0]) == 3 << 20  # the file has the whole line


@given(
    st.text("a\rb\n", max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=9), st.sampled_from((2, 1 << 16))
)  # fmt: skip
def test_carriage_returns_may_be_split(text: str, sizes: list[int], max_line: int) -> None:
    fd = os.memfd_create("log")
    os.write(fd, text.encode())
    tail = LogTail(0, Path(f"/proc/self/fd/{fd}"))
    got: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logtail, "_MAX_LINE_BYTES", max_line)
        for size in sizes:
            got += lines(tail.read(max_bytes=size))
        got += lines(tail.read_rest())
    tail.close()
    os.close(fd)
    seen = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    if not seen[-1]:
        seen.pop()
    wanted = [line if len(line) <= max_line else line[:max_line] + " ..." for line in seen]
    assert [line if " ... " not in line else line.partition(" ... ")[0] + " ..." for line in got] == wanted


def test_a_bar_that_never_ends_takes_no_memory(tail: LogTail, path: Path) -> None:
    """All redraws were once kept and copied at each reading: 100 MB of them took 360 MB and seconds of processor
    time.
    """
    bars = b"".join(b"\r%6d%%|%s" % (i, b"#" * 92) for i in range(10_000))
    tracemalloc.start()
    try:
        for _ in range(40):
            append(path, bars)
            assert len(tail.read()) <= 1
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == 40 * len(bars)
    assert peak_bytes < 8 << 20
    assert lines(tail.read_rest()) == ["  9999%|" + "#" * 92]


def test_a_log_shows_what_the_terminal_showed(path: Path) -> None:
    append(path, b"start\n\r 10%\r100%\nbad \xff byte\nno end")
    assert read_log(path) == "start\n100%\nbad � byte\nno end"
    assert read_log(path.with_name("none")) == ""
    assert read_log(path, max_bytes=9) == "te\nno end"


def test_parts_dropped_by_another_process_are_skipped(tail: LogTail, path: Path) -> None:
    append(path, b"first\n")
    assert lines(tail.read()) == ["first"]
    with path.open("r+b") as file:
        file.truncate(0)
        file.seek(1 << 18)
        file.write(b"last\n")
    assert lines(tail.read()) == ["last"]


def test_unread_removed_log_is_restored(path: Path) -> None:
    path.touch()
    tail = LogTail(0, path, keeps_file=True)
    with path.open("w") as log:  # its rank still has the file open
        path.unlink()
        log.write("first\nlast\n")
    try:
        events = list(tail.read_rest())
    finally:
        tail.close()
    assert [line for event in events if isinstance(event, LogLines) for line in event.lines] == [
        "first",
        "last",
    ]
    assert path.read_text() == "first\nlast\n"

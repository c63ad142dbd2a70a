"""Formatting of sizes, counts and ranks, and parsing of sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch import formatting

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (67_108_864, "67.1 MB"),
        (999.4e6, "999 MB"),
        (999.6e6, "1.00 GB"),
        (24e9, "24.0 GB"),
        (3e12, "3.00 TB"),
        (4.5e15, "4500 TB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert formatting.size(num_bytes) == text


@given(st.integers(0, 999 * 10**12))
def test_sizes_have_three_digits(num_bytes: int) -> None:
    found = re.fullmatch(r"(\d\.\d\d|\d\d\.\d|\d{1,3}) ([kMGT]?B)", formatting.size(num_bytes))
    assert found is not None
    assert float(found[1]) * UNITS[found[2]] == pytest.approx(num_bytes, rel=0.0051)


def test_equal_looking_sizes_are_shown_once() -> None:
    assert formatting.size_range([1_001_000, 1_000_000]) == "1.00 MB"
    assert formatting.size_range([4000, 1000, 2000]) == "1.00 kB to 4.00 kB"


def test_counts() -> None:
    assert [formatting.count(number, "process") for number in (0, 1, 2, 1200)] == [
        "0 processes",
        "1 process",
        "2 processes",
        "1,200 processes",
    ]
    assert formatting.count(3, "more rank") == "3 more ranks"


def test_long_lists_are_shortened() -> None:
    assert formatting.first(["a", "b"], 2) == "a, b"
    assert formatting.first(["a", "b", "c", "d"], 2, "; ") == "a; b and 2 more"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ({1, 0}, "ranks 0 and 1"),
        ([0, 2, 5, 6, 7], "ranks 0, 2 and 5-7"),
        ({7: "", 2: "", 6: ""}, "ranks 2, 6 and 7"),
        (range(64), "ranks 0-63"),
        ([], "ranks "),
    ],
)
def test_ranks(ranks: list[int], text: str) -> None:
    assert formatting.ranks(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_spans_name_every_rank_once(ranks: set[int]) -> None:
    named: list[int] = []
    for span in formatting.spans(ranks).split(", "):
        first, _, last = span.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


def test_ranks_with_equal_texts_are_grouped_in_order() -> None:
    grouped = formatting.ranks_by_text({3: "b", 0: "a", 2: "a", 1: "b"})
    assert list(grouped.items()) == [("a", [0, 2]), ("b", [1, 3])]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("5GB", 5 * 10**9),
        ("5 GiB", 5 * 2**30),
        ("1.5kb", 1500),
        ("200MiB", 200 * 2**20),
        ("3B", 3),
        ("80G", 80 * 10**9),
    ],
)
def test_sizes_are_read(text: Any, size: int) -> None:
    assert formatting.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", 0, -5, None, "5PB", "1.2.3GB", 2.5])
def test_invalid_sizes_are_rejected(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a size; pass"):
        formatting.parse_size(text)


def test_table_cells_are_aligned() -> None:
    rows = [("job", "status", "n"), ("train-1", "done", "12"), ("x", "", "")]
    assert formatting.columns(rows) == ["job      status  n", "train-1  done    12", "x"]
    assert formatting.columns(rows, num_left=1) == ["job      status   n", "train-1    done  12", "x"]
    assert formatting.columns([]) == []


def test_sentences_have_articles_and_lists() -> None:
    assert [formatting.kind(value) for value in ("", 1, None, [])] == ["a str", "an int", "None", "a list"]
    assert [formatting.joined([*"abc"[:number]]) for number in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert formatting.joined(["'ray'", "'ssh'"], "or") == "'ray' or 'ssh'"

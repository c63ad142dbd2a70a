"""Shortening of long texts."""

from __future__ import annotations

import pytest

from nblaunch.wire.exceptions import fewer_lines, shortened


def test_short_texts_are_unchanged() -> None:
    assert shortened("abc", 3) == "abc"
    assert fewer_lines("a\nb\n", 2) == "a\nb\n"


def test_long_texts_lose_their_middle() -> None:
    assert shortened("a" * 1000 + "b" * 1000, 10) == "aaaaa... (1,990 characters omitted) ...bbbbb"


@pytest.mark.parametrize("max_lines", [3, 4, 6, 9, 25])
def test_first_and_last_lines_are_kept(max_lines: int) -> None:
    text = "\n".join(map(str, range(100)))
    first, *_, last = lines = fewer_lines(text, max_lines).splitlines()
    assert (first, last, len(lines)) == ("0", "99", max_lines)
    assert f"({100 - max_lines + 1} lines omitted" in "\n".join(lines)

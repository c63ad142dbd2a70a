"""Shortening of long texts."""

from __future__ import annotations

import pytest

from nblaunch.wire.exceptions import fewer_lines, shortened


def test_a_short_text_stays() -> None:
    assert shortened("abc", 3) == "abc"
    assert fewer_lines("a\nb\n", 2) == "a\nb\n"


def test_the_middle_of_a_long_one_is_left_out() -> None:
    assert shortened("a" * 1000 + "b" * 1000, 10) == "aaaaa... (1,990 characters omitted) ...bbbbb"


@pytest.mark.parametrize("max_lines", [3, 4, 6, 9, 25])
def test_no_more_lines_than_wanted_with_the_first_and_the_last(max_lines: int) -> None:
    text = "\n".join(map(str, range(100)))
    first, *_, last = lines = fewer_lines(text, max_lines).splitlines()
    assert (first, last, len(lines)) == ("0", "99", max_lines)
    assert f"({100 - max_lines + 1} lines omitted" in "\n".join(lines)

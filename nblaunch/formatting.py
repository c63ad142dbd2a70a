"""Formats sizes, counts, ranks, durations, rates, losses and columns the same way in messages, notes and dashboards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

_MAX_LENGTH = 400  # characters
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_BREAKS = re.compile(r"[\n\v\f\r\x85\u2028\u2029]+")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?|B)\s*", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def size(num_bytes: float) -> str:
    """Format a number of bytes with three digits in decimal units: ``812 MB``, ``1.31 GB``, ``24.0 GB``."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007  larger sizes keep the last unit
        num_bytes /= 1000
        if num_bytes < 999.5:
            break
    return f"{num_bytes:.{2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0}f} {unit}"


def parse_size(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` and ``"5G"`` are 5 * 10**9, ``"5GiB"`` 5 * 2**30; numbers are bytes.

    Raises:
        ValueError: ``size`` is neither a size nor a number, or is not positive.
    """
    if isinstance(size, int) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"{size!r} is not a size; pass a positive number of bytes, or text such as '5GB' or '200MiB'"
        )
    base, exponent = 1024 if match[3] else 1000, "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return max(1, int(float(match[1]) * base**exponent))


def size_range(sizes: Sequence[int]) -> str:
    """Return the range of sizes, ``1.00 GB to 1.31 GB``, or one size if both ends have the same text."""
    low, high = size(min(sizes)), size(max(sizes))
    return high if low == high else f"{low} to {high}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 process``, ``4 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}es" if noun.endswith(("s", "ch")) else f"{number:,} {noun}s"


def first(texts: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join at most ``limit`` of the texts, and add how many more there are: ``a, b and 3 more``."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return separator.join(texts[:limit]) + more


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks as ``rank 3``, ``ranks 0 and 1`` or ``ranks 0, 2 and 5-63``."""
    named: list[str] = []
    for first, last in _runs(numbers):
        named += [f"{first}-{last}"] if last > first + 1 else map(str, range(first, last + 1))
    return f"rank{'' if len(named) == 1 and named[0].isdecimal() else 's'} {joined(named)}"


def joined(texts: Sequence[str], word: str = "and") -> str:
    """Return texts as a list in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    return f" {word} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def kind(value: object) -> str:
    """Return what a value is, by its type: ``a str``, ``an int``, ``None``."""
    return "None" if value is None else with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return a noun with its article: ``a process``, ``an index``."""
    return f"{'an' if noun[:1].lower() in set('aeio') else 'a'} {noun}"


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Group ranks by their texts, in the order of each group's first rank; ``texts``: rank -> text."""
    grouped: dict[str, list[int]] = {}
    for rank in sorted(texts):
        grouped.setdefault(texts[rank], []).append(rank)
    return grouped


def states(texts: Mapping[int, str]) -> str:
    """Return what ranks are doing, as one sentence: ``ranks 0 and 1 TEXT; rank 2 TEXT``; ``texts``: rank -> text."""
    return "; ".join(f"{ranks(who)} {text}" for text, who in ranks_by_text(texts).items())


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as text, with ranges for consecutive ones: ``3``, ``0, 2, 5-63``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(numbers))


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and last number of each run of consecutive numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def duration(seconds: float) -> str:
    """Return a duration: ``0.03 s``, ``1.2 s``, ``12 s``, ``3:07``, ``1:02:03``."""
    if not isfinite(seconds) or seconds > 1e8:
        return "?"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def whole_duration(seconds: float) -> str:
    """Return a duration in whole seconds, for values that are updated often: ``0 s``, ``12 s``, ``3:07``."""
    return f"{seconds:.0f} s" if seconds < 9.5 else duration(seconds)


def rate(per_s: float) -> str:
    """Return a rate with about three digits: ``0.083``, ``3.21``, ``38.2``, ``1,240``."""
    if per_s >= 99.95:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 9.995 else f"{per_s:.2f}" if per_s >= 0.995 else f"{per_s:.3f}"


def loss(value: float) -> str:
    """Return a loss with four digits in the usual range: ``0.5321``, ``12.04``, ``3.1e-05``."""
    if not isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e5):
        return f"{value:.1e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}" if size < 1000 else f"{value:.0f}"


def columns(rows: Sequence[Sequence[str]], *, num_left: int | None = None) -> list[str]:
    """Return rows as lines with aligned columns, two spaces apart.

    Args:
        rows: rows with the same number of cells.
        num_left: number of leading columns that are left-aligned (the others are right-aligned); None = all.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_left = len(widths) if num_left is None else num_left
    lines = []
    for cells in rows:
        padded = [
            cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def single_line(text: str) -> str:
    """Return ``text`` as one line of at most 400 characters, without escape sequences or control characters."""
    if not text.isprintable():
        text = _BREAKS.sub(" ", _ANSI.sub("", text)).expandtabs(4)
        text = _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"


def first_line(text: str) -> str:
    """Return the first line of ``text`` that is not blank, formatted by :func:`single_line`."""
    return single_line(text.strip().partition("\n")[0])


def short_name(name: str, max_length: int = 28) -> str:
    """Return a name as one line; the middle of a long name is left out, because names often differ at their ends."""
    text = single_line(name)
    if len(text) <= max_length:
        return text
    num_last = (max_length - 1) // 2
    return f"{text[: max_length - 1 - num_last]}…{text[-num_last:]}"

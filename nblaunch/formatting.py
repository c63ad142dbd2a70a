"""How sizes, counts and ranks read: the same in messages, notes and dashboards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def size(num_bytes: float) -> str:
    """Three digits in decimal units, as devices are sold: ``812 MB``, ``1.31 GB``, ``24.0 GB``; bytes are whole."""
    if num_bytes < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007  the last one is for whatever is larger
        num_bytes /= 1000
        if num_bytes < 999.5:
            break
    return f"{num_bytes:.{2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0}f} {unit}"


def size_range(sizes: Sequence[int]) -> str:
    """Sizes as one where they read alike, else from the smallest to the largest: ``1.00 GB to 1.31 GB``."""
    low, high = size(min(sizes)), size(max(sizes))
    return high if low == high else f"{low} to {high}"


def count(number: int, noun: str) -> str:
    """``1 process``, ``4 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}es" if noun.endswith("s") else f"{number:,} {noun}s"


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2, 5-63``."""
    numbers = sorted(numbers)
    return f"rank{'' if len(numbers) == 1 else 's'} {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """``3``, ``0, 2, 5-63``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)

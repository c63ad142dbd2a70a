"""Long texts made short: their middle is left out, since what happened stands at one of the ends."""

from __future__ import annotations

MAX_CHARACTERS = 1 << 16
"""Of an exception's text that travels and is shown. The exception itself keeps all of its own."""


def shortened(text: str, max_characters: int) -> str:
    """``text`` in about as many characters as are allowed, with a word about how many are missing."""
    missing = len(text) - max_characters
    if missing <= 0:
        return text
    half = max_characters // 2
    return f"{text[:half]}... ({missing:,} characters left out) ...{text[-half:]}"


def fewer_lines(text: str, max_lines: int) -> str:
    """``text`` in at most ``max_lines`` lines, with one about how many are missing. The last ones tell the most."""
    lines = text.splitlines()
    missing = len(lines) - max_lines + 1
    if missing <= 1:
        return text
    num_first = max(1, (max_lines - 1) // 3)
    left_out = f"... ({missing:,} lines left out; str() of the exception has them) ..."
    return "\n".join([*lines[:num_first], left_out, *lines[num_first + missing :]])

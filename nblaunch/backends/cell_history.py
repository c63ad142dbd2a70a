"""Guessing from a notebook's history which cell did something, where it was not watched when it happened."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any


def guess(pattern: re.Pattern[str]) -> str:
    """Where the notebook first did what ``pattern`` finds, as :func:`first_match` says; empty outside of notebooks."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cells = shell.user_ns.get("In", []) if shell is not None else []
    return first_match(pattern, cells)


def first_match(pattern: re.Pattern[str], cells: Sequence[str]) -> str:
    """``" (most likely in cell 3, line 2: `...`)"`` for the first line that matches; empty where none does."""
    for number, source in enumerate(cells):
        for position, line in enumerate(source.splitlines(), 1):
            is_inside = line[:1].isspace()  # of a function, most likely one that is launched
            if pattern.search(line) and not is_inside and not line.startswith("#"):
                return f" (most likely in cell {number}, line {position}: `{line.strip():.80}`)"
    return ""

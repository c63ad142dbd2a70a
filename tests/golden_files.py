"""Golden files in ``tests/golden``: the exact text of each display, so that other tests need no sentences.

    def test_the_table(golden: Golden) -> None:
        golden.check("table.txt", {"a running job": render_text(view)})

A test compares the displayed text with the file; ``make golden`` (``pytest --update-golden``) rewrites the files, and
the commit shows the difference. Parts that differ between runs, such as process ids, times and paths, are replaced
first.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"

# The order matters, because a path may contain a process id.
VOLATILE = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"/\S*/rank_(\d+)\.log"), r"LOGS/rank_\1.log"),
    (re.compile(r"logs: /\S+"), "logs: LOGS"),
    (re.compile(r"/\S*/(train\.py)"), r"\1"),
    (re.compile(r"pid \d+"), "pid PID"),
    (re.compile(rf"\bon {re.escape(socket.gethostname())}\b"), "on HOST"),
    (re.compile(r"Cell In\[\d+\], line"), "Cell In[N], line"),
    (re.compile(r"cell \d+, line"), "cell N, line"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "SECONDS"),
    # Python 3.11 and later underline the failed part of a line.
    (re.compile(r"^ *[~^]+ *\n", re.MULTILINE), ""),
)


def normalised(text: str, is_volatile: bool = True) -> str:
    """Return ``text`` without trailing spaces and, by default, without the parts that differ between runs."""
    for pattern, replacement in VOLATILE if is_volatile else ():
        text = pattern.sub(replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


@dataclass
class Golden:
    """Compares texts with the golden files, or writes them.

    Args:
        is_updating: write the files.
    """

    is_updating: bool

    def check(self, name: str, sections: dict[str, str], *, is_volatile: bool = True) -> None:
        """Fail unless these texts equal the texts in a file.

        Args:
            name: name of the file.
            sections: heading -> text.
            is_volatile: whether to replace process ids, times and paths first.
        """
        path = FOLDER / name
        text = "\n".join(
            f"=== {heading}\n{normalised(section, is_volatile)}" for heading, section in sections.items()
        )
        if self.is_updating:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path.name} is missing in tests/golden: make golden writes it"
        assert text == path.read_text(encoding="utf-8"), (
            f"if this is meant: make golden, and read git diff {path}"
        )

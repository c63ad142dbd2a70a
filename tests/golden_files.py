"""Golden files: the exact text of a surface, one file each in ``tests/golden``, so that other tests need no sentences.

    def test_the_table(golden: Golden) -> None:
        golden.check("table.txt", {"a running job": render_text(view)})

A test compares what it sees with the file; ``make golden`` (``pytest --update-golden``) writes the files anew, and the
difference is read in the commit. What differs from run to run, as process ids, times and paths, is replaced first.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"

# In this order: a path may hold a process id.
VOLATILE = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"/\S*/rank_(\d+)\.log"), r"LOGS/rank_\1.log"),
    (re.compile(r"logs: /\S+"), "logs: LOGS"),
    (re.compile(r"/\S*/(train\.py)"), r"\1"),
    (re.compile(r"pid \d+"), "pid PID"),
    (re.compile(rf"\bon {re.escape(socket.gethostname())}\b"), "on HOST"),
    (re.compile(r"Cell In\[\d+\], line"), "Cell In[N], line"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "SECONDS"),
    # Python from 3.11 on underlines the part of a line that failed.
    (re.compile(r"^ *[~^]+ *\n", re.MULTILINE), ""),
)


def normalised(text: str, is_volatile: bool = True) -> str:
    """``text`` without spaces at the ends of lines, and unless set otherwise without what differs from run to run."""
    for pattern, replacement in VOLATILE if is_volatile else ():
        text = pattern.sub(replacement, text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


@dataclass
class Golden:
    """Compares texts with the golden files, or writes these.

    Args:
        is_updating: the files are written.
    """

    is_updating: bool

    def check(self, name: str, sections: dict[str, str], *, is_volatile: bool = True) -> None:
        """Fail unless these texts are those of a file.

        Args:
            name: of the file.
            sections: texts by their headings.
            is_volatile: whether process ids, times and paths are replaced first.
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

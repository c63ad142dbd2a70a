r"""Progress bars that workers draw themselves, read from what they print.

    "train epoch 2:  45%|████▌     | 450/1000 [00:45<00:55, 10.0it/s, loss=0.31]"
     description     bar            count/total  time        rate

The format is tqdm's default (``tqdm.std.tqdm.format_meter``); a line in any other format is no bar and stays a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# With a total, in full or abbreviated numbers (1.20k/4.00k); and without one: "25it [00:03, 8.1it/s]".
_COUNT = r"\d+(?:\.\d+)?[kMGTPEZY]?"
_UNIT = r"(?P<unit> ?[^\s\d\[:/%|]*)"
_METER = r"\[(?P<meter>\d+:\d[^\]]*)\]?"
_BAR = re.compile(
    rf"^(?:(?P<description>.*?):\s+)?\s*(?P<percent>\d+)%\|.*?\|\s*(?P<count>{_COUNT})/(?P<total>{_COUNT})"
    rf"{_UNIT}\s*{_METER}"
)
_COUNTER = re.compile(rf"^(?:(?P<description>.*?):\s+)?(?P<count>{_COUNT}){_UNIT}\s{_METER}")


@dataclass(frozen=True)
class Bar:
    """One bar.

    Args:
        description: what its owner called it; may be empty.
        count: what is done, as it was written: ``"450"``, ``"1.20k"``.
        total: of how much; empty where it did not say.
        fraction: done part, 0 to 1; None without a total.
        meter: time, rate and whatever else stands in its brackets.
    """

    description: str
    count: str
    total: str
    fraction: float | None
    meter: str = ""

    @property
    def text(self) -> str:
        """In words, without the drawn part: ``"train epoch 2 450/1000 [00:45<00:55, 10.0it/s]"``."""
        counted = f"{self.count}/{self.total}" if self.total else self.count
        meter = f"[{self.meter}]" if self.meter else ""
        return " ".join(part for part in (self.description, counted, meter) if part)


def read_bar(line: str) -> Bar | None:
    """The bar that ``line`` shows; None where it is something else."""
    if "[" not in line:
        return None
    if found := _BAR.match(line):
        return Bar(
            description=_name(found["description"]),
            count=found["count"],
            total=found["total"],
            fraction=min(int(found["percent"]) / 100, 1.0),
            meter=found["meter"].strip(),
        )
    if found := _COUNTER.match(line):
        return Bar(_name(found["description"]), found["count"], "", None, found["meter"].strip())
    return None


def _name(description: str | None) -> str:
    return (description or "").strip()

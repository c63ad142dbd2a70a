"""Progress bars in workers' output: tqdm's own lines, and lines that only look similar."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from tqdm import tqdm

from nblaunch.dashboard.view import Bar, read_bar


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off tqdm's monitor, a thread that redraws idle bars and outlives them."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def last_line(num_done: int, **options: Any) -> str:
    """Return tqdm's line on the screen after ``num_done`` steps."""
    stream = io.StringIO()
    bar = tqdm(file=stream, mininterval=0, miniters=1, **options)
    bar.update(num_done)
    bar.set_postfix(loss=0.25)
    bar.close()
    return stream.getvalue().rpartition("\r")[2].strip()


@pytest.mark.parametrize(
    ("options", "counted", "fraction"),
    [
        ({"total": 100, "desc": "train epoch 2"}, "train epoch 2 21/100 [", 0.21),
        ({"total": 100}, "21/100 [", 0.21),
        ({"total": 100, "ascii": True, "unit": " samples", "ncols": 70}, "21/100 [", 0.21),
        ({"total": 84_000, "unit": "B", "unit_scale": True, "desc": "data"}, "data 21.0/84.0k [", 0.0),
        ({"desc": "fold: 3"}, "fold: 3 21 [", None),
        ({"desc": "s", "unit": " samples"}, "s 21 [", None),
        ({"total": 10, "desc": "too far"}, "too far 21 [", None),
    ],
)
def test_tqdm_bars_are_read(options: dict[str, Any], counted: str, fraction: float | None) -> None:
    bar = read_bar(last_line(21, **options))
    assert bar is not None
    assert bar.text.startswith(counted)
    assert re.fullmatch(r"00:00[<,] ?[^]]*, loss=0\.25\]", bar.text.removeprefix(counted))
    assert bar.fraction == fraction


@pytest.mark.parametrize(
    "line",
    [
        "",
        "epoch 3: loss 0.3 [a]",
        "12:30 50% done [x]",
        "[1] hello",
        "list [1, 2]",
        "took: 5s [2, 3]",
        "45%|##",
    ],
)
def test_other_lines_are_not_bars(line: str) -> None:
    assert read_bar(line) is None


def test_bars_become_text() -> None:
    drawn = "train:  45%|████      | 45/100 [00:45<00:55, 1.00it/s]"
    assert read_bar(drawn) == Bar("train 45/100 [00:45<00:55, 1.00it/s]", 0.45)
    assert read_bar("45it [00:45,  1.00it/s]") == Bar("45 [00:45,  1.00it/s]", None)

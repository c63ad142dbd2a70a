"""Count instructions with Valgrind's callgrind: unlike processor time, they do not depend on other processes.

    words = instructions.command(folder, [sys.executable, "-m", "my_benchmark"])  # start it like this, and in it:
    instructions.of_step(make_lap, folder)                                        # the instructions of one step

Processes that are forked under Valgrind take no orders from ``callgrind_control``. Instead, laps call a small library,
which is compiled with Valgrind's header.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

Lap = Callable[[], None]

SHORT, LONG = 20, 40
"""Steps of the two laps whose difference gives the count of a step."""
NUM_COUNTED = 3
"""Laps of each length. Occasional events, such as signals, add instructions; the smallest count is free of them."""

_ORDERS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *label) { CALLGRIND_DUMP_STATS_AT(label); CALLGRIND_STOP_INSTRUMENTATION; }
"""
_HEADER = Path("/usr/include/valgrind/callgrind.h")
_LIBRARY = "orders.so"
_labels = itertools.count()


def is_available() -> bool:
    return _HEADER.exists() and all(map(shutil.which, ("valgrind", "cc")))


def command(folder: str | Path, words: Sequence[str]) -> list[str]:
    """Return the command that runs ``words`` under callgrind, which counts only in laps."""
    compiler = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", f"{folder}/{_LIBRARY}"]
    subprocess.run(compiler, input=_ORDERS, text=True, check=True)
    options = ["--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
    options += [f"--callgrind-out-file={folder}/%p"]
    return ["valgrind", "--quiet", *options, *words]


def of_step(lap_of: Callable[[int], Lap], folder: Path) -> float:
    """Return the instructions of a step, from laps that ``lap_of`` makes for a number of steps."""
    short, long = lap_of(SHORT), lap_of(LONG)
    counts = [(of_lap(short, folder), of_lap(long, folder)) for _ in range(1 + NUM_COUNTED)]
    # The first epoch searches for the loops around its line and keeps the result.
    least_short, least_long = map(min, zip(*counts[1:], strict=True))
    return (least_long - least_short) / (LONG - SHORT)


def of_lap(lap: Lap, folder: Path) -> int:
    """Return the instructions of this process's first thread in a lap and in the switch around it.

    The other threads are those of gloo, which poll: their instructions depend on how fast the other ranks are.
    """
    orders = _orders(folder)
    label = f"lap{next(_labels)}"
    orders.begin()
    lap()
    orders.end(label.encode())
    dumps = (path.read_text() for path in folder.glob(f"{os.getpid()}.*-01"))
    dump = next(
        text for text in dumps if label in re.findall(r"^desc: Trigger: .*?(\w+)$", text, re.MULTILINE)
    )
    totals = re.search(r"^totals: (\d+)", dump, re.MULTILINE)
    assert totals is not None
    return int(totals[1])


def put_off_reports() -> None:
    """Turn off work that is done a few times per second: with callgrind's clock, it would run every few steps."""
    from nblaunch.progress import board_reports, plain_loops

    board_reports._LOSS_INTERVAL_S = board_reports._MEMORY_INTERVAL_S = 1e9
    board_reports._BUSY_INTERVAL_S = plain_loops._PLACE_S = 1e9


@cache
def _orders(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(folder / _LIBRARY))

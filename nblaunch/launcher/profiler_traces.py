"""Traces of torch's profiler, one per rank, as events of a job's timeline.

    accelerator.profile(ProfileKwargs(output_trace_dir=...)) ──> profile_0.json, profile_1.json ──> events on our clock

Source of the format: ``torch.profiler.profile.export_chrome_trace``. Times are microseconds since
``baseTimeNanoseconds``, which counts from 1970; timelines use the monotonic clock.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_RANK = re.compile(r"(\d+)\.json$")
_PIDS_PER_RANK = 1000
_US_PER_S = 1_000_000


def profiled_events(folder: Path, start_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    """Yield the events of all traces in a folder, each trace as separate processes.

    Args:
        folder: folder with one file per rank, whose name ends in the rank and ``.json``.
        start_s: time 0 of the timeline, on the monotonic clock.
        end_s: end of the timeline.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: a file is not a trace of torch's profiler, or was recorded at another time.
    """
    files = {int(name[1]): path for path in folder.iterdir() if (name := _RANK.search(path.name))}
    if not files:
        raise FileNotFoundError(
            f"{folder} has no traces: the name of a rank's trace ends in the rank and .json"
        )
    for rank, path in sorted(files.items()):
        yield from _events(path, rank, start_s, end_s)


def _events(path: Path, rank: int, start_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    try:
        trace = json.loads(path.read_text())
        base_us, events = trace["baseTimeNanoseconds"] / 1e3, trace["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of torch.profiler ({error!r})") from error
    shift_us = base_us - (time.time() - time.monotonic() + start_s) * _US_PER_S
    slices = [event for event in events if event.get("ph") == "X" and event.get("pid") != "Spans"]
    length_us = (end_s - start_s) * _US_PER_S
    if not any(-event.get("dur", 0) <= event["ts"] + shift_us <= length_us for event in slices):
        raise ValueError(f"{path} was not recorded while the job ran")
    pids, tids = _Numbers((rank + 1) * _PIDS_PER_RANK), _Numbers(1)
    for event in slices:
        is_new = event["pid"] not in pids
        pid, tid = pids.of(event["pid"]), tids.of((event["pid"], event.get("tid")))
        if is_new:
            name = f"rank {rank}: torch.profiler"
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        more = {key: event[key] for key in ("name", "cat", "args") if key in event}
        begin = round(event["ts"] + shift_us, 3)
        yield {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": event.get("dur", 0), **more}


class _Numbers(dict[Any, int]):
    """Numbers for processes and threads, some of which a trace identifies by text."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def of(self, name: Any) -> int:
        return self.setdefault(name, self._first + len(self))

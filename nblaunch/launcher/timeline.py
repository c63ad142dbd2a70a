"""Timelines of a job: how its ranks spent their time, as a file for Perfetto and Chrome's tracing.

    spans of the ranks ──> slices, one track per rank, all on the monotonic clock of the machine ──> JSON, or .gz of it
    traces of torch's profiler, one per rank ──> separate processes ─────────────────────────────┘       │
                                        step_picture.py <── Timeline, the path in a notebook <───────────┘

Source of the format: "Trace Event Format" (Chromium), complete events ("X") and metadata events ("M"). The time
between the last slice and a backward pass is shown as the forward pass, because no hook observes the forward pass of a
plain model. Format of the traces: ``torch.profiler.profile.export_chrome_trace``. Their times are microseconds since
``baseTimeNanoseconds``, which counts from 1970; timelines use the monotonic clock.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from nblaunch.launcher.step_picture import Slice, picture
from nblaunch.wire.collective_calls import COLLECTIVES
from nblaunch.wire.spans import Span, SpanKind, unpack

_NAMES = {
    SpanKind.DATA: "data",
    SpanKind.BACKWARD: "backward",
    SpanKind.OPTIMIZER: "optimizer",
    SpanKind.SAVE: "save",
    SpanKind.EVALUATION: "evaluation",
    SpanKind.GARBAGE: "garbage collection",
}
_VALUES = {SpanKind.DATA: "elements", SpanKind.SAVE: "bytes", SpanKind.EVALUATION: "batches"}
_INSIDE = (SpanKind.COLLECTIVE, SpanKind.GARBAGE)
"""Spans that may lie within a forward pass."""

_US_PER_S = 1_000_000  # the format counts in microseconds; whole numbers keep the file small
_COMPRESSION = 4
_PID = 1  # the job's process in the file; its threads are the ranks
_PIDS_PER_RANK = 1000  # for the processes of a trace

_RANK_OF_TRACE = re.compile(r"(\d+)\.json$")


class Timeline(type(Path())):  # type: ignore[misc]
    """The path of a timeline. A notebook shows a typical step and the slowest step of each rank."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return a picture of the steps; None if the file has no steps, or is not a timeline."""
        try:
            with gzip.open(self, "rt") if self.suffix == ".gz" else self.open() as file:
                events = json.load(file)["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        slices: dict[int, list[Slice]] = {}
        for event in events:
            if event["ph"] == "X" and event["pid"] == _PID:
                began = event["ts"]
                slices.setdefault(event["tid"], []).append((event["name"], began, began + event["dur"]))
        steps = picture(slices)
        return f"{steps}<div>{escape(str(self))}: open it in https://ui.perfetto.dev</div>" if steps else None


def write_timeline(
    spans: Iterable[tuple[int, bytes]],
    path: Path,
    title: str,
    profiles: str | os.PathLike[str] | None = None,
) -> int:
    """Write a timeline; return its number of slices. Nothing is written if there are none.

    Args:
        spans: ranks, each with some of its spans, in order.
        path: path of the file; it is compressed if its name ends in ``.gz``.
        title: name of the job.
        profiles: folder with traces of torch's profiler, which are added; None = no traces.

    Raises:
        OSError: the file can't be written, or there are no traces.
        ValueError: a trace can't be read, or belongs to another job.
    """
    slices = _slices(spans)
    first = next(slices, None)
    if first is None:
        return 0
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _open(unfinished, is_compressed=path.suffix == ".gz") as file:
            folder = None if profiles is None else Path(profiles).expanduser()
            num_slices = _write(file, first, slices, title, folder)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_slices


def _open(path: Path, *, is_compressed: bool) -> TextIO:
    if is_compressed:
        return gzip.open(path, "wt", compresslevel=_COMPRESSION)
    return open(path, "w")


_Slice = tuple[int, str, int, int, dict[str, Any]]
"""Rank, name, begin and end in microseconds, and other facts."""


def _slices(spans: Iterable[tuple[int, bytes]]) -> Iterator[_Slice]:
    ended: dict[int, int] = {}  # rank -> end of the span before its next forward pass
    for rank, data in spans:
        for span in unpack(data):
            began, end = int(span.began_s * _US_PER_S), int(span.ended_s * _US_PER_S)
            if span.kind == SpanKind.BACKWARD and ended.get(rank, began) < began:
                yield rank, "forward", ended[rank], began, {}
            if span.kind not in _INSIDE:
                ended[rank] = end
            yield rank, _name_of(span), began, end, _about(span)


def _name_of(span: Span) -> str:
    if span.kind == SpanKind.COLLECTIVE:
        return COLLECTIVES[span.detail] if 0 <= span.detail < len(COLLECTIVES) else "collective"
    return _NAMES.get(span.kind, "unknown")  # type: ignore[call-overload]


def _about(span: Span) -> dict[str, Any]:
    name = _VALUES.get(span.kind) if span.value else None  # type: ignore[call-overload]
    about = {name: int(span.value)} if name else {}
    return {**about, "num_workers": span.detail} if name == "elements" else about


def _write(file: TextIO, first: _Slice, others: Iterator[_Slice], title: str, profiles: Path | None) -> int:
    """Write the document; return its number of slices. Times are relative to the beginning of the first slice."""
    start, end, num_slices, ranks = first[2], first[3], 0, set()
    file.write('{"displayTimeUnit":"ms","otherData":')
    json.dump({"clock": "CLOCK_MONOTONIC", "start_s": start / _US_PER_S}, file)
    file.write(',"traceEvents":[\n')
    json.dump(_metadata("process_name", 0, {"name": title}), file)
    for rank, name, began, ended, about in chain([first], others):
        if rank not in ranks:
            ranks.add(rank)
            for about_rank in ({"name": f"rank {rank}"}, {"sort_index": rank}):
                what = "thread_name" if "name" in about_rank else "thread_sort_index"
                file.write(",\n" + json.dumps(_metadata(what, rank, about_rank)))
        args = f',"args":{json.dumps(about)}' if about else ""
        file.write(
            f',\n{{"ph":"X","pid":{_PID},"tid":{rank},"name":"{name}","ts":{began - start},'
            f'"dur":{ended - began}{args}}}'
        )
        num_slices += 1
        end = max(end, ended)
    if profiles is not None:
        for event in _profiled_events(profiles, start / _US_PER_S, end / _US_PER_S):
            file.write(",\n" + json.dumps(event))
    file.write("\n]}\n")
    return num_slices


def _metadata(name: str, rank: int, about: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": rank, "name": name, "args": about}


def _profiled_events(folder: Path, start_s: float, end_s: float) -> Iterator[dict[str, Any]]:
    """Yield the events of all traces in a folder, each trace as separate processes.

    Args:
        folder: folder with one file per rank, whose name ends in the rank and ``.json``.
        start_s: time 0 of the timeline, on the monotonic clock.
        end_s: end of the timeline.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: a file is not a trace of torch's profiler, or was recorded at another time.
    """
    files = {int(name[1]): path for path in folder.iterdir() if (name := _RANK_OF_TRACE.search(path.name))}
    if not files:
        raise FileNotFoundError(
            f"{folder} has no traces: the name of a rank's trace ends in the rank and .json"
        )
    for rank, path in sorted(files.items()):
        yield from _events_of_trace(path, rank, start_s, end_s)


def _events_of_trace(path: Path, rank: int, start_s: float, end_s: float) -> Iterator[dict[str, Any]]:
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

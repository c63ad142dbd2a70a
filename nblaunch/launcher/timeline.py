"""Timelines of a job: how its ranks spent their time, as a file for Perfetto and Chrome's tracing.

    spans of the ranks ──> slices, one track per rank, all on the monotonic clock of the machine ──> JSON, or .gz of it
    traces of torch's profiler, one per rank ──> separate processes ─────────────────────────────┘       │
                       a picture of steps <── Timeline, the path in a notebook <─────────────────────────┘

    rings of the board ── 10 times a second ──> SpanRecorder ── every half second ──> attempt_0/spans
                                                    └──> SlowWatch (slow_watch.py)

The recorder writes the spans to the attempt's files. When a file is full, it becomes ``spans.before`` and
replaces the previous one, so the newest spans are kept. The job does not need the files: if they can't be
written, it continues without a timeline.

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
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from nblaunch import formatting
from nblaunch.events import Event
from nblaunch.host.files import replace_file
from nblaunch.launcher.attempt import RunningAttempt
from nblaunch.launcher.joblog import LogFolder
from nblaunch.launcher.slow_watch import SlowWatch
from nblaunch.wire.collective_calls import COLLECTIVES
from nblaunch.wire.spans import Span, SpanKind, read_blocks, to_blocks, unpack

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
_PIDS_PER_RANK = 1000  # for the processes in a trace

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
        slices: dict[int, list[_Period]] = {}
        for event in events:
            if event["ph"] == "X" and event["pid"] == _PID:
                began = event["ts"]
                slices.setdefault(event["tid"], []).append((event["name"], began, began + event["dur"]))
        steps = _picture(slices)
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
    folder = None if profiles is None else Path(profiles).expanduser()
    num_slices = 0

    def write(unfinished: Path) -> None:
        nonlocal num_slices
        with _open(unfinished, is_compressed=path.suffix == ".gz") as file:
            num_slices = _write(file, first, slices, title, folder)

    replace_file(path, write)
    return num_slices


def _open(path: Path, *, is_compressed: bool) -> TextIO:
    if is_compressed:
        return gzip.open(path, "wt", compresslevel=_COMPRESSION)
    return open(path, "w")


_Slice = tuple[int, str, int, int, dict[str, Any]]
"""Rank, name, start and end in microseconds, and other details."""


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
            file.write(",\n" + json.dumps(_metadata("thread_name", rank, {"name": f"rank {rank}"})))
            file.write(",\n" + json.dumps(_metadata("thread_sort_index", rank, {"sort_index": rank})))
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
    """Yield the events of all traces in a folder. In the timeline, each trace has processes of its own.

    Args:
        folder: folder with one file per rank; the file's name ends in the rank and ``.json``.
        start_s: time 0 of the timeline, on the monotonic clock.
        end_s: end of the timeline.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: a file is not a trace of torch's profiler, or was recorded at another time.
    """
    files = {int(name[1]): path for path in folder.iterdir() if (name := _RANK_OF_TRACE.search(path.name))}
    if not files:
        raise FileNotFoundError(
            f"{folder} has no traces: the name of a rank's trace must end in the rank and .json"
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
        raise ValueError(f"{path} was not recorded while the job was running")
    # A trace identifies some processes and threads by strings.
    pids = defaultdict[Any, int](count((rank + 1) * _PIDS_PER_RANK).__next__)
    tids = defaultdict[Any, int](count(1).__next__)
    for event in slices:
        is_new = event["pid"] not in pids
        pid, tid = pids[event["pid"]], tids[event["pid"], event.get("tid")]
        if is_new:
            name = f"rank {rank}: torch.profiler"
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        more = {key: event[key] for key in ("name", "cat", "args") if key in event}
        begin = round(event["ts"] + shift_us, 3)
        yield {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": event.get("dur", 0), **more}


# --- a picture for notebooks: a typical step and the slowest step of each rank ----------------------------------------
# slices ──> steps of each rank, which end with an optimizer step ──> median and slowest ──> one bar each, in SVG

_COLOURS = {
    "data": "#e0a030",
    "forward": "#3b82d6",
    "backward": "#8b6fd6",
    "optimizer": "#2f9e6e",
    "save": "#e05656",
    "evaluation": "#4aa8b8",
    "garbage collection": "#b0568a",
}
_COLLECTIVE = "#8a8f98"
_MAX_RANKS = 16
_WIDTH, _LEFT, _ROW, _BAR = 720, 130, 22, 14
_NUM_WARM = 1
"""Number of initial steps that are left out, because they create what later steps reuse."""

_Period = tuple[str, float, float]
"""Name, start and end, in microseconds."""


@dataclass(frozen=True)
class _Step:
    """A step of a rank.

    Args:
        number: number of the step, from 1.
        began: end of the previous step.
        ended: end of the optimizer step.
        slices: periods of the rank's work, in order.
    """

    number: int
    began: float
    ended: float
    slices: Sequence[_Period]

    @property
    def length(self) -> float:
        """The length in microseconds."""
        return self.ended - self.began


def _steps_of(slices: Iterable[_Period]) -> list[_Step]:
    """Return the steps of a rank except the first; ``slices`` are all slices of the rank."""
    steps: list[_Step] = []
    pending: list[_Period] = []
    began, number = None, 0
    for name, begin, end in sorted(slices, key=lambda item: (item[1], -item[2])):
        pending.append((name, begin, end))
        if name == "optimizer":
            number += 1
            if began is not None and number > _NUM_WARM:
                steps.append(_Step(number, began, end, tuple(pending)))
            began, pending = end, []
    return steps


def _picture(by_rank: dict[int, list[_Period]]) -> str:
    """Return a typical step and the slowest step of each rank as HTML; empty if no rank has taken steps.

    Args:
        by_rank: rank -> its slices.
    """
    all_steps = {rank: _steps_of(slices) for rank, slices in sorted(by_rank.items())}
    steps = {rank: taken for rank, taken in all_steps.items() if taken}
    if not steps:
        return ""
    shown = dict(list(steps.items())[:_MAX_RANKS])
    typical = {
        rank: sorted(taken, key=lambda step: step.length)[len(taken) // 2] for rank, taken in shown.items()
    }
    slowest = {rank: max(taken, key=lambda step: step.length) for rank, taken in shown.items()}
    names = dict.fromkeys(
        name for part in (typical, slowest) for step in part.values() for name, _, _ in step.slices
    )
    left_out = len(steps) - len(shown)
    more = f"<div>and {formatting.count(left_out, 'rank')} more</div>" if left_out else ""
    return (
        '<div style="font-family: sans-serif; font-size: 12px">'
        + _panel("typical step (median)", typical)
        + _panel("slowest step", slowest)
        + more
        + _legend(names)
        + "</div>"
    )


def _panel(title: str, steps: dict[int, _Step]) -> str:
    """Return one bar per rank; the longest fills the width."""
    scale = (_WIDTH - _LEFT) / max(step.length for step in steps.values())
    rows = "".join(_row(rank, step, index * _ROW, scale) for index, (rank, step) in enumerate(steps.items()))
    return (
        f"<div>{title}</div>"
        f'<svg width="{_WIDTH}" height="{len(steps) * _ROW}" role="img" aria-label="{title} of each rank">{rows}</svg>'
    )


def _row(rank: int, step: _Step, top: int, scale: float) -> str:
    label = f"rank {rank}: {_milliseconds(step.length)}"
    bars = [
        f'<rect x="{_LEFT}" y="{top}" width="{step.length * scale:.1f}" height="{_BAR}" fill="#8a8f98" '
        f'fill-opacity="0.2"><title>step {step.number}: {_milliseconds(step.length)}</title></rect>'
    ]
    for name, began, ended in step.slices:
        # Nested slices, such as collectives in an evaluation, are drawn over the slices that contain them.
        left = _LEFT + max(0.0, began - step.began) * scale
        tooltip = f"{name}, {_milliseconds(ended - began)}"
        bars.append(
            f'<rect x="{left:.1f}" y="{top}" width="{max((ended - began) * scale, 0.3):.1f}" height="{_BAR}" '
            f'fill="{_colour(name)}"><title>{escape(tooltip)}</title></rect>'
        )
    text = f'<text x="0" y="{top + _BAR - 3}" fill="currentColor">{label}</text>'
    return text + "".join(bars)


def _legend(names: Iterable[str]) -> str:
    parts = [
        f'<span style="margin-right: 12px"><span style="color: {_colour(name)}">&#9632;</span> {escape(name)}</span>'
        for name in names
    ]
    return f"<div>{''.join(parts)}</div>"


def _colour(name: str) -> str:
    return _COLOURS.get(name, _COLLECTIVE)


def _milliseconds(time_us: float) -> str:
    return f"{time_us / 1e3:,.1f} ms" if time_us < 1e5 else f"{time_us / 1e3:,.0f} ms"


# --- the spans of an attempt, in files -----------------------------------------------------------------------------

_MAX_FILE_BYTES = 32 << 20
"""Maximum size of a file; two files are kept. Eight ranks with 10,000 steps of 4 spans each fill a third of a file."""

_WRITE_S = 0.5
_FILES = ("spans.before", "spans")


class SpanRecorder:
    """Collects the spans of this machine's ranks in an attempt.

    Args:
        running: the attempt.
        watch: judges the spans as they arrive.
    """

    def __init__(self, running: RunningAttempt, watch: SlowWatch) -> None:
        attempt = running.attempt
        self._folder = attempt.log.attempt_path(attempt.number)
        self._board, self._ranks = running.board, attempt.ranks
        self._watch = watch
        self._pending: list[bytes] = []
        self._next_write_s = 0.0
        self._num_bytes = 0
        self._is_writable = True

    def receive(self, event: Event) -> None:
        """Pass an event on to the watch."""
        self._watch.receive(event)

    def collect(self, alive: Collection[int] = ()) -> None:
        """Collect the spans since the last call."""
        spans = {rank: data for rank in self._ranks if (data := self._board.spans(rank).read())}
        if self._is_writable and spans:
            self._pending.append(to_blocks(spans))
        if time.monotonic() >= self._next_write_s:
            self._write()
        if alive:
            self._watch.take(spans)

    def end(self) -> None:
        """Write the last spans."""
        self._write()

    def _write(self) -> None:
        self._next_write_s = time.monotonic() + _WRITE_S
        data, self._pending = b"".join(self._pending), []
        if not data:
            return
        before, path = (self._folder / name for name in _FILES)
        try:
            if self._num_bytes and self._num_bytes + len(data) > _MAX_FILE_BYTES:
                os.replace(path, before)
                self._num_bytes = 0
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._num_bytes += os.write(fd, data)
            finally:
                os.close(fd)
        except OSError:
            self._is_writable = False


def recorded(log: LogFolder) -> Iterator[tuple[int, bytes]]:
    """Yield (rank, spans) for all attempts of a job; each rank's spans are sorted by end time."""
    for attempt in log.attempts():
        for name in _FILES:
            path = str(log.attempt_path(attempt) / name)
            with suppress(FileNotFoundError), open(path, "rb", opener=log.opener) as file:
                yield from read_blocks(file)

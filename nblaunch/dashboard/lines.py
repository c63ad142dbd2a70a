"""Workers' output and the launcher's notes: lines and displays in the cell's output or on the terminal.

    [0] epoch 0: loss 0.693
    [1] epoch 0: loss 0.701
    [0-3] a warning from a library                                      the same on three or more ranks
    [1] ... 9,480 lines not shown; complete log: /tmp/nblaunch-1000/20261120-153000-4242-1/attempt_0/rank_1.log
    [1] last line

``LinesPrinter`` labels lines, merges equal lines from several ranks and shortens long output. It writes the lines from
each tick together, so the number of messages to the front end does not grow with the output. Each rank's lines stay in
order. In a cell, ``FoldedLines`` hides all but the first and last lines behind a line that unfolds them.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from string import Template
from time import monotonic
from typing import Any, TextIO, final

from nblaunch import formatting
from nblaunch.dashboard.base import Bundle, Dashboard, Pace
from nblaunch.dashboard.table import HEAD_LINES
from nblaunch.dashboard.text import LiveTable, write
from nblaunch.events import AttemptStarted, Displayed, Event, InputAwaited, InputRead, LogLines, Note
from nblaunch.formatting import single_line
from nblaunch.wire.board import SlotReading

NUM_LINES = 60
"""How many recent lines a ``LastLines`` keeps for each rank, and how many for all ranks together."""

TAIL_LENGTH = 20
"""How many of the last lines to show if space is limited, or at the end of a job for a rank that printed a lot."""

MAX_IN_CELL = 60
"""Maximum number of a job's lines that a cell prints; the others are folded."""

_FIRST_IN_CELL = 40
_MAX_FOLDED = 5_000  # lines
_FOLDED = (
    "margin:2px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit;"
    "white-space:pre-wrap;overflow:auto;max-height:40em;font-size:12px"
)


class LastLines:
    """The last lines of output from each rank, and from all ranks together."""

    def __init__(self) -> None:
        self._num_added = 0
        self._by_rank: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=NUM_LINES))
        self._all: deque[tuple[float, int, int, str]] = deque(maxlen=NUM_LINES)

    def add(self, event: Event) -> None:
        """Add the text of an event if a rank printed or displayed it."""
        if isinstance(event, LogLines):
            for line in event.lines[-NUM_LINES:]:
                # Most lines are cleaned only when they are read, because ranks that print a lot soon replace them.
                self._add_line(event, line if len(line) <= _LINE_LENGTH else single_line(line))
        elif isinstance(event, Displayed) and not event.update:
            self._add_line(event, _display_line(event))
        elif isinstance(event, Note) and event.rank >= 0:
            self._add_line(event, single_line(event.text))

    @property
    def is_empty(self) -> bool:
        """Whether no rank has printed anything."""
        return not self._all

    def of_all(self) -> list[tuple[int, str]]:
        """Return ``(rank, line)`` pairs from all ranks, oldest first, ordered by the workers' clocks."""
        return [(rank, single_line(line)) for _, _, rank, line in sorted(self._all)]

    def of_rank(self, rank: int) -> list[str]:
        """Return the last lines of a rank, oldest first."""
        return [single_line(line) for line in self._by_rank.get(rank, ())]

    def _add_line(self, event: Event, line: str) -> None:
        self._num_added += 1
        self._all.append((event.time_s, self._num_added, event.rank, line))
        self._by_rank[event.rank].append(line)


def _display_line(event: Displayed) -> str:
    """Return a display as one line: its text, or else the types of its data."""
    text = single_line(str(event.data.get("text/plain", "")))
    if not text or text.startswith("<IPython."):  # the name of a class does not describe the display
        text = single_line(", ".join(kind for kind in event.data if kind != "text/plain")) or text
    return f"displayed: {text}"


MIN_RANKS = 3
"""Minimum number of ranks whose equal lines are merged."""

MERGE_WINDOW_S = 2.0
"""Maximum time between equal lines that are merged, in seconds."""


@dataclass
class _Line:
    text: str
    time_s: float
    ranks: list[int] = field(default_factory=list)


class MergedLines:
    """The ranks' lines, in order; equal lines from several ranks form one entry."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._indices: dict[str, list[int]] = {}
        self._next_index: dict[int, int] = {}

    def add(self, rank: int, text: str, time_s: float) -> None:
        """Add the next line that ``rank`` printed."""
        indices = self._indices.setdefault(text, [])
        first = bisect_left(indices, self._next_index.get(rank, 0))
        same = (index for index in indices[first:] if time_s - self._lines[index].time_s <= MERGE_WINDOW_S)
        index = next(same, len(self._lines))
        if index == len(self._lines):
            self._lines.append(_Line(text, time_s))
            indices.append(index)
        self._lines[index].ranks.append(rank)
        self._next_index[rank] = index + 1

    def joined(self) -> list[tuple[list[int], str]]:
        """Return ``(ranks, line)`` pairs, oldest first; each has one rank, or at least :data:`MIN_RANKS` ranks."""
        joined: list[tuple[list[int], str]] = []
        for line in self._lines:
            if len(line.ranks) >= MIN_RANKS:
                joined.append((sorted(line.ranks), line.text))
            else:
                joined += [([rank], line.text) for rank in line.ranks]
        return joined


_MAX_HEAD_LINES = 2 * HEAD_LINES  # approximate limit for all ranks together
_LINE_LENGTH = 4000  # characters
# Limit on the displays (such as figures) of all ranks together. Each rank keeps its share even if others use up the
# rest. VS Code shows only the first 500 outputs of a cell (microsoft/vscode#325786); a display takes up two of them,
# and the last output may be an error.
_NUM_DISPLAYS = 120
_MAX_TAIL_LINES = 320  # approximate limit for the last lines of all ranks; each rank has at least one

Publish = Callable[[Displayed], None]


_IN_TABLE = ("hang", "slow")  # kinds of notes that a table shows


class _NoteLine(str):
    """A note. It is never folded, because no log contains it."""


@final
class LinesPrinter(Dashboard):
    """A dashboard that prints the ranks' lines, each with the label ``[rank]``; a single process has no label.

    After a rank's first 500 lines, the dashboard only counts further lines, and prints the last of them at the end. If
    many ranks print a lot, each rank's limit is its share of 1,000 lines.

    Args:
        stream: default: ``sys.stdout``, looked up on each write.
        publish: shows a worker's display; default: print its text.
        notes_to_stderr: write notes to ``sys.stderr``, because a program may read the ranks' lines.
        shortens: omit lines from ranks that print a lot, and cut lines that are longer than 4,000 characters.
        first_s: seconds to wait before the first write, so that the job's table appears above its output.
        defers_lines: print all lines at the end, because the widgets or the table show the last lines until then;
            displays are shown immediately.
        omits_hangs: omit hang reports and notes about slow steps, because a table shows them.
        merges_equal: print equal lines from three or more ranks once, labelled ``[0-3]``.
        folds: print a limited number of lines, and fold the others; has an effect only with ``publish``.
        live: display that is redrawn in place on the same terminal, and stays below the lines.
        display_ids: (rank, id) of displays that may be updated; the printer adds the ids of its own displays.
            Default: an empty set for this printer.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        publish: Publish | None = None,
        live: LiveTable | None = None,
        notes_to_stderr: bool = False,
        shortens: bool = True,
        first_s: float = 0.0,
        defers_lines: bool = False,
        omits_hangs: bool = False,
        merges_equal: bool = False,
        folds: bool = False,
        display_ids: set[tuple[int, str]] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stream = stream
        self._publish = publish
        self._live = live
        self._notes_to_stderr = notes_to_stderr
        self._shortens = shortens
        self._pace = Pace(first_s=first_s, clock=clock)
        self._defers_lines = defers_lines
        self._omits_hangs = omits_hangs
        self._merges_equal = merges_equal
        self._folded = FoldedLines() if folds and publish is not None else None
        self._pending: list[str | MergedLines | Displayed] = []
        self._num_lines: Counter[int] = Counter()
        self._num_shown: Counter[int] = Counter()
        self._num_hidden = 0
        self._tails: dict[int, deque[str]] = {}
        self._num_displays: Counter[int] = Counter()
        self._ranks_without_displays: set[int] = set()
        self._display_ids = set() if display_ids is None else display_ids
        self._num_processes = 1
        self._first_rank = 0
        self._log_dir = ""
        self._label_template: str | None = None
        self._question: InputAwaited | None = None

    def on_event(self, event: Event) -> None:
        if isinstance(event, LogLines):
            self._add_lines(event)
        elif isinstance(event, Displayed):
            self._add_display(event)
        elif isinstance(event, Note) and event.text and not (event.kind in _IN_TABLE and self._omits_hangs):
            label = "nblaunch: " if event.rank < 0 else self._label(event.rank)
            self._pending.append(_NoteLine(f"{label}{event.text}\n"))
        elif isinstance(event, InputAwaited):
            self._ask(event)
        elif isinstance(event, InputRead):
            self._end_question()
        elif isinstance(event, AttemptStarted):
            self._end_all()  # the new attempt has its own log files
            self._num_processes = event.num_processes
            self._first_rank = event.first_rank
            self._log_dir = event.log_dir
            self._label_template = event.label_template
            self._pace.restart()

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        if self._pending and self._pace.is_due():
            if self._defers_lines:
                self._flush_displays()
            else:
                self._flush()

    def close(self) -> None:
        self._show_all()

    def _show_all(self) -> None:
        """Show everything that has been deferred, folded or left out, and start counting again."""
        self._end_all()
        if self._pending:
            self._flush()
        if self._folded is not None and self._publish is not None:
            bundle, last = self._folded.rest(self._log_dir, self._num_hidden)
            if bundle is not None:
                self._publish(Displayed(data=bundle))
            self._print("".join(last))
            self._folded, self._num_hidden = FoldedLines(), 0

    def _ask(self, event: InputAwaited) -> None:
        """Show everything, then the prompt of a script, which stays the last line while the user types."""
        self._show_all()
        if event.rank < 0:
            return
        if self._live is not None:
            self._live.clear()
        self._question = event
        self._write_now(self._prompt)

    @property
    def _prompt(self) -> str:
        """The prompt at which the user types; empty if no rank waits for an answer."""
        return "" if self._question is None else f"{self._label(self._question.rank)}{self._question.prompt}"

    def _end_question(self, *, is_answered: bool = True) -> None:
        question, self._question = self._question, None
        if question is not None and (question.is_hidden or not is_answered):
            self._write_now("\n")

    def _write_now(self, text: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        write(stream, text)
        stream.flush()

    def _label(self, rank: int) -> str:
        if self._label_template is not None:
            names = {"rank": rank, "local_rank": rank - self._first_rank, "role_name": "default"}
            return Template(self._label_template).safe_substitute(names)
        width = len(str(self._num_processes - 1))
        return f"[{rank:{width}}] " if self._num_processes > 1 else ""

    def _add_lines(self, event: LogLines) -> None:
        rank, lines = event.rank, event.lines
        if self._question is not None and self._question.rank == rank:
            self._end_question()  # the rank goes on, and its event is on the way
        self._num_lines[rank] += len(lines)
        num_shown = min(self._room(rank), len(lines)) if self._shortens else len(lines)
        self._num_shown[rank] += num_shown
        if num_shown:
            self._add_shown(event, num_shown)
        if num_shown == len(lines):
            return
        if rank not in self._tails:
            length = min(TAIL_LENGTH, _MAX_TAIL_LINES // self._num_processes)
            self._tails[rank] = deque(maxlen=max(length, 1))
            self._pending.append(
                f"{self._label(rank)}... this rank prints a lot; its last lines follow when the job ends\n"
            )
        self._tails[rank].extend(lines[max(num_shown, len(lines) - TAIL_LENGTH) :])

    def _add_shown(self, event: LogLines, num_shown: int) -> None:
        lines = event.lines[:num_shown]
        shown = [_shorten(line) for line in lines] if self._shortens else lines
        # A custom label names a single rank, so equal lines from several ranks can't be merged.
        if not self._merges_equal or self._label_template is not None:
            label = self._label(event.rank)
            self._pending.append("".join(f"{label}{line}\n" for line in shown))
            return
        last = self._pending[-1] if self._pending else None
        same = last if isinstance(last, MergedLines) else MergedLines()
        if same is not last:
            self._pending.append(same)
        for line in shown:
            same.add(event.rank, line, event.time_s)

    def _labelled(self, same: MergedLines) -> Iterator[str]:
        for ranks, line in same.joined():
            label = self._label(ranks[0]) if len(ranks) == 1 else f"[{formatting.spans(ranks)}] "
            yield f"{label}{line}\n"

    def _room(self, rank: int) -> int:
        """Return how many more lines of ``rank`` may be printed: 0 once lines have been left out."""
        if rank in self._tails:
            return 0
        shown = self._num_shown[rank]
        share = _MAX_HEAD_LINES // self._num_processes
        room = max(_MAX_HEAD_LINES - self._num_shown.total(), share - shown)
        return max(min(HEAD_LINES - shown, room), 0)

    def _end_all(self) -> None:
        """Show the last lines of ranks that printed a lot, and start counting again."""
        self._end_question(is_answered=False)
        for rank in sorted(self._tails):
            self._end(rank)
        self._tails = {}
        self._num_lines.clear()
        self._num_shown.clear()

    def _end(self, rank: int) -> None:
        label, tail = self._label(rank), self._tails[rank]
        num_hidden = self._num_lines[rank] - self._num_shown[rank] - len(tail)
        self._num_hidden += num_hidden
        text = ""
        if num_hidden:
            log = f"; complete log: {self._log_dir}/rank_{rank}.log" if self._log_dir else ""
            text = f"{label}... {formatting.count(num_hidden, 'line')} not shown{log}\n"
        self._pending.append(text + "".join(f"{label}{_shorten(line)}\n" for line in tail))

    def _add_display(self, event: Displayed) -> None:
        event = self._with_own_display_id(event)
        if event.update:
            # Only the last update of an output within a tick is visible.
            same = [item for item in self._pending if isinstance(item, Displayed) and _is_same(item, event)]
            for item in same:
                self._pending.remove(item)
            self._pending.append(event)
            return
        if event.rank in self._ranks_without_displays:
            return
        share = _NUM_DISPLAYS // self._num_processes
        if self._num_displays[event.rank] < share or self._num_displays.total() < _NUM_DISPLAYS:
            self._num_displays[event.rank] += 1
            self._pending.append(event)
        else:
            self._ranks_without_displays.add(event.rank)
            self._pending.append(
                f"{self._label(event.rank)}... this rank displays a lot; further displays are not shown\n"
            )

    def _with_own_display_id(self, event: Displayed) -> Displayed:
        """Make display ids of ranks other than 0 unique, because all ranks run the same code with the same ids."""
        display_id = event.transient.get("display_id")
        if not isinstance(display_id, str) or event.rank == 0:
            return event
        if not event.update:
            self._display_ids.add((event.rank, display_id))
        if (event.rank, display_id) not in self._display_ids:
            return event  # an output of the notebook that existed before the launch
        return replace(event, transient={**event.transient, "display_id": f"{display_id}-rank{event.rank}"})

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        lines: list[str] = []
        for item in pending:
            if isinstance(item, str):
                lines.append(item)
                continue
            if isinstance(item, MergedLines):
                lines += self._labelled(item)
                continue
            if self._publish is None:
                lines += [] if item.update else [f"{self._label(item.rank)}{_as_text(item.data)}\n"]
                continue
            if item.rank != 0 and not item.update:
                lines.append(f"{self._label(item.rank)}displayed:\n")
            self._write(lines)
            lines = []
            self._publish(item)
        self._write(lines)
        self._pace.note_published()

    def _flush_displays(self) -> None:
        if self._publish is None:
            return
        held = self._pending
        self._pending = [item for item in held if isinstance(item, Displayed)]
        if self._pending:
            self._flush()
        self._pending = [item for item in held if not isinstance(item, Displayed)]

    def _write(self, lines: list[str]) -> None:
        if self._folded is not None:
            parts = ([line] if isinstance(line, _NoteLine) else self._folded.take([line]) for line in lines)
            lines = [line for part in parts for line in part]
        for are_notes, group in groupby(
            lines, lambda line: self._notes_to_stderr and isinstance(line, _NoteLine)
        ):
            self._print("".join(group), sys.stderr if are_notes else None)

    def _print(self, text: str, stream: TextIO | None = None) -> None:
        if not text:
            return
        if self._question is not None:
            text = f"\n{text}{self._prompt}"
        stream = stream or self._stream or sys.stdout
        with self._live.hidden() if self._live is not None else nullcontext():
            write(stream, text)
            if self._publish is None:  # kernels flush by themselves, and their flush() takes milliseconds
                stream.flush()


def publish_in_shell(shell: Any) -> Publish:
    """Return a function that shows the workers' displays in the running cell of ``shell``."""

    def publish(event: Displayed) -> None:
        shell.display_pub.publish(
            data=dict(event.data),
            metadata=dict(event.metadata),
            transient=dict(event.transient),
            update=event.update,
        )

    return publish


def _shorten(line: str) -> str:
    if len(line) <= _LINE_LENGTH:
        return line
    return f"{line[:_LINE_LENGTH]} ... ({formatting.count(len(line) - _LINE_LENGTH, 'character')} more)"


def _as_text(data: Mapping[str, Any]) -> str:
    return _shorten(str(data.get("text/plain", "displayed: " + ", ".join(data))))


def _is_same(first: Displayed, second: Displayed) -> bool:
    return first.update and first.transient.get("display_id") == second.transient.get("display_id")


# --- lines of a cell that are folded because there are many ---------------------------------------------------------


class FoldedLines:
    """The lines of a job in a cell: the first ones, the last ones, and between them a line that unfolds the others."""

    def __init__(self) -> None:
        self._num_first = 0
        self._others: deque[str] = deque(maxlen=_MAX_FOLDED)
        self._num_others = 0

    def take(self, texts: Sequence[str]) -> list[str]:
        """Add strings that consist of whole lines; return the job's first lines, to be printed immediately."""
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        first = lines[: max(_FIRST_IN_CELL - self._num_first, 0)]
        self._num_first += len(first)
        self._others.extend(lines[len(first) :])
        self._num_others += len(lines) - len(first)
        return first

    def rest(self, log_dir: str, num_hidden: int) -> tuple[Bundle | None, list[str]]:
        """Return an output with lines to unfold (None if there are few), and the last lines, to be printed below it.

        Args:
            log_dir: folder with the complete logs; empty if there is none.
            num_hidden: number of the job's lines that are only in the logs.
        """
        others = list(self._others)
        num_last = MAX_IN_CELL - _FIRST_IN_CELL - 2
        if self._num_others <= num_last:
            return None, others
        folded, last = others[:-num_last], others[-num_last:]
        num_others = self._num_others - num_last + num_hidden
        summary = formatting.count(num_others, "more line")
        unfolds = "show all:" if len(folded) == num_others else f"show {len(folded):,} of"
        logs = f"; complete logs: {log_dir}" if log_dir else ""
        text = escape("".join(folded))
        shown = (
            f'<details style="font-family:system-ui,sans-serif;font-size:13px"><summary style="cursor:pointer">'
            f'{unfolds} {summary}</summary><pre style="{_FOLDED}">{text}</pre></details>'
        )
        return {"text/html": shown, "text/plain": f"... {summary} not shown{logs}"}, last

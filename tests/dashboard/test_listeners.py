"""The dashboards as listeners: what they publish, and when. There is no kernel and no waiting: tests advance the
clock.
"""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch import dashboard
from nblaunch.dashboard.base import Dashboard, GuardedDashboard, Pace, ViewingDashboard
from nblaunch.dashboard.lines import LinesPrinter, MergedLines
from nblaunch.dashboard.notebook import NotebookDashboard
from nblaunch.dashboard.text import TextDashboard
from nblaunch.dashboard.view import JobView
from nblaunch.events import AttemptStarted, Displayed, Event, LogLines, Note
from nblaunch.wire.board import SlotReading
from tests.dashboard.scenes import START_S, Clock, ended, sample, started


class Publications:
    """Replaces a front end."""

    def __init__(self) -> None:
        self.bundles: list[Mapping[str, str]] = []
        self.updates: list[bool] = []
        self.ids: set[str] = set()

    def __call__(self, bundle: Mapping[str, str], display_id: str, is_update: bool) -> None:
        self.bundles.append(bundle)
        self.updates.append(is_update)
        self.ids.add(display_id)


def feed(listener: Dashboard, events: Sequence[Event]) -> None:
    for event in events:
        listener.on_event(event)


class Writes(io.StringIO):
    """Counts calls."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)


def lines_of(rank: int, first: int, last: int) -> LogLines:
    return LogLines(rank, START_S, lines=tuple(f"line {number}" for number in range(first, last)))


# --- what it costs ---------------------------------------------------------------------------------------------------


class CountingDashboard(ViewingDashboard):
    """Counts drawings."""

    num_drawn = 0

    def _draw(self) -> None:
        self.num_drawn += 1
        self._pace.note_published()

    def _draw_last(self, view: JobView) -> None:
        self.last = view


def test_readings_that_are_not_drawn_still_count() -> None:
    clock = Clock()
    board = CountingDashboard(Pace(first_s=0.0, clock=clock))
    feed(board, started(8))
    for tick in range(1, 21):
        clock.now_s += 0.1
        board.on_readings([sample(rank, tick) for rank in range(8)])
    assert 4 <= board.num_drawn <= 11
    feed(board, ended(8, 2.0))
    board.close()
    assert {rank.step for rank in board.last.ranks} == {20}


def test_suspension_keeps_reading_and_event_times_aligned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now_s)
    board = CountingDashboard(Pace())
    feed(board, started(2))
    now_s += 3600
    feed(board, [LogLines(0, START_S + 3600, lines=("awake",))])
    board.on_readings([sample(rank, 1) for rank in range(2)])
    board.close()
    assert [rank.changed_s - START_S for rank in board.last.ranks] == pytest.approx([3600, 3600])


# --- the table in a notebook -----------------------------------------------------------------------------------------


def test_a_short_job_publishes_one_final_table() -> None:
    shown, clock = Publications(), Clock()
    table = NotebookDashboard(publish=shown, clock=clock)
    feed(table, started(2))
    clock.now_s += 0.1
    table.on_readings([SlotReading(0), SlotReading(1)])
    feed(table, ended(2, 0.2))
    table.close()
    table.close()
    assert shown.updates == [False]
    assert "train: done in 0.20 s" in shown.bundles[0]["text/plain"]
    assert set(shown.bundles[0]) == {"text/html", "text/plain"}


def test_a_long_job_updates_one_output_a_few_times_a_second() -> None:
    shown, clock = Publications(), Clock()
    table = NotebookDashboard(publish=shown, clock=clock)
    feed(table, started(2))
    for tick in range(100):
        clock.now_s += 0.1
        table.on_readings([sample(rank, tick) for rank in range(2)])
    assert len(shown.ids) == 1
    assert shown.updates == [False] + [True] * (len(shown.updates) - 1)
    assert 15 <= len(shown.updates) <= 35  # 10 s: 4 per second at first, then about 2


def test_a_large_table_is_published_more_rarely() -> None:
    shown, clock = Publications(), Clock()
    table = NotebookDashboard(publish=shown, clock=clock)
    feed(table, started(64))
    for tick in range(300):
        clock.now_s += 0.1
        table.on_readings([sample(rank, tick) for rank in range(64)])
    sent = sum(len(text) for bundle in shown.bundles for text in bundle.values())
    assert sent / 30 < 20_000
    assert len(shown.bundles) >= 10


def test_an_idle_job_publishes_once_a_second() -> None:
    shown, clock = Publications(), Clock()
    table = NotebookDashboard(publish=shown, clock=clock)
    feed(table, started(2))
    for _ in range(100):
        clock.now_s += 0.1
        table.on_readings([sample(rank, 3) for rank in range(2)])
    assert 10 <= len(shown.bundles) <= 13
    assert len({bundle["text/html"] for bundle in shown.bundles}) == len(shown.bundles)


def test_a_background_job_is_shown_at_once_with_its_output() -> None:
    shown = Publications()
    table = NotebookDashboard(background=True, publish=shown, clock=Clock())
    assert (shown.updates, shown.bundles[0]["text/plain"]) == ([False], "starting")
    notes = [Note(-1, START_S, text="started by fork"), Note(1, START_S, text="passed over")]
    feed(table, [*started(2), lines_of(1, 0, 3), *notes, *ended(2)])
    table.close()
    assert shown.updates == [False, True]
    assert "[1] line 2" in shown.bundles[-1]["text/html"]
    assert "started by fork" in shown.bundles[-1]["text/plain"]
    assert shown.bundles[-1]["text/plain"].count("passed over") == 1


def test_an_unstarted_launch_leaves_no_output() -> None:
    shown = Publications()
    NotebookDashboard(publish=shown).close()
    assert shown.bundles == []
    NotebookDashboard(background=True, publish=shown).close()
    assert shown.bundles[-1]["text/plain"] == "not started"


def test_an_abandoned_job_is_shown_as_cancelled() -> None:
    shown = Publications()
    table = NotebookDashboard(publish=shown, clock=Clock())
    feed(table, started(1))
    table.close()
    assert "cancelled after" in shown.bundles[-1]["text/plain"]
    assert "cancelled after" in shown.bundles[-1]["text/html"]


@pytest.mark.parametrize("is_html", [True, False])
def test_watched_table_includes_last_lines(is_html: bool) -> None:
    shown, clock = Publications(), Clock()
    table = NotebookDashboard(publish=shown, clock=clock, is_watched=True, is_html=is_html)
    feed(table, started(2))
    for tick in range(1, 31):
        clock.now_s += 0.5
        table.on_event(LogLines(1, START_S + tick, lines=(f"line {tick}",)))
        table.on_readings([sample(rank, tick) for rank in range(2)])
    clock.now_s += 5.0
    table.on_readings([sample(rank, 31) for rank in range(2)])
    assert all("line 30" in text for text in shown.bundles[-1].values())
    feed(table, ended(2, 15))
    table.close()
    assert not any("line 30" in text for text in shown.bundles[-1].values())


def test_text_can_be_requested() -> None:
    shown = Publications()
    table = NotebookDashboard(is_html=False, publish=shown)
    feed(table, [*started(1), *ended(1)])
    table.close()
    assert set(shown.bundles[0]) == {"text/plain"}


# --- output of the workers -------------------------------------------------------------------------------------------


def test_lines_of_a_tick_are_written_at_once() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream, clock=Clock())
    feed(printer, [*started(4), lines_of(2, 0, 2), lines_of(0, 0, 1), lines_of(2, 2, 3)])
    assert stream.num_writes == 0
    printer.on_readings([])
    assert stream.num_writes == 1
    assert stream.getvalue() == "[2] line 0\n[2] line 1\n[0] line 0\n[2] line 2\n"
    printer.on_readings([])
    assert stream.num_writes == 1


def test_only_several_processes_have_labels() -> None:
    stream = Writes()
    feed(many := LinesPrinter(stream=stream), [*started(12), lines_of(2, 0, 1), lines_of(11, 0, 1)])
    many.close()
    feed(one := LinesPrinter(stream=stream), [*started(1), lines_of(0, 0, 1)])
    one.close()
    assert stream.getvalue() == "[ 2] line 0\n[11] line 0\nline 0\n"


def test_custom_labels_know_the_local_rank() -> None:
    stream = Writes()
    begin = AttemptStarted(
        -1, START_S, num_processes=4, label_template="<${rank}, here ${local_rank}> ", first_rank=2
    )
    feed(printer := LinesPrinter(stream=stream), [begin, lines_of(2, 0, 1), lines_of(3, 0, 1)])
    printer.close()
    assert stream.getvalue() == "<2, here 0> line 0\n<3, here 1> line 0\n"


def prints(rank: int, *lines: str, after_s: float = 0.0) -> LogLines:
    return LogLines(rank, START_S + after_s, lines=lines)


def test_equal_lines_of_ranks_are_shown_once() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream, merges_equal=True)
    warned = [prints(rank, "deprecated", f"loss {rank}", "saved") for rank in range(4)]
    two = [prints(rank, "hello") for rank in (1, 3)]
    feed(printer, [*started(12), *warned, *two, *(prints(rank, "bye") for rank in (11, 2, 3, 4))])
    printer.close()
    assert stream.getvalue().splitlines() == [
        "[0-3] deprecated",
        "[ 0] loss 0",
        "[ 0] saved",
        "[ 1] loss 1",
        "[ 1] saved",
        "[ 2] loss 2",
        "[ 2] saved",
        "[ 3] loss 3",
        "[ 3] saved",
        "[ 1] hello",
        "[ 3] hello",
        "[2-4, 11] bye",
    ]


def test_lines_with_custom_labels_are_not_merged() -> None:
    stream = Writes()
    begin = AttemptStarted(-1, START_S, num_processes=3, label_template="<${rank}> ")
    printer = LinesPrinter(stream=stream, merges_equal=True)
    feed(printer, [begin, *(prints(rank, "ready") for rank in range(3))])
    printer.close()
    assert stream.getvalue() == "<0> ready\n<1> ready\n<2> ready\n"


def test_only_nearby_equal_lines_are_merged() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream, merges_equal=True, defers_lines=True)
    early = [prints(rank, "ready") for rank in range(3)]
    late = [prints(3, "ready", after_s=60.0), Note(-1, START_S + 60, text="a note")]
    feed(printer, [*started(4), *early, *late, *(prints(rank, "ready", after_s=61.0) for rank in range(3))])
    printer.close()
    assert stream.getvalue() == "[0-2] ready\n[3] ready\nnblaunch: a note\n[0-2] ready\n"


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.floats(0, 3)), max_size=60))
def test_merged_lines_keep_each_ranks_order(
    printed: list[tuple[int, str, float]],
) -> None:
    lines = MergedLines()
    for rank, text, time_s in printed:
        lines.add(rank, text, time_s)
    for rank in range(5):
        shown = [text for ranks, text in lines.joined() if rank in ranks]
        assert shown == [text for one, text, _ in printed if one == rank]


def test_ranks_share_the_shown_lines() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream, clock=Clock())
    feed(printer, started(8))
    feed(printer, [lines_of(3, 0, 2000)])
    feed(printer, [lines_of(rank, first, first + 50) for first in range(0, 1000, 50) for rank in (0, 1, 2)])
    printer.close()
    lines = stream.getvalue().splitlines()
    per_rank = [sum(line.startswith(f"[{rank}] line") for line in lines) for rank in range(4)]
    assert per_rank[3] == 500 + 20  # rank 0 is alone at first
    assert all(125 + 20 <= number <= 200 + 20 for number in per_rank[:3])
    for rank in range(4):
        shown = next(line for line in lines if line.startswith(f"[{rank}] ...") and "not shown" in line)
        total = 2000 if rank == 3 else 1000
        assert f"... {total - per_rank[rank]:,} lines not shown" in shown


def test_output_of_many_ranks_is_bounded() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream, clock=Clock())
    feed(printer, started(512))
    feed(printer, [lines_of(rank, first, first + 50) for first in range(0, 500, 50) for rank in range(512)])
    printer.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) < 3_200
    assert any(line.startswith("[511]") for line in lines)  # every rank has some lines
    assert sum("prints a lot" in line for line in lines) == sum("rank_" in line for line in lines) == 512
    hidden = [
        int(found[1].replace(",", "")) for line in lines if (found := re.search(r"([\d,]+) lines not", line))
    ]
    num_shown = sum("] line " in line for line in lines)
    assert sum(hidden) + num_shown == 512 * 500


def test_writes_are_paced() -> None:
    stream, clock = Writes(), Clock()
    printer = LinesPrinter(stream=stream, first_s=0.3, clock=clock)
    feed(printer, started(2))
    for tick in range(100):
        clock.now_s += 0.1
        printer.on_event(lines_of(0, tick, tick + 1))
        printer.on_readings([])
        assert stream.num_writes == 0 or clock.now_s >= 50.3
    printer.close()
    assert stream.num_writes <= 35
    assert stream.getvalue() == "".join(f"[0] line {number}\n" for number in range(100))


@pytest.mark.parametrize("chunk", [1, 7, 500, 501, 10_000])
def test_endless_output_is_shortened(chunk: int) -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream)
    feed(printer, started(2))
    for first in range(0, 10_000, chunk):
        printer.on_event(lines_of(1, first, min(first + chunk, 10_000)))
        printer.on_readings([])
    printer.on_event(lines_of(0, 0, 1))
    printer.close()
    lines = stream.getvalue().splitlines()
    assert lines.count("[0] line 0") == 1
    lines.remove("[0] line 0")
    assert lines[:500] == [f"[1] line {number}" for number in range(500)]
    assert lines[500:502] == [
        "[1] ... this rank prints a lot; its last lines follow when the job ends",
        "[1] ... 9,480 lines not shown; complete log: /logs/train-1/rank_1.log",
    ]
    assert lines[502:] == [f"[1] line {number}" for number in range(9_980, 10_000)]


def test_each_attempt_has_its_own_lines_and_log() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream)
    feed(printer, [*started(2), lines_of(1, 0, 600)])
    feed(printer, [*started(2, attempt=1, log_dir="/logs/train-1/attempt_1"), lines_of(1, 0, 3)])
    printer.close()
    lines = stream.getvalue().splitlines()
    assert lines[501] == "[1] ... 80 lines not shown; complete log: /logs/train-1/rank_1.log"
    assert lines[502:] == [f"[1] line {number}" for number in (*range(580, 600), 0, 1, 2)]


def test_notes_are_one_line_each() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream)
    feed(printer, [*started(2), Note(-1, START_S, text="forked"), Note(1, START_S, text="bf16 is emulated")])
    printer.close()
    assert stream.getvalue() == "nblaunch: forked\n[1] bf16 is emulated\n"


def test_a_very_long_line_is_cut() -> None:
    stream = Writes()
    feed(printer := LinesPrinter(stream=stream), [*started(2), LogLines(0, START_S, lines=("x" * 5000,))])
    printer.close()
    assert stream.getvalue() == f"[0] {'x' * 4000} ... (1,000 characters more)\n"


def test_programs_get_every_line_whole() -> None:
    stream = Writes()
    printer = LinesPrinter(stream=stream, shortens=False, clock=Clock())
    feed(printer, [*started(1), lines_of(0, 0, 2_000), LogLines(0, START_S, lines=("x" * 5000,))])
    printer.close()
    assert stream.getvalue() == "".join(f"line {number}\n" for number in range(2_000)) + "x" * 5000 + "\n"


def test_a_stream_that_lacks_characters_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    feed(printer := LinesPrinter(stream=stream), [*started(2), LogLines(0, START_S, lines=("漢字 \ud83d",))])
    printer.close()
    assert raw.getvalue() == b"[0] ?? ?\n"


def figure(
    rank: int, display_id: str | None = None, *, update: bool = False, text: str = "<Figure>"
) -> Displayed:
    transient = {"display_id": display_id} if display_id else {}
    return Displayed(rank, START_S, {"text/plain": text, "image/png": "…"}, {}, transient, update)


def test_displays_keep_their_place_and_label() -> None:
    stream, shown = Writes(), []

    def publish(event: Displayed) -> None:
        shown.append((event.rank, stream.getvalue()))

    printer = LinesPrinter(stream=stream, publish=publish)
    feed(printer, [*started(3), lines_of(0, 0, 1), figure(0), lines_of(0, 1, 2), figure(2)])
    printer.close()
    assert shown == [(0, "[0] line 0\n"), (2, "[0] line 0\n[0] line 1\n[2] displayed:\n")]


def test_equal_display_ids_of_ranks_stay_separate() -> None:
    shown: list[Displayed] = []
    printer = LinesPrinter(stream=Writes(), publish=shown.append)
    feed(printer, [*started(2), figure(0, "plot"), figure(1, "plot")])
    printer.on_readings([])
    feed(printer, [figure(rank, "plot", update=True, text=text) for text in "ab" for rank in (0, 1)])
    feed(printer, [figure(1, "of the notebook", update=True)])
    printer.close()
    seen = [
        (event.rank, event.transient["display_id"], event.update, event.data["text/plain"]) for event in shown
    ]
    assert seen == [
        (0, "plot", False, "<Figure>"),
        (1, "plot-rank1", False, "<Figure>"),
        (0, "plot", True, "b"),  # only the newest of several updates in a tick is sent
        (1, "plot-rank1", True, "b"),
        (1, "of the notebook", True, "<Figure>"),
    ]


def test_endless_displays_are_left_out() -> None:
    stream, shown = Writes(), []
    printer = LinesPrinter(stream=stream, publish=shown.append)
    feed(printer, [*started(2), *(figure(rank) for rank in (0, 1) for _ in range(300))])
    printer.close()
    assert Counter(event.rank for event in shown) == {0: 120, 1: 60}, "one rank leaves the others their share"
    ends = [line for line in stream.getvalue().splitlines() if "displays a lot" in line]
    assert ends == [
        f"[{rank}] ... this rank displays a lot; further displays are not shown" for rank in (0, 1)
    ]


def test_a_terminal_shows_the_text_of_a_display() -> None:
    stream = Writes()
    feed(printer := LinesPrinter(stream=stream), [*started(2), figure(1), figure(1, "x", update=True)])
    printer.close()
    assert stream.getvalue() == "[1] <Figure>\n"


# --- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal_gets_few_lines_and_a_final_table() -> None:
    stream, clock = Writes(), Clock()
    board = TextDashboard(stream=stream, clock=clock)
    feed(board, started(2))
    for tick in range(600):
        clock.now_s += 0.1
        board.on_readings([sample(rank, tick) for rank in range(2)])
    feed(board, ended(2, 60.0))
    board.close()
    board.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("train: running for 2 s; rank 0 training, epoch 1/1, step")
    progress = [line for line in lines if "running for" in line]
    assert 10 <= len(progress) <= 13
    assert lines[len(progress)] == "train: done in 1:00 on 2 processes (cpu, fork)"
    assert lines[-1] == "logs: /logs/train-1"


# --- choosing --------------------------------------------------------------------------------------------------------


def test_unknown_kinds_are_rejected_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'auto', 'widgets', 'html', 'text', 'none'") as caught:
        dashboard.choose("rich")
    assert "'rich'" in str(caught.value)


@pytest.mark.parametrize("kind", ["auto", "widgets", "html", "text"])
@pytest.mark.parametrize("background", [False, True])
def test_scripts_print_tables_to_stderr(
    kind: str, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for listener in dashboard.choose(kind, background=background):
        feed(listener, [*started(2), lines_of(1, 0, 1), *ended(2)])
        listener.close()
    out, err = capsys.readouterr()
    assert out == "[1] line 0\n"
    assert "train: done in 12 s" in err


@pytest.mark.parametrize("background", [False, True])
def test_dashboard_none_shows_nothing(background: bool, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = dashboard.choose("none", background=background)
    assert chosen == []
    assert not dashboard.show_again(chosen)
    dashboard.close_rejected(chosen, ValueError("no such device"))
    assert capsys.readouterr() == ("", "")


def test_choosing_a_dashboard_does_not_import_jupyter() -> None:
    code = (
        "import sys, nblaunch.dashboard as d; d.choose('auto'); d.choose('html', background=True); "
        "print([m for m in ('IPython', 'ipywidgets', 'comm', 'torch', 'zmq', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@final
class BrokenDashboard(Dashboard):
    """A dashboard whose methods all raise."""

    num_calls = 0

    def on_event(self, event: Event) -> None:
        self.num_calls += 1
        raise BrokenPipeError("the front end went away")

    def on_readings(self, samples: Sequence[SlotReading]) -> None:
        self.num_calls += 1
        raise BrokenPipeError

    def close(self) -> None:
        self.num_calls += 1
        raise BrokenPipeError

    def show_again(self) -> bool:
        self.num_calls += 1
        raise BrokenPipeError


def test_a_dashboard_that_cannot_be_shown_again_does_not_break_the_cell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = BrokenDashboard()
    with caplog.at_level(logging.WARNING):
        assert not dashboard.show_again([GuardedDashboard(broken), GuardedDashboard(broken)])
    assert broken.num_calls == 2
    assert len(caplog.records) == 2


def test_a_broken_dashboard_is_switched_off_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenDashboard()
    guarded = GuardedDashboard(broken)
    with caplog.at_level(logging.WARNING):
        feed(guarded, started(2))
        guarded.on_readings([])
        guarded.close()
    assert broken.num_calls == 1
    assert [record.message for record in caplog.records] == [
        "BrokenDashboard failed and was turned off; the job continues without it"
    ]
    assert "the front end went away" in caplog.text


def test_dashboards_pass_interrupts_on() -> None:
    def interrupted(bundle: Mapping[str, str], display_id: str, is_update: bool) -> None:
        raise KeyboardInterrupt

    guarded = GuardedDashboard(NotebookDashboard(publish=interrupted))
    feed(guarded, started(1))
    with pytest.raises(KeyboardInterrupt):
        guarded.close()

"""Text and HTML of a job: complete, aligned, escaped, for any number of processes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings

from nblaunch.dashboard.html import mimebundle, render_html
from nblaunch.dashboard.table import count, duration, loss, rate, select_ranks, tabulate, who
from nblaunch.dashboard.text import progress_line, render_text
from nblaunch.dashboard.view import JobView, fold, fold_samples
from nblaunch.events import Event, JobFinished, JobStarted, LogLines, Metric, Note, StatusLine, WorkerState
from nblaunch.wire.board import Sample
from tests.dashboard.scenes import START_S, ended, killed, raised, sample, started, trained, view_of
from tests.dashboard.test_view import any_story, told

HOSTILE = "<script>alert('1')</script> & \"q\" ünï 漢字 🙂"


class Reader(HTMLParser):
    """Reads a fragment as a browser would: balanced tags, only harmless ones, and the text that is seen."""

    VOID = frozenset({"br", "hr", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href", "class", "id")
            assert "url(" not in (value or "")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "table" in self.open and "title" not in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.texts)


HARMLESS = {
    "div",
    "span",
    "b",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "pre",
    "svg",
    "title",
    "polyline",
}


@pytest.mark.parametrize("num_processes", [1, 8, 16])
def test_text_has_one_line_per_process(num_processes: int) -> None:
    lines = render_text(trained(num_processes)).splitlines()
    assert lines[0].split() == ["rank", "state", "step", "steps/s", "left", "loss"]
    assert [line.split()[0] for line in lines[1:-1]] == [str(rank) for rank in range(num_processes)]
    assert lines[1].split() == ["0", "training", "100/1,000", "10.0", "1:30", "0.0099"]
    assert lines[-1].startswith(f"train: running for 10 s on {count(num_processes, 'process')} (cpu, fork)")


def test_text_is_aligned() -> None:
    view = fold_samples(trained(12), [sample(11, 3, 1000, loss=12.5)], START_S + 11)
    lines = render_text(view).splitlines()[:13]
    ends = {re.search(r"/1,000", line).end() for line in lines[1:]}  # type: ignore[union-attr]
    assert len(ends) == 1
    assert len({line.index("training") for line in lines[1:]}) == 1


def test_beyond_16_processes_the_extremes_and_a_summary_are_shown() -> None:
    view = trained(64)
    view = fold_samples(view, [sample(40, 80), sample(7, 120)], START_S + 11)
    view = view_of([raised(20)], view)
    shown, others = select_ranks(view)
    ids = [rank.rank for rank in shown]
    assert ids[0] == 20
    assert {0, 7, 40} <= set(ids)
    assert len(shown) <= 16
    assert len(shown) + len(others) == 64
    last = tabulate(view).rows[-1]
    assert (last.rank, last.label) == (None, f"{len(others)} others")
    assert f"{len(others)} others" in render_text(view)
    assert f"{len(others)} others" in Reader(render_html(view)).text


def test_columns_without_content_are_left_out() -> None:
    view = view_of([*started(2), *ended(2, 0.031)])
    expected = ["rank  state", "   0  done", "   1  done", "train: done in 0.03 s on 2 processes (cpu, fork)"]
    assert render_text(view).splitlines() == [*expected, "logs: /logs/train-1"]
    assert Reader(render_html(view)).rows == [["rank", "state"], ["0", "● done"], ["1", "● done"]]


def test_text_and_html_say_the_same() -> None:
    view = trained(3)
    view = view_of([StatusLine(1, START_S, text="45%|####"), Metric(0, START_S, 7, {"accuracy": 0.91})], view)
    table = tabulate(view)
    text, html = render_text(view), Reader(render_html(view))
    for row in table.rows:
        for cell in (row.label, row.state_text, *row.cells, row.detail):
            assert cell in text
            assert cell in html.text
    assert "accuracy 0.91 (step 7)" in text
    assert "accuracy 0.91 (step 7)" in html.text
    heads = ["rank", "state", "progress", "step", "steps/s", "left", "loss", "trend", "output"]
    assert html.rows[0] == heads
    assert {len(row) for row in html.rows} == {len(heads)}


def test_failures_name_the_root_cause_first_and_the_same_words_once() -> None:
    events = [raised(rank, "peer closed", is_consequence=True) for rank in (0, 2, 3)]
    view = view_of(
        [*started(5), *events, raised(1), killed(4, -9), JobFinished(-1, START_S + 5, "failed", 1)]
    )
    lines = render_text(view).splitlines()
    assert "train: failed in rank 1 after 5.0 s on 5 processes (cpu, fork)" in lines
    where = "(line 9: loss = model(batch))"
    at = lines.index(f"rank 1: ValueError: bad shape {where}")
    assert lines[at + 1] == f"ranks 0, 2-3 (as a consequence): ValueError: peer closed {where}"
    assert "killed by SIGKILL" in lines[5]
    assert tabulate(view).failures[0][1] in Reader(render_html(view)).text


def test_many_different_failures_are_summed_up() -> None:
    view = view_of([*started(9), *(raised(rank, f"failure {rank}") for rank in range(9))])
    assert tabulate(view).failures[-1] == ("5 more ranks", "see the logs")


def test_a_failure_of_no_rank_is_still_told() -> None:
    view = view_of([*started(2), JobFinished(-1, START_S + 1, "failed", None, "the store went away")])
    assert "job: the store went away" in render_text(view)


def test_what_workers_say_is_escaped_everywhere() -> None:
    begin = started(2, function_name=HOSTILE, backend=HOSTILE, log_dir=HOSTILE)
    view = view_of(
        [
            *begin,
            StatusLine(0, START_S, text=HOSTILE),
            LogLines(1, START_S, lines=(HOSTILE,)),
            Note(1, START_S, text=HOSTILE),
            Metric(0, START_S, 1, {HOSTILE: HOSTILE}),
            raised(1, HOSTILE),
        ]
    )
    html = render_html(view, with_output=True)
    reader = Reader(html)
    assert set(reader.tags) <= HARMLESS
    assert reader.text.count(HOSTILE) >= 6
    assert "<script" not in html
    assert render_text(view, with_output=True).count(HOSTILE) >= 6


def test_html_stands_alone_in_any_theme() -> None:
    html = render_html(trained(8), with_output=True)
    assert not re.search(r"<style|<link|<img|https?:|@import|url\(", html)
    assert "tabular-nums" in html
    # Neither ink nor paper is named: both come from the theme.
    assert not re.search(r"(?<![-\w])color:(?:black|white|#000|#fff)", html)
    assert not re.search(r"background:(?:white|black|#fff|#000)", html)
    assert 'aria-label="loss from 1 to 0.009901"' in html


def test_a_bar_never_leaves_its_frame() -> None:
    html = render_html(fold_samples(trained(1), [sample(0, 5000, 1000)], START_S))
    assert "width:100%" in html


def test_a_flat_loss_can_be_drawn() -> None:
    view = view_of(started(1))
    for step in range(5):
        view = fold_samples(view, [sample(0, step, loss=0.5)], START_S + step)
    Reader(render_html(view))


def test_the_output_of_a_detached_job_is_part_of_its_table() -> None:
    view = view_of([*started(2), LogLines(1, START_S, lines=("hello",)), Note(-1, START_S, text="forked")])
    assert "[1] hello" not in render_text(view)
    for text in (render_text(view, with_output=True), Reader(render_html(view, with_output=True)).text):
        assert "[1] hello" in text
        assert "note: forked" in text


def test_a_job_that_never_started_can_be_shown() -> None:
    assert mimebundle(JobView()).keys() == {"text/html", "text/plain"}
    assert mimebundle(JobView())["text/plain"] == "starting"
    assert render_text(view_of([JobFinished(-1, 1.0, "cancelled")])) == "not started"


def test_a_restart_is_named() -> None:
    view = fold(view_of(started(2)), JobStarted(-1, START_S + 1, "train", 2, "cpu", "fork", attempt=1))
    assert "on 2 processes (cpu, fork), attempt 2" in render_text(view)


def test_progress_line_tells_about_the_slowest() -> None:
    view = fold_samples(trained(4), [sample(2, 60, state=WorkerState.WAITING)], START_S + 11)
    line = progress_line(view)
    assert line.startswith("train: running for 11 s; rank 2 waiting, step 60/1,000")
    assert "rank" not in progress_line(trained(1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.0314, "0.03 s"),
        (0.999, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1:00"),
        (187.2, "3:07"),
        (3723.0, "1:02:03"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert [rate(value) for value in (0.0834, 0.9999, 3.214, 38.21, 1240.2)] == [
        "0.083",
        "1.00",
        "3.21",
        "38.2",
        "1,240",
    ]
    values = (0.53214, 12.041, 1234.5, 3.1e-5, 1e9, 0.0, float("nan"), float("-inf"))
    assert [loss(value) for value in values] == [
        "0.5321",
        "12.04",
        "1234",
        "3.1e-05",
        "1.0e+09",
        "0.0000",
        "nan",
        "-inf",
    ]
    assert who([3]) == "rank 3"
    assert who([0, 2, 5, 6, 7]) == "ranks 0, 2, 5-7"


@settings(deadline=None)  # other tests may keep the processors busy
@given(any_story)
def test_whatever_was_told_can_be_rendered(story: list[Event | list[Sample]]) -> None:
    view = told(story)
    bundle = mimebundle(view, with_output=True)
    assert set(Reader(bundle["text/html"]).tags) <= HARMLESS
    assert bundle["text/plain"].encode("utf-8")
    table = tabulate(view)
    num_lines = len(table.rows) + len(table.failures) + len(table.notes) + len(view.tail)
    assert len(bundle["text/plain"].splitlines()) <= num_lines + 5

"""Text and HTML of a job: complete, aligned, escaped, for any number of processes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.html import mimebundle, render_html, rows_html
from nblaunch.dashboard.palette import BAD, CALM, CAUTION
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.text import progress_line, render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import (
    AttemptStarted,
    Event,
    HostMemory,
    JobEnded,
    Metric,
    Note,
    StatusLine,
    WorkerState,
)
from nblaunch.formatting import duration, loss, rate
from nblaunch.wire.board import SlotReading
from tests.dashboard.scenes import START_S, ended, killed, raised, sample, started, trained, view_of
from tests.dashboard.test_view import any_story, view_after
from tests.golden_files import Golden

HOSTILE = "<script>alert('1')</script> & \"q\" ünï 漢字 🙂"


class Reader(HTMLParser):
    """Reads a fragment as a browser does; checks that its tags are balanced and harmless, and collects its visible
    text.
    """

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
        elif tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "table" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.texts)


HARMLESS = {
    "details",
    "summary",
    "div",
    "span",
    "b",
    "table",
    "tr",
    "td",
    "pre",
    "svg",
    "path",
    "g",
    "text",
}


def test_64_processes_fit_on_a_screen() -> None:
    view = view_of(
        [raised(20), *(StatusLine(rank, START_S, text="x" * 300) for rank in range(64))], trained(64)
    )
    lines = render_text(view).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 160


def test_peak_memory_has_a_column() -> None:
    view = fold_readings(
        trained(2),
        [sample(1, 101, device_bytes=10**9, device_peak_bytes=3 * 10**9, device_limit_bytes=16 * 10**9)],
        1,
    )
    view = view_of([HostMemory(0, 1.0, 800_000_000), HostMemory(1, 1.0, 900_000_000)], view)
    view = view_of([HostMemory(1, 2.0, 500_000_000)], view)
    over = view_of(ended(2), view)
    assert tabulate(over).columns[-2:] == tabulate(view).columns[-2:] == ("peak memory", "peak device")
    assert [row.cells[-2:] for row in tabulate(over).rows] == [
        ("1.70 GB", "3.00 GB"),
        ("800 MB", ""),
        ("900 MB", "3.00 GB of 16.0 GB"),
    ]


def test_memory_with_shared_pages_is_not_summed() -> None:
    readings = [HostMemory(rank, 1.0, 10**9, is_proportional=False) for rank in range(2)]
    rows = tabulate(view_of(readings, trained(2))).rows
    assert [row.cells[-1] for row in rows] == ["", "1.00 GB", "1.00 GB"]


def test_a_fallback_is_named_in_the_header() -> None:
    fallback = "workers start from a forkserver: CUDA is <in use>; nothing has to be restarted"
    events = started(2, start_method="forkserver", reason="fork is not possible", fallback=fallback)
    for view in (view_of(events), view_of([*events, *ended(2)])):
        html = render_html(view)
        assert fallback in render_text(view).splitlines()
        assert fallback in Reader(html).text
        assert "CUDA is &lt;in use&gt;" in html.partition("<table")[0]
        assert CAUTION not in html
    assert 'title="fork: nothing is pickled"' in render_html(view_of(started(2, reason="nothing is pickled")))


def test_each_outcome_has_its_words() -> None:
    def headline(**fields: object) -> str:
        return tabulate(view_of([*started(2), JobEnded(-1, START_S + 12, **fields)])).headline  # type: ignore[arg-type]

    assert headline() == "done in 12 s"
    assert headline(is_early=True) == "stopped early on request after 12 s"
    assert headline(outcome="interrupted") == "interrupted after 12 s"
    assert headline(outcome="cancelled") == "cancelled after 12 s"
    assert headline(outcome="left") == "still running, no longer followed after 12 s"
    assert headline(outcome="failed", failed_rank=1) == "failed in rank 1 after 12 s"


def test_a_warning_of_several_ranks_is_shown_once() -> None:
    late = [Note(rank, START_S, text="joins a thread", kind="warning") for rank in (0, 1)]
    text = render_text(view_of([*started(2), *late]))
    assert "warning: ranks 0 and 1: joins a thread" in text
    assert text.count("joins a thread") == 1


def test_warnings_stay_in_the_summary_and_notes_do_not_repeat_them() -> None:
    warning = Note(-1, START_S, text="memory may run out", kind="warning")
    view = view_of([*started(2), warning, warning, *ended(2)])
    assert render_text(view, tail=()).count("memory may run out") == 1
    html = Reader(render_html(view)).text
    assert "warning memory may run out" in html


def test_setting_shows_spmd_and_unusual_precision() -> None:
    assert "(cpu, fork)" in render_text(view_of(started(2, mixed_precision="no")))
    assert "(xla, fork, spmd, bf16)" in render_text(
        view_of(started(1, backend="xla", is_spmd=True, mixed_precision="bf16"))
    )


def test_a_workers_bar_replaces_missing_progress() -> None:
    line = "fold 2:  45%|████▌     | 450/1000 [00:45<00:55, 10.0it/s]"
    view = view_of([*started(2), StatusLine(1, START_S, text=line)])
    row = tabulate(view).rows[2]
    # The drawn bar would displace the numbers: columns are narrow, and the table has its own bar.
    assert (row.fraction, row.detail) == (0.45, "fold 2 450/1000 [00:45<00:55, 10.0it/s]")
    assert "width:45%" in render_html(view)
    assert "fold 2 450/1000 [00:45<00:55, 10.0it/s]" in render_text(view)


def test_a_killed_rank_is_called_killed() -> None:
    view = view_of([*started(2), killed(0, -9), JobEnded(-1, START_S + 5, "failed", 0)])
    assert [row.state_text for row in tabulate(view).rows] == ["1 killed, 1 stopped", "killed", "stopped"]


# --- word for word ---------------------------------------------------------------------------------------------------


def golden_views() -> dict[str, JobView]:
    """Return jobs that together contain everything that a table can show."""
    slowest = view_of(started(24))
    for step in range(0, 101, 5):
        busy_s = [0.09 if rank == 11 else 0.03 for rank in range(24)]
        readings = [
            sample(rank, step, busy_time_s=step * busy_s[rank], busy_steps=step) for rank in range(24)
        ]
        slowest = fold_readings(slowest, readings, START_S + step / 10)
    memory = [HostMemory(0, 1.0, 800_000_000), HostMemory(1, 1.0, 900_000_000)]
    metrics = [Metric(0, START_S, step, {"accuracy": step / 10}) for step in range(9)]
    consequences = [raised(rank, "peer closed", is_consequence=True) for rank in (0, 2, 3)]
    warned = [
        *started(2, start_method="forkserver", fallback="workers start from a forkserver: CUDA is in use"),
        Note(-1, START_S, text="memory may run out", kind="warning"),
        Note(-1, START_S, text="no progress for 300 s\nranks 0-1: waiting in all_reduce", kind="hang"),
        StatusLine(1, START_S, text="fold 2:  45%|████▌     | 450/1000 [00:45<00:55, 10.0it/s]"),
    ]
    return {
        "running": trained(3),
        "running, of many ranks one is slow": slowest,
        "done": view_of([*memory, *metrics, *ended(2)], trained(2)),
        "failed": view_of(
            [*started(5), *consequences, raised(1), killed(4, -9), JobEnded(-1, START_S + 5, "failed", 1)]
        ),
        "with a warning and a hang": view_of(warned),
        "interrupted": view_of([*started(2), JobEnded(-1, START_S + 5, "interrupted")]),
    }


def test_the_table_in_a_terminal_word_for_word(golden: Golden) -> None:
    texts = {name: render_text(view, tail=()) for name, view in golden_views().items()}
    golden.check("table.txt", texts, is_volatile=False)


def test_the_table_in_a_notebook_word_for_word(golden: Golden) -> None:
    """The golden file has one tag per line."""
    html = {name: render_html(view, tail=()) for name, view in golden_views().items()}
    lines = {name: re.sub(r"(?<=>)(?=<)", "\n", text) for name, text in html.items()}
    golden.check("table.html", lines, is_volatile=False)


# --- charts ----------------------------------------------------------------------------------------------------------


def test_charts_appear_only_in_the_summary() -> None:
    view = view_of(
        [Metric(0, START_S, step, {"accuracy": step / 10, "name": "x"}) for step in range(9)], trained(2)
    )
    assert "0 to 0.8 in 8 steps" not in render_html(view)
    html = render_html(view_of(ended(2), view))
    text = Reader(html).text
    assert "accuracy0 to 0.8 in 8 steps" in text
    assert "loss━ mean ─ each rank0.5 to 0.01 in 100 steps" in text
    assert 'aria-label="accuracy: 0 to 0.8 in 8 steps"' in html
    assert 'aria-label="name' not in html
    assert html.count("<svg") == 2


def test_non_numeric_steps_are_listed_last() -> None:
    steps = ["epoch 1", 5, "epoch 2", 2.5, None, 10**400, "<b>"]
    view = trained(2)
    for number, step in enumerate(steps):
        view = view_of([Metric(0, START_S, step, {"accuracy": float(number)})], view)
    assert [point[1] for point in view.curves["accuracy"].points()] == [0, 1, 2, 3, 4, 5, 6]
    assert "(step <b>)" in Reader(render_html(view)).text
    for step, expected in (("epoch 1", "epoch 1"), (1234, "1,234"), (0.5, "0.5")):
        assert f"(step {expected})" in render_text(
            view_of([Metric(0, START_S, step, {"accuracy": 1.0})], view)
        )


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
    heads = [
        "rank",
        "state",
        "progress",
        "epoch",
        "step",
        "steps/s",
        "samples/s",
        "ETA",
        "loss",
        "peak memory",
        "output",
    ]
    assert html.rows[0] == heads
    assert {len(row) for row in html.rows[: 1 + len(table.rows)]} == {len(heads)}


def test_failures_begin_with_the_root_cause() -> None:
    events = [raised(rank, "peer closed", is_consequence=True) for rank in (0, 2, 3)]
    view = view_of([*started(5), *events, raised(1), killed(4, -9), JobEnded(-1, START_S + 5, "failed", 1)])
    lines = render_text(view).splitlines()
    assert "train: failed in rank 1 after 5.0 s on 5 processes (cpu, fork)" in lines
    at = lines.index("rank 1: ValueError: bad shape (line 9: loss = model(batch))")
    assert at == 1
    assert lines[at + 1] == "ranks 0, 2 and 3 lost the connection"
    assert "killed by SIGKILL" in next(line for line in lines if line.split()[0] == "4")
    text = Reader(render_html(view)).text
    assert text.index(tabulate(view).failures[0].text) < text.index("rank" + "state")
    assert "peer closed" not in text  # the logs contain it


def test_one_failure_of_all_ranks_is_one_card() -> None:
    view = view_of(
        [*started(4), *(raised(rank) for rank in range(4)), JobEnded(-1, START_S + 5, "failed", 2)]
    )
    (failure,) = tabulate(view).failures
    assert (failure.who, failure.text) == ("ranks 0-3", "ValueError: bad shape")
    assert Reader(render_html(view)).text.count("bad shape") == 1


def test_a_failure_shows_its_explanation() -> None:
    end = JobEnded(-1, START_S + 5, "failed", 1, "was killed by SIGKILL", ("Memory ran out.", "Use less."))
    view = view_of([*started(2), killed(1, -9), end])
    (failure,) = tabulate(view).failures
    assert (failure.text, failure.advice) == ("was killed by SIGKILL", ("Memory ran out.", "Use less."))
    for text in (render_text(view), Reader(render_html(view)).text):
        assert "Memory ran out." in text
        assert "Use less." in text


def test_consequences_share_one_line() -> None:
    events = [
        raised(rank, f"Connection closed by peer [127.0.0.1]:{port}", is_consequence=True)
        for rank, port in ((0, 60597), (2, 4411), (3, 51000))
    ]
    view = view_of([*started(4), raised(1), *events, JobEnded(-1, START_S + 5, "failed", 1)])
    root, others = tabulate(view).failures
    assert root.text == "ValueError: bad shape"
    assert (others.who, others.text, others.is_secondary) == (
        "ranks 0, 2 and 3",
        "lost the connection",
        True,
    )
    assert [row.state_text for row in tabulate(view).rows[1:]] == ["cut off", "failed", "cut off", "cut off"]
    assert rows_html(tabulate(view)).count(BAD) < rows_html(tabulate(view)).count(CALM)


def test_unexplained_connection_errors_are_shown_whole() -> None:
    view = view_of([*started(3), *(raised(rank, f"rejected {rank}", is_consequence=True) for rank in (0, 2))])
    first, others = tabulate(view).failures
    assert (first.who, first.text) == ("rank 0", "ValueError: rejected 0")
    assert others.who == "rank 2"


def test_many_different_failures_are_summed_up() -> None:
    view = view_of([*started(9), *(raised(rank, f"failure {rank}") for rank in range(9))])
    assert tabulate(view).failures[-1][:2] == ("5 more ranks", "see the logs")


def test_a_failure_without_a_rank_is_reported() -> None:
    view = view_of([*started(2), JobEnded(-1, START_S + 1, "failed", None, "the store went away")])
    assert "job: the store went away" in render_text(view)


def test_worker_text_is_escaped_everywhere() -> None:
    begin = started(2, function_name=HOSTILE, backend=HOSTILE, log_dir=HOSTILE)
    drawn = [Metric(0, START_S, step, {HOSTILE: 0.5}) for step in range(3)]
    view = view_of(
        [
            *begin,
            *drawn,
            Note(-1, START_S, text=HOSTILE, kind="warning"),
            Note(-1, START_S, text=f"no progress\n{HOSTILE}", kind="hang"),
            StatusLine(0, START_S, text=HOSTILE),
            Note(1, START_S, text=HOSTILE),
            Metric(0, START_S, 1, {HOSTILE: HOSTILE}),
            raised(1, HOSTILE),
            JobEnded(-1, START_S + 9, "failed", 1),
        ]
    )
    html = render_html(view, tail=[(1, HOSTILE)])
    reader = Reader(html)
    assert set(reader.tags) <= HARMLESS
    assert reader.text.count(HOSTILE) >= 6
    assert "<script" not in html
    assert render_text(view, tail=[(1, HOSTILE)]).count(HOSTILE) >= 6


def test_html_works_in_any_theme() -> None:
    html = render_html(trained(8), tail=())
    assert not re.search(r"<style|<link|<img|https?:|@import|url\(", html)
    assert "tabular-nums" in html
    # Neither text colour nor background is set: both come from the theme.
    assert not re.search(r"(?<![-\w])color:(?:black|white|#000|#fff)", html)
    assert not re.search(r"background:(?:white|black|#fff|#000)", html)


@pytest.mark.parametrize(("num_processes", "limit"), [(1, 5_800), (16, 36_000), (17, 8_000), (512, 8_000)])
def test_the_table_is_small_enough_to_be_sent_often(num_processes: int, limit: int) -> None:
    view = view_of([HostMemory(rank, 1.0, 10**9) for rank in range(num_processes)], trained(num_processes))
    assert len(render_html(view)) < limit


def test_a_bar_never_leaves_its_frame() -> None:
    html = render_html(fold_readings(trained(1), [sample(0, 5000, 1000)], START_S))
    assert "width:100%" in html


def test_the_output_of_a_detached_job_is_part_of_its_table() -> None:
    view = view_of([*started(2), Note(-1, START_S, text="forked")])
    assert "forked" not in render_text(view)
    tail = [(1, "hello")]
    for text in (render_text(view, tail=tail), Reader(render_html(view, tail=tail)).text):
        assert "[1] hello" in text
        assert "note: forked" in text


def test_a_job_that_never_started_can_be_shown() -> None:
    assert mimebundle(JobView()).keys() == {"text/html", "text/plain"}
    assert mimebundle(JobView())["text/plain"] == "starting"
    assert render_text(view_of([JobEnded(-1, 1.0, "cancelled")])) == "not started"


def test_a_restart_is_named() -> None:
    view = fold(view_of(started(2)), AttemptStarted(-1, START_S + 1, "train", 2, "cpu", "fork", attempt=1))
    assert "on 2 processes (cpu, fork), restart 1" in render_text(view)


def test_progress_line_shows_the_slowest() -> None:
    view = fold_readings(trained(4), [sample(2, 60, state=WorkerState.WAITING)], START_S + 10)
    view = fold_readings(view, [], START_S + 11)
    line = progress_line(view)
    assert line.startswith("train: running for 11 s; rank 2 waiting, epoch 1/1, step 60/1,000")
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


@settings(deadline=None)  # other tests may occupy the processors
@given(any_story)
def test_any_report_can_be_rendered(story: list[Event | list[SlotReading]]) -> None:
    view = view_after(story)
    bundle = mimebundle(view, tail=[(0, "a line")] * 20)
    assert set(Reader(bundle["text/html"]).tags) <= HARMLESS
    assert bundle["text/plain"].encode("utf-8")
    table = tabulate(view)
    num_lines = len(table.rows) + len(table.failures) + len(table.notes) + len(table.warnings) + 20
    num_lines += sum(1 + len(notice.lines) for notice in table.notices) + len(table.epochs.rows) + 2
    assert len(bundle["text/plain"].splitlines()) <= num_lines + 16


def test_the_headline_shows_progress() -> None:
    readings = [sample(rank, 100, num_epochs=10) for rank in range(2)]
    view = fold_readings(trained(2), readings, START_S + 10)
    assert tabulate(view).progress == "epoch 1 of 10 · 1 % · 16:30 left · loss 0.0099 · 640 samples/s"


def test_headline_without_epochs_has_no_time_left() -> None:
    view = fold_readings(trained(1), [sample(0, 100, epoch=3, num_epochs=0)], START_S + 10)
    assert tabulate(view).progress == "epoch 3 · 10 % of the epoch · loss 0.0099 · 320 samples/s"
    assert view.left_s is None


def test_headline_with_a_failed_rank_has_no_time_left() -> None:
    view = view_of([raised(1), killed(1, 1)], trained(2))
    for shown in (render_text(view), re.sub(r"<[^>]*>", "", render_html(view))):
        assert "rank 1 failed, running for 10 s" in shown
        assert " left" not in shown
    assert "✗" in render_html(view).partition("train")[0]

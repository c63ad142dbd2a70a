"""The rows of a job: the whole job, ranks that differ, and one line for the others."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nblaunch.dashboard.charts import LINE_COLOUR, charts
from nblaunch.dashboard.fold import fold_readings
from nblaunch.dashboard.html import STYLE_SHEET, Markup, render_html, rows_html
from nblaunch.dashboard.palette import (
    COLOURS,
    INK_PERCENT,
    MUTED,
    STATE_LOOKS,
    ink,
    outcome_look,
    shape_of,
)
from nblaunch.dashboard.table import MAX_DIFFERING_ROWS, Table, tabulate
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import HostMemory, JobEnded, Returned, Stalled, WorkerState
from tests.dashboard.scenes import START_S, ended, killed, raised, sample, started, trained, view_of
from tests.dashboard.test_notices import at_rates, in_step
from tests.dashboard.test_render import Reader

HEADS = ("epoch", "step", "steps/s", "samples/s", "ETA", "loss", "peak memory")


def labels(table: Table) -> list[str]:
    return [row.label for row in table.rows]


def cell(table: Table, label: str, column: str) -> str:
    (row,) = (row for row in table.rows if row.label == label)
    return row.cells[table.columns.index(column)]


# --- the whole job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "expected"), [(1, ["0"]), (2, ["all", "0", "1"]), (16, ["all", *map(str, range(16))])]
)
def test_up_to_16_ranks_have_their_own_rows(num_ranks: int, expected: list[str]) -> None:
    table = tabulate(trained(num_ranks))
    assert labels(table) == expected
    assert table.columns == HEADS
    assert not table.collapsed


def test_first_row_shows_the_whole_job() -> None:
    view = view_of(started(8))
    for step in range(0, 101, 5):
        readings = [sample(rank, step, 1000, epoch=3, num_epochs=6) for rank in range(8)]
        view = fold_readings(view, readings, START_S + step / 10)
    view = view_of([HostMemory(rank, 1.0, 500_000_000) for rank in range(8)], view)
    table = tabulate(view)
    assert table.rows[0].cells == ("3/6", "100/1,000", "10.0", "2,560", "6:30", "0.0099", "4.00 GB")
    assert table.rows[0].fraction == pytest.approx(2.1 / 6)


def test_time_left_counts_the_evaluation_after_each_epoch() -> None:
    """An epoch has 10 s of training and 5 s of evaluation."""
    view = view_of(started(1))
    for tick in range(76):
        epoch, at_s = tick // 30 + 1, tick % 30 / 2
        is_training = at_s < 10
        step = int(at_s * 10) if is_training else int((at_s - 10) * 10)
        readings = sample(
            0, step, 100 if is_training else 50, epoch=epoch, num_epochs=4, loop=2 * epoch + (not is_training),
            step_time_s=5 + tick / 2, state=WorkerState.TRAINING if is_training else WorkerState.EVALUATING,
            trained=(100, 100, epoch - is_training),
        )  # fmt: skip
        view = fold_readings(view, [readings], START_S + tick / 2)
    (rank,) = view.ranks
    assert rank.epoch_length_s == pytest.approx(15)
    assert rank.job_fraction == pytest.approx((2 + 0.75) / 4)
    assert rank.left_s == pytest.approx(2.5 + 15)
    assert tabulate(view).rows[0].cells[0] == "3/4"


def test_an_evaluation_does_not_end_an_epoch() -> None:
    nested = sample(
        0, 0, 10, num_epochs=10, loop=2, state=WorkerState.EVALUATING, step_time_s=16.0, steps_done=100
    )
    half = replace(nested, step=5, step_time_s=17.0, steps_done=105)
    saving = replace(half, step=10, step_time_s=18.0, steps_done=110, state=WorkerState.TRAINING)
    view = fold_readings(view_of(started(1)), [sample(0, 100, num_epochs=10)], START_S)
    for reading in (nested, half, saving):
        view = fold_readings(view, [reading], START_S + reading.step_time_s)
        (rank,) = view.ranks
        assert rank.job_fraction == pytest.approx(0.01)
        assert (rank.epoch_length_s, rank.left_s) == (None, None)
    # An epoch takes 100 s: 1 s for the second half of the evaluation, half an epoch, and eight whole epochs remain.
    trained = (1000, 1000, 1)
    training = sample(
        0, 500, num_epochs=10, epoch=2, loop=3, step_time_s=105.0, steps_done=1500, trained=trained
    )
    view = fold_readings(view, [training], START_S + 100)
    for reading in (nested, half):
        later = replace(
            reading, epoch=2, loop=4, step_time_s=reading.step_time_s + 100, trained=trained,
            steps_done=reading.steps_done + 1400,
        )  # fmt: skip
        view = fold_readings(view, [later], START_S + later.step_time_s)
    assert view.ranks[0].job_fraction == pytest.approx(0.15)
    assert view.ranks[0].left_s == pytest.approx(1 + 850)


def test_each_training_has_its_own_epoch_length() -> None:
    view = view_of(started(1))
    for number, (epoch, at_s) in enumerate([(1, 0), (2, 10), (3, 20), (1, 900), (2, 905)]):
        reading = sample(0, 0, epoch=epoch, num_epochs=3, loop=number + 1, step_time_s=5.0 + at_s)
        view = fold_readings(view, [reading], START_S + at_s)
        lengths = {0: None, 10: 10, 20: 10, 900: None, 905: 5}
        assert view.ranks[0].epoch_length_s == lengths[at_s]


def test_reading_a_batch_between_epochs_starts_no_training() -> None:
    view = view_of(started(1))
    for epoch, loop, at_s in [(1, 1, 0), (2, 2, 100), (1, 1, 101), (2, 3, 102), (3, 4, 202)]:
        reading = sample(0, 0, epoch=epoch, num_epochs=10, loop=loop, step_time_s=5.0 + at_s)
        view = fold_readings(view, [reading], START_S + at_s)
    assert view.ranks[0].epoch_length_s == pytest.approx(101)


def test_the_row_of_all_ranks_follows_the_slowest() -> None:
    view = fold_readings(trained(3), [sample(2, 40)], START_S + 10)
    assert cell(tabulate(view), "all", "step") == "40/1,000"


def test_the_state_of_the_job_names_the_odd_ranks() -> None:
    waiting = [Stalled(rank, START_S + 13, "cell 5, line 14", "all_reduce", 3.0) for rank in (0, 1, 3)]
    hang = view_of([*waiting, Stalled(2, START_S + 13, "cell 5, line 9", "", 3.0)], trained(4))
    some_done = view_of(ended(4)[:1] + ended(4)[4:5], trained(4))
    failed = view_of([raised(1), JobEnded(-1, START_S + 5, "failed", 1)], trained(4))
    died = view_of([killed(3, -9)], hang)
    views = (trained(4), some_done, hang, failed, died)
    assert [tabulate(view).rows[0].state_text for view in views] == [
        "training", "3 training, 1 done", "no progress", "1 failed, 3 stopped", "1 killed, 3 other"
    ]  # fmt: skip


# --- columns ---------------------------------------------------------------------------------------------------------


def test_columns_are_the_same_from_the_first_step_to_the_end() -> None:
    view = view_of(started(3))
    tables = [tabulate(view)]
    for step in range(0, 30, 5):
        readings = [sample(rank, step, loss=None if step < 10 else 0.5) for rank in range(3)]
        view = fold_readings(view, readings, START_S + step / 10)
        tables.append(tabulate(view))
    view = view_of([HostMemory(rank, 1.0, 500_000_000) for rank in range(3)], view)
    tables.append(tabulate(view))
    assert tables[0].columns == ()
    assert {table.columns for table in tables[1:]} == {HEADS}
    heads = [re.findall(r"<td role=\"columnheader\".*?</td>", rows_html(table)) for table in tables[1:]]
    assert all(head == heads[0] for head in heads)  # including their widths


def test_a_job_without_training_has_no_training_columns() -> None:
    view = view_of([*started(2), *ended(2, 0.031)])
    assert Reader(render_html(view)).rows == []
    assert tabulate(view).columns == ()
    running = replace(view_of([HostMemory(0, 1.0, 10**9)], view_of(started(2))), now_s=START_S + 10)
    assert tabulate(running).columns == ("peak memory",)


# --- ranks that differ -----------------------------------------------------------------------------------------------


def test_a_slow_rank_has_a_row_and_is_marked() -> None:
    table = tabulate(at_rates([10, 10, 10, 5] + [10] * 20))
    assert labels(table) == ["all", "3"]
    assert table.rows[0].state_text == "training, 1 differs"
    assert (table.rows[1].state_text, table.rows[1].is_marked) == ("training, slow", True)
    assert table.collapsed == "ranks 0-2 and 4-23 training"
    assert "▲" in rows_html(table)


def test_a_rank_that_delays_others_has_a_row() -> None:
    assert labels(tabulate(in_step([0.03] * 11 + [0.09] + [0.03] * 12))) == ["all", "11"]


def test_a_differing_rank_among_few_is_marked() -> None:
    rows = tabulate(at_rates([10, 10, 5])).rows
    assert [row.is_marked for row in rows] == [True, False, False, True]


def test_a_failed_rank_has_a_row_and_the_rest_is_collapsed() -> None:
    view = view_of([raised(20)], trained(64))
    table = tabulate(view)
    assert labels(table) == ["all", "20"]
    assert table.rows[0].state_text == "1 failed, 63 training"
    assert table.collapsed.startswith("ranks 0-19 and 21-63 training")


def test_only_long_waits_are_shown() -> None:
    view, stuck = trained(24), range(2, 6)
    waiting = [sample(rank, 100, state=WorkerState.WAITING) for rank in stuck]
    view = fold_readings(view, waiting, START_S + 10.1)
    assert labels(tabulate(view)) == ["all"]
    moving = [sample(rank, 110) for rank in range(24) if rank not in stuck]
    view = fold_readings(view, [*moving, *waiting], START_S + 11.5)
    assert tabulate(view).collapsed == "ranks 0, 1 and 6-23 training; ranks 2-5 waiting"
    alone = fold_readings(view, [sample(rank, 110) for rank in (3, 4, 5)], START_S + 11.6)
    assert labels(tabulate(alone)) == ["all", "2"]
    few = fold_readings(trained(4), waiting[:1], START_S + 10.1)
    assert {row.state_text for row in tabulate(few).rows} == {"training"}


def test_ranks_with_different_outcomes_are_collapsed_into_groups() -> None:
    view = view_of([*started(64), *(event for rank in range(32) for event in [raised(rank)])])
    table = tabulate(view_of([JobEnded(-1, START_S + 5, "failed", 7)], view))
    assert len(table.rows) == 1 + MAX_DIFFERING_ROWS
    assert "7" in labels(table)
    assert table.collapsed == "ranks 12-31 failed; ranks 32-63 stopped"


def test_many_ranks_without_a_range_are_counted() -> None:
    view = view_of([Returned(rank, START_S + 11) for rank in range(0, 40, 2)], trained(40))
    assert tabulate(view).collapsed == "20 ranks finishing; 20 ranks training"


# --- many ranks ------------------------------------------------------------------------------------------------------


def many() -> JobView:
    view = at_rates([10.0] * 300 + [4.0] + [10.0] * 211)
    return view_of([raised(17)], view)


def test_differing_ranks_have_rows_and_others_a_line() -> None:
    table = tabulate(many())
    assert labels(table) == ["all", "17", "300"]
    assert table.collapsed == "ranks 0-16, 18-299 and 301-511 training"
    assert "rank 300: 2.5 times slower than the others" in render_text(many())
    for view in (many(), view_of(ended(512), many())):
        collapsed = tabulate(view).collapsed
        assert collapsed in render_text(view).splitlines()
        assert f"</table><div>{collapsed}</div>" in render_html(view)


def test_many_ranks_fit_on_a_terminal() -> None:
    lines = render_text(many()).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < 120


# --- markup ----------------------------------------------------------------------------------------------------------


def test_live_and_final_tables_have_the_same_elements() -> None:
    table = tabulate(trained(3))
    live = re.sub(r' (?:class|style)="[^"]*"', "", rows_html(table, Markup(is_inline=False)))
    final = re.sub(r' (?:class|style)="[^"]*"', "", rows_html(table))
    assert re.sub(r"\s+>", ">", live) == re.sub(r"\s+>", ">", final)


def test_tables_and_bars_are_accessible() -> None:
    table = tabulate(trained(2))
    html = rows_html(table, Markup(is_inline=False))
    assert html.count('role="rowheader"') == 3
    assert html.count('role="columnheader"') == 3 + len(HEADS)
    bars = re.findall(r'role="progressbar" aria-label="(.*?)".*?aria-valuenow="(\d+)"', html)
    assert bars == [("the job", "10"), ("rank 0", "10"), ("rank 1", "10")]


def test_states_differ_by_more_than_colour() -> None:
    looks = {shape_of(state, is_marked=marked) for state in WorkerState for marked in (False, True)}
    looks |= {(look.shape, look.colour) for look in map(outcome_look, ("", "done", "failed", "cancelled"))}
    shapes = [shape for shape, _ in looks]
    assert len(shapes) == len(set(shapes))
    assert set(STATE_LOOKS) == set(WorkerState)


# --- contrast --------------------------------------------------------------------------------------------------------

# Text and background colours, and the opacity of text: JupyterLab light and dark, VS Code dark, JupyterLab 3 dark.
THEMES = {
    "light": ((0, 0, 0), 0.87, (255, 255, 255)),
    "dark": ((255, 255, 255), 1.0, (17, 17, 17)),
    "vscode dark": ((204, 204, 204), 1.0, (31, 31, 31)),
    "lab 3 dark": ((255, 255, 255), 1.0, (33, 33, 33)),
}


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_a_contrast_of_4_5_to_1(theme: str) -> None:
    """Source: WCAG 2.2, 1.4.3. Mixtures as in CSS Color 5, with premultiplied alpha."""
    text, alpha, paper = THEMES[theme]
    for style in re.findall(r"\{([^{}]*)\}", STYLE_SHEET):
        faint = float(found[1]) if (found := re.search(r"opacity:([\d.]+)", style)) else 1.0
        assert _contrast(_over(text, alpha * faint, paper), paper) >= 4.5, style
        mixed = re.search(r"color-mix\(in srgb,#(\w{6}) (\d+)%,currentColor\)", style)
        if mixed:
            part = int(mixed[2]) / 100
            colour = tuple(int(mixed[1][i : i + 2], 16) for i in (0, 2, 4))
            whole = part + (1 - part) * alpha
            mixture = tuple(
                (part * one + (1 - part) * alpha * other) / whole
                for one, other in zip(colour, text, strict=True)
            )
            assert _contrast(_over(mixture, whole * faint, paper), paper) >= 4.5, style
    assert all(ink(colour) in STYLE_SHEET for colour in COLOURS)
    assert MUTED in STYLE_SHEET
    assert 0 < INK_PERCENT < 100


@pytest.mark.parametrize("theme", THEMES)
def test_bars_and_lines_have_a_contrast_of_3_to_1(theme: str) -> None:
    """Source: WCAG 2.2, 1.4.11, and 1.4.3 for the text of charts."""
    text, alpha, paper = THEMES[theme]
    assert LINE_COLOUR in COLOURS
    assert all(
        _contrast(tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)), paper) >= 3 for colour in COLOURS
    )
    (drawn,) = charts(trained(4))
    grid, axes, numbers, thin = map(float, re.findall(r' opacity="([\d.]+)"', drawn))
    legend, caption = map(float, re.findall(r"[;\"]opacity:([\d.]+)", drawn))
    assert grid < axes
    for least, faint in ((3, axes), (3, thin), (3, legend), (4.5, numbers), (4.5, caption)):
        assert _contrast(_over(text, alpha * faint, paper), paper) >= least, faint


@pytest.mark.parametrize("num_ranks", [3, 8, 64])
def test_faint_text_is_not_nested(num_ranks: int) -> None:
    for view in (
        trained(num_ranks),
        view_of(started(num_ranks)),
        view_of(ended(num_ranks), trained(num_ranks)),
    ):
        depth: list[bool] = []
        tokens = re.findall(r"<(/?)(\w+)([^>]*)>([^<]*)", render_html(view, tail=()))
        for closing, _, attributes, text in tokens:
            if closing:
                depth.pop()
            else:
                depth.append("opacity" in attributes)
            assert sum(depth) < 2 or not re.search(r"\w", text), text


def _over(colour: tuple[float, ...], alpha: float, paper: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(alpha * one + (1 - alpha) * other for one, other in zip(colour, paper, strict=True))


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

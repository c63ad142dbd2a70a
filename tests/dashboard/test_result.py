"""The summary of an ended job: its figures, one line for ranks that did the same, readable charts."""

from __future__ import annotations

import re

import pytest

from nblaunch.dashboard.charts import chart, charts
from nblaunch.dashboard.fold import fold_readings
from nblaunch.dashboard.html import render_html
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import EpochEnded, HostMemory, JobEnded, Metric, RunTracked
from tests.dashboard.scenes import START_S, ended, killed, sample, started, view_of
from tests.dashboard.test_charts import numbers
from tests.dashboard.test_render import Reader


def trained(num_ranks: int = 2, *, slow_from: int = 50) -> JobView:
    """Return a job with 100 steps in two epochs, ten per second in the first and two per second in the second."""
    view = view_of(started(num_ranks))
    at_s = 0.0
    for step in range(101):
        epoch, done = 1 + (step > 50), step - 50 * (step > 50)
        fields = {
            "epoch": epoch,
            "num_epochs": 2,
            "loop": epoch,
            "steps_done": step,
            "samples": 32 * step,
            "losses": sample(0, step).losses,
        }
        readings = [
            sample(rank, done, 50, step_time_s=5.0 + at_s, loss=1 / (step + 1), **fields)
            for rank in range(num_ranks)
        ]
        view = fold_readings(view, readings, START_S + at_s)
        at_s += 0.1 if step < slow_from else 0.5
    return view


def figures(view: JobView) -> dict[str, tuple[str, str]]:
    return {figure.name: (figure.value, figure.note) for figure in tabulate(view).figures}


def test_rates_are_means_over_the_whole_job() -> None:
    over = view_of(ended(2, 31), trained())
    # 100 steps in 5 + 25 seconds
    assert figures(over)["mean rate"] == ("213 samples/s", "3.33 steps/s")
    assert figures(over)["epochs"] == ("2", "100 steps")


def test_a_loop_without_batches_is_reported() -> None:
    readings = [sample(rank, 0, 0, epoch=2, num_epochs=2, loop=2) for rank in range(2)]
    over = view_of(ended(2, 31), fold_readings(view_of(started(2)), readings, START_S))
    assert figures(over)["epochs"] == ("2", "no steps: the loader is empty")


def test_the_last_and_the_best_of_losses_and_metrics_are_shown() -> None:
    losses = [
        EpochEnded(rank, START_S, epoch, loss, 1.0)
        for epoch, loss in ((1, 0.5), (2, 0.75))
        for rank in (0, 1)
    ]
    logged = [
        Metric(
            0, START_S, step, {"accuracy": accuracy, "val_loss": 1 - accuracy, "lr": 0.1, "share": accuracy}
        )
        for step, accuracy in ((10, 0.5), (20, 0.875), (30, 0.75))
    ]
    over = view_of([*losses, *logged, *ended(2, 31)], trained())
    shown = figures(over)
    assert shown["training loss"] == ("0.7500", "best 0.5000 in epoch 1")
    assert shown["accuracy"] == ("0.7500", "best 0.8750 at step 20")
    assert shown["val_loss"] == ("0.2500", "best 0.1250 at step 20")
    assert shown["share"] == ("0.7500", "")  # it is unknown which direction is better
    assert "lr" not in shown
    assert "lr 0.1" in render_text(over)


def test_the_best_value_includes_thinned_points() -> None:
    values = [0.5 + (step == 777) / 4 for step in range(2000)]
    logged = [Metric(0, START_S, step, {"accuracy": value}) for step, value in enumerate(values)]
    assert figures(view_of([*logged, *ended(2)], trained()))["accuracy"] == (
        "0.5000",
        "best 0.7500 at step 777",
    )


def test_equal_ranks_fold_behind_one_line() -> None:
    memory = [HostMemory(rank, START_S, 800_000_000 + rank * 10**8) for rank in range(2)]
    over = view_of([*memory, *ended(2, 31)], trained())
    text = render_text(over)
    assert "ranks 0 and 1 alike: 3.33 steps/s" in text
    assert not [line for line in text.splitlines() if line.startswith("rank ")]
    html = render_html(over)
    (inside,) = re.findall(r"<details><summary[^>]*>(?:.*?)</summary>(.*?)</details>", html)
    assert [row[0] for row in Reader(inside).rows] == ["rank", "all", "0", "1"]
    assert "ETA" not in Reader(inside).rows[0]
    assert figures(over)["peak memory"] == ("1.70 GB", "800 MB to 900 MB a rank")


def test_ranks_that_differ_have_their_rows() -> None:
    view = fold_readings(trained(), [sample(1, 49, 50, epoch=2, num_epochs=2)], START_S + 31)
    over = view_of(ended(2, 31), view)
    assert tabulate(over).alike == ""
    assert "<details" not in render_html(over)
    crashed = view_of([killed(1, -9), *ended(2, 31)], trained())
    assert tabulate(crashed).alike == ""


def test_an_unsuccessful_job_shows_its_progress() -> None:
    view = view_of([JobEnded(-1, START_S + 31, "interrupted")], fold_readings(trained(), [], START_S + 31))
    assert figures(view)["epochs"][0] == "2" if "epochs" in figures(view) else "epoch" in figures(view)
    early = view_of(started(2))
    early = fold_readings(early, [sample(rank, 7, 50, num_epochs=3) for rank in range(2)], START_S)
    early = view_of([JobEnded(-1, START_S + 1, "interrupted")], early)
    assert figures(early)["epoch"] == ("1 of 3", "step 7 of 50")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_column_of_a_result_is_empty(num_ranks: int) -> None:
    view = fold_readings(trained(num_ranks), [sample(0, 40, 50)], START_S + 31)
    table = tabulate(view_of(ended(num_ranks, 31), view))
    for index in range(len(table.columns)):
        assert any(row.cells[index] for row in table.rows)
    assert "ETA" not in table.columns


def test_losses_get_the_largest_chart() -> None:
    logged = [Metric(0, START_S, step, {"lr": 0.1, "accuracy": step / 10}) for step in range(5)]
    over = view_of([*logged, *ended(2)], trained())
    loss, accuracy = charts(over)

    def size(html: str) -> tuple[int, ...]:
        return tuple(map(int, re.search(r'<svg width="(\d+)" height="(\d+)"', html).groups()))  # type: ignore[union-attr]

    assert size(loss) > (500, 190)
    assert size(accuracy) < (300, 130)
    assert "accuracy" in accuracy


@pytest.mark.parametrize("length", [2, 3, 4, 7])
def test_ticks_of_whole_numbers_are_whole(length: int) -> None:
    at_x = numbers(chart("x", [(step, 1 / (step + 1)) for step in range(length)]))
    at_x = at_x[at_x.index("step") + 1 :]
    assert at_x
    assert all(text.isdigit() for text in at_x)


def test_tracker_runs_are_linked_in_one_line() -> None:
    address = "https://wandb.ai/me/project/runs/1?a=<b>"
    begun = [
        RunTracked(0, START_S, "wandb", address),
        RunTracked(0, START_S, "tensorboard", "tensorboard --logdir '/logs/<x>'"),
    ]
    over = view_of([*begun, *ended(2)], trained())
    html = render_html(over)
    links = re.findall(r'<a href="([^"]*)"[^>]*>', html)
    assert links == [address.replace("<", "&lt;").replace(">", "&gt;")]
    assert html.count("runs:") == 1
    assert f"runs: wandb {address}, tensorboard tensorboard --logdir '/logs/<x>'" in render_text(over)
    hostile = view_of([RunTracked(0, START_S, "x", "javascript:alert(1)"), *ended(2)], trained())
    assert "<a " not in render_html(hostile)

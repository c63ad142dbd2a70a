"""The table of epochs: mean training loss of all ranks, logged metrics, time."""

from __future__ import annotations

import math
from dataclasses import replace

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.html import render_html
from nblaunch.dashboard.table import tabulate, tabulate_epochs
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import NUM_EPOCHS, JobView
from nblaunch.events import AttemptStarted, EpochEnded, Event, Metric
from tests.dashboard.scenes import START_S, ended, sample, started, view_of
from tests.dashboard.test_render import Reader
from tests.kernels import Kernel


def epochs(numbers: range, num_ranks: int = 2) -> list[Event]:
    """Return the events of epochs with an evaluation each, whose losses differ between ranks."""
    events: list[Event] = []
    for number in numbers:
        events += [
            EpochEnded(rank, START_S, number, (1 + rank) / number, 2.0 + rank) for rank in range(num_ranks)
        ]
        events.append(Metric(0, START_S, number, {"accuracy": 0.5 + number / 10, "note": "x"}, epoch=number))
    return events


def test_epoch_rows_show_mean_loss_metrics_and_slowest_time() -> None:
    view = view_of([*started(2), *epochs(range(1, 3)), *ended(2)])
    expected = [
        ("epoch", "training loss", "accuracy", "note", "time"),
        ("1", "1.5000", "0.6000", "x", "3.0 s"),
        ("2", "0.7500", "0.7000", "x", "3.0 s"),
    ]
    table = tabulate_epochs(view)
    assert [table.columns, *table.rows] == expected
    assert [tuple(row) for row in Reader(render_html(view)).rows][-3:] == expected
    lines = [tuple(line.split()) for line in render_text(view).splitlines()]
    assert ("1", "1.5000", "0.6000", "x", "3.0", "s") in lines
    assert tabulate(view).metrics == ""  # the metrics are in the table instead


def test_only_metrics_with_an_epoch_have_a_row() -> None:
    view = view_of([*started(1), Metric(0, START_S, 3, {"lr": 0.1}, epoch=1)])
    assert tabulate_epochs(view).columns == ("epoch", "lr", "time")
    assert tabulate_epochs(view).rows == (("1", "0.1000", ""),)
    view = view_of([*started(1), Metric(0, START_S, 3, {"lr": 0.1})])
    assert tabulate_epochs(view).columns == ()
    assert tabulate(view).metrics == "lr 0.1 (step 3)"


def test_long_metric_names_keep_their_ends() -> None:
    names = [f"validation/{'a_long_name_' * 20}{end}" for end in ("accuracy", "loss")]
    view = fold(view_of(started(1)), Metric(0, START_S, 1, dict.fromkeys(names, 0.5), epoch=1))
    *_, accuracy, loss, _ = tabulate_epochs(view).columns
    assert max(len(accuracy), len(loss)) <= 40
    assert accuracy.startswith("validation/")
    assert (accuracy.endswith("accuracy"), loss.endswith("loss")) == (True, True)


def test_only_the_last_epochs_are_shown_and_kept() -> None:
    view = view_of([*started(1), *epochs(range(1, 151), 1)])
    assert len(view.epochs) == NUM_EPOCHS
    assert [row[0] for row in tabulate_epochs(view).rows] == [str(number) for number in range(143, 151)]
    over = view_of(ended(1), view)
    assert len(tabulate_epochs(over).rows) == 30
    assert "earlier epochs are not shown" in render_text(over)
    assert "earlier epochs are not shown" in Reader(render_html(over)).text


def test_a_restart_has_its_own_epochs() -> None:
    view = view_of([*started(2), *epochs(range(1, 3))])
    view = fold(view, AttemptStarted(-1, START_S + 1, "train", 2, "cpu", "fork", attempt=1))
    view = view_of([EpochEnded(rank, START_S, 2, 9.0, 1.0) for rank in range(2)], view)
    assert [row[:2] for row in tabulate_epochs(view).rows] == [("2", "9.0000")]


def test_each_training_has_own_epochs() -> None:
    view = view_of([*started(2), *epochs(range(1, 3))])
    view = view_of([Metric(0, START_S, 1, {"accuracy": 0.9}, epoch=1)], view)  # still in its first epoch
    rows = [("1", "1.5000", "0.6000"), ("2", "0.7500", "0.7000"), ("1", "", "0.9000")]
    assert [row[:3] for row in tabulate_epochs(view).rows] == rows
    view = view_of([EpochEnded(rank, START_S, 1, 9.0, 1.0) for rank in range(2)], view)
    view = view_of([Metric(0, START_S, 2, {"accuracy": 0.8}, epoch=1)], view)
    rows[-1] = ("1", "9.0000", "0.8000")
    assert [row[:3] for row in tabulate_epochs(view).rows] == rows


def test_two_loops_of_an_epoch_have_a_row_each() -> None:
    ended_epochs = [EpochEnded(0, START_S, number, loss, 1.0) for number in (4, 5) for loss in (1.0, 2.0)]
    rows = tabulate_epochs(view_of([*started(1), *ended_epochs])).rows
    assert [row[:2] for row in rows] == [("4", "1.0000"), ("4", "2.0000"), ("5", "1.0000"), ("5", "2.0000")]


def test_non_finite_losses_are_shown() -> None:
    view = view_of([*started(1), EpochEnded(0, START_S, 1, math.nan, 1.0)])
    assert tabulate_epochs(view).rows == (("1", "nan", "1.0 s"),)
    silent = view_of([*started(1), EpochEnded(0, START_S, 1, None, 1.0)])
    assert tabulate_epochs(silent).columns == ()
    without_epochs = fold_readings(silent, [sample(0, 1, epoch=0)], START_S)
    assert tabulate_epochs(without_epochs).columns == ()
    assert tabulate_epochs(replace(JobView())).columns == ()


TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(1, 4):
        model.train()
        for step, (x,) in enumerate(loader):
            # 1 on average in the first epoch, 2 in the second ...; the parameters have gradients, and stay
            level = epoch + (0.5 if step % 2 else -0.5)
            accelerator.backward(model(x).sum() * 0 + level)
            optimizer.step()
            optimizer.zero_grad()
            if epoch != 2 and step == 5:
                break
        accelerator.log({"accuracy": epoch / 4}, step=10 * epoch)
"""


def test_epoch_rows_show_losses_and_metrics(kernel: Kernel) -> None:
    kernel.run(TRAIN)
    html = (
        kernel.run("notebook_launcher(train, (), 2, backend='cpu', dashboard='html')")
        .displays[0]
        .data["text/html"]
    )
    *_, first, second, third = Reader(html).rows
    assert [first[:3], second[:3], third[:3]] == [
        ["1", "1.0000", "0.2500"],
        ["2", "2.0000", "0.5000"],
        ["3", "3.0000", "0.7500"],
    ]

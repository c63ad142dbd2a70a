"""Displayed steps, epochs, rate, loss and time left equal the loop's own measurements.

Each function returns the start times of its steps, and their losses. Steps sleep, so that they last equally long on a
busy machine.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nblaunch import Accelerator, Session, notebook_launcher
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.view import JobView, RankView
from tests.progress.jobs import Views, run_job
from tests.thorough import thorough

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("first_store")]

FASTAI = Path(sys.prefix) / "fastai"  # `make setup` installs it there
LENGTH, EPOCHS, STEP_S = 20, 6, 0.03
WARM_UP_STEPS = 3
Steps = tuple[list[float], list[float]]
"""The start time of each step, and its loss."""


class Model(nn.Module):
    """A linear model whose forward takes some time, and which records the time and loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.times: list[float] = []
        self.losses: list[float] = []

    def forward(self, x: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.times.append(time.monotonic())
        time.sleep(STEP_S)
        outputs = self.linear(x)
        loss = (outputs - 1).square().mean()
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "logits": outputs}

    def steps(self) -> Steps:
        return self.times, self.losses


def rows(num_ranks: int = 1) -> TensorDataset:
    return TensorDataset(torch.randn(2 * LENGTH * num_ranks, 4, generator=torch.Generator().manual_seed(0)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def plain() -> Steps:
    model = Model()
    optimizer, loader = sgd(model), DataLoader(rows(), batch_size=2)
    for _epoch in range(EPOCHS):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
    return model.steps()


def ddp() -> Steps:
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group()
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer, data = sgd(model), rows(2)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    for _epoch in range(EPOCHS):
        for (batch,) in loader:
            optimizer.zero_grad()
            wrapped(batch)["loss"].backward()
            optimizer.step()
    dist.destroy_process_group()
    return model.steps()


def accelerated() -> Steps:
    accelerator, model = Accelerator(), Model()
    wrapped, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(rows(2), batch_size=2))
    for _epoch in range(EPOCHS):
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward(wrapped(batch)["loss"])
            optimizer.step()
    return model.steps()


def with_trainer(**options: Any) -> Steps:
    from transformers import Trainer, TrainingArguments

    model = Model()
    settings = {"num_train_epochs": EPOCHS, **options}
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=0.01,
        **settings,
    )
    data = [{"x": x, "labels": torch.tensor(1.0)} for (x,) in rows()]
    Trainer(model, arguments, train_dataset=data).train()
    return model.steps()


def with_trainer_by_steps() -> Steps:
    return with_trainer(max_steps=LENGTH * EPOCHS)


def with_lightning() -> Steps:
    warnings.simplefilter("ignore")  # deprecations in torch
    import pytorch_lightning as pl

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    model = Model()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(batch[0])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(rows(), batch_size=2))
    return model.steps()


def with_fastai() -> Steps:
    warnings.simplefilter("ignore")  # deprecations in torch
    sys.path.insert(0, str(FASTAI))
    import fastai.callback.progress  # noqa: F401  no_bar() is made there
    from fastai.basics import DataLoaders, Learner

    model = Model()
    (data,) = rows().tensors
    pairs = [(x, torch.ones(1)) for x in data]
    loaders = DataLoaders.from_dsets(pairs, pairs[:4], bs=2, device="cpu", num_workers=0, shuffle=True)
    learner = Learner(loaders, model, loss_func=lambda outputs, wanted: outputs["loss"], lr=0.01)
    with learner.no_bar(), learner.no_logging():
        learner.fit(EPOCHS)
    return model.steps()


def gan() -> Steps:
    model, critic = Model(), nn.Linear(4, 1)
    optimizer, other, loader = sgd(model), sgd(critic), DataLoader(rows(), batch_size=2)
    for _epoch in range(EPOCHS):
        for (batch,) in loader:
            other.zero_grad()
            critic(batch).square().mean().backward()
            other.step()
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
    return model.steps()


def resumed() -> Steps:
    model = Model()
    optimizer, loader = sgd(model), DataLoader(rows(), batch_size=2)
    for _epoch in range(4, 4 + EPOCHS):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
    return model.steps()


def without_loader() -> Steps:
    model = Model()
    optimizer, (data,) = sgd(model), rows().tensors
    for _epoch in range(EPOCHS):
        for start in range(0, 2 * LENGTH, 2):
            optimizer.zero_grad()
            model(data[start : start + 2])["loss"].backward()
            optimizer.step()
    return model.steps()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from rows()


def iterable() -> Steps:
    model = Model()
    optimizer, loader = sgd(model), DataLoader(Stream(), batch_size=2)
    for _epoch in range(EPOCHS):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
    return model.steps()


def stopped_early() -> Steps:
    model = Model()
    optimizer, loader = sgd(model), DataLoader(rows(), batch_size=2)
    for epoch in range(50):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
        if epoch == EPOCHS - 1:
            break
    return model.steps()


@dataclass
class Seen:
    """The dashboards' views of rank 0, with their times."""

    readings: list[tuple[float, RankView, float | None]] = field(default_factory=list)
    headlines: list[str] = field(default_factory=list)

    def note(self, view: JobView) -> None:
        rank = view.ranks[0]
        if rank.has_progress and not rank.has_returned and not rank.is_evaluating:
            # Use the rank's clock, because this process may be delayed.
            self.readings.append((rank.reading.step_time_s, rank, view.left_s))
            self.headlines.append(tabulate(view).progress)


def check_steps(seen: Seen, times: list[float], first_epoch: int = 1) -> None:
    """Check that displayed steps equal the steps that had begun, except for changes during the reading."""
    assert len(seen.readings) > 10
    for now_s, rank, _ in seen.readings:
        shown = max(rank.epoch - first_epoch, 0) * LENGTH + rank.step
        at_least, at_most = counted_at(now_s, times)
        assert at_least <= shown <= at_most, f"{shown} at {now_s - times[0]:.2f} s"


def counted_at(now_s: float, times: list[float]) -> tuple[int, int]:
    """Return the smallest and the largest possible number of steps at a time."""
    return sum(at_s < now_s - 0.1 for at_s in times) - 2, sum(at_s < now_s + 0.1 for at_s in times) + 2


_HEADLINE = re.compile(
    r"epoch (?P<epoch>\d+) of (?P<num_epochs>\d+) · (?P<percent>\d+) %( · .* left)?( · loss (?P<loss>\S+))?( · .*)?"
)


def check_headlines(
    seen: Seen,
    times: list[float],
    losses: list[float] | None = None,
    *,
    first_epoch: int = 1,
    num_epochs: int = EPOCHS,
    is_length_known: bool = True,
) -> None:
    """Check that the headline's epoch, percentage and loss belong to steps of that moment.

    Args:
        seen: the displayed views.
        times: start times of steps.
        losses: losses of these steps; None if the displayed loss covers several ranks or models.
        first_epoch: number of the epoch in which the loop began.
        num_epochs: number of the last planned epoch.
        is_length_known: whether the steps of an epoch are known before the first one has ended.
    """
    shown = [
        (now_s, match)
        for (now_s, *_), text in zip(seen.readings, seen.headlines, strict=True)
        if (match := _HEADLINE.fullmatch(text))
    ]
    assert len(shown) > len(seen.readings) / 2, seen.headlines
    before = (first_epoch - 1) * LENGTH
    for now_s, match in shown:
        at_least, at_most = counted_at(now_s, times)
        assert int(match["num_epochs"]) == num_epochs
        assert (
            (before + at_least - 1) // LENGTH + 1 <= int(match["epoch"]) <= (before + at_most) // LENGTH + 1
        )
        low, high = ((before + count) / (num_epochs * LENGTH) * 100 for count in (at_least, at_most))
        is_first = at_least <= LENGTH + 3
        slack = 1 + 100 / num_epochs * (is_first and not is_length_known)
        assert low - slack <= int(match["percent"]) <= high
        if losses and match["loss"]:
            # A rank reports its loss twice a second.
            oldest, _ = counted_at(now_s - 1.0, times)
            near = losses[max(oldest - 1, 0) : at_most + 1]
            assert min(near) * 0.99 - 1e-4 <= float(match["loss"]) <= max(near) * 1.01 + 1e-4
    assert losses is None or any(match["loss"] for _, match in shown)


def later_steps(times: list[float], now_s: float) -> list[float]:
    """Return the start times of steps until now, without the first steps, which take longer."""
    return [at_s for at_s in times[WARM_UP_STEPS:] if at_s <= now_s]


def check_rate(seen: Seen, times: list[float]) -> None:
    """Check the rate against the steps of this epoch, of two epochs, or of all, with or without evaluations between
    them.

    The rate counts the ends of steps, and this test their starts. Over a few steps of uneven length, the two differ by
    up to one step.
    """
    shown = [(now, rank) for now, rank, _ in seen.readings if now > times[len(times) // 2]]
    assert any(rank.steps_per_s for _, rank in shown)
    for now_s, rank in shown:
        steps = later_steps(times, now_s)
        parts = [steps[-number:] for number in (max(rank.step, 3), LENGTH, 2 * LENGTH, len(steps))]
        low = min((len(part) - 2) / (part[-1] - part[0]) for part in parts)
        high = max(len(part) / (part[-1] - part[0]) for part in parts)
        rate = rank.steps_per_s
        assert rate is None or 0.75 * low < rate < 1.33 * high, (low, rate, high)


def check_time_left(seen: Seen, times: list[float]) -> float:
    """Check that the time left after a tenth of the job is off by at most a fifth; return the error.

    A busy machine may be slower until then than afterwards, or faster. Nothing can predict that, so an estimate from
    the mean or the median of the steps until then is also accepted.
    """
    tenth_s = times[0] + (times[-1] - times[0]) / 10
    now_s, left_s = next((now, left) for now, _, left in seen.readings if now >= tenth_s and left is not None)
    assert now_s < times[0] + (times[-1] - times[0]) / 3
    truth_s = times[-1] + STEP_S - now_s
    gaps = [later - at for at, later in pairwise(later_steps(times, now_s))]
    num_left = sum(at_s > now_s for at_s in times) + 1
    low_s, *_, high_s = sorted([truth_s, num_left * mean(gaps), num_left * median(gaps)])
    error = max(low_s - left_s, left_s - high_s, 0.0) / truth_s
    assert error <= 0.2, (
        f"{left_s:.1f} s were announced, not {low_s:.1f} to {high_s:.1f} s; it took {truth_s:.1f} s"
    )
    return error


KNOWN: dict[str, tuple[Callable[[], Steps], int]] = {
    "plain": (plain, 1),
    "ddp": (ddp, 2),
    "Accelerator": (accelerated, 2),
    "Trainer": (with_trainer, 1),
    "Trainer by steps": (with_trainer_by_steps, 1),
    "Lightning": (with_lightning, 1),
    "fastai": (with_fastai, 1),
    "GAN": (gan, 1),
    "resumed": (resumed, 1),
    "without a loader": (without_loader, 1),
}


@pytest.mark.parametrize("name", [thorough(name) if name == "Trainer by steps" else name for name in KNOWN])
def test_displayed_progress_is_true(name: str) -> None:
    function, num_ranks = KNOWN[name]
    if name == "fastai" and not FASTAI.exists():
        pytest.skip(f"{FASTAI} is missing: `make setup` makes it")
    seen = Seen()
    view, (steps, *_) = run_job(function, ranks=num_ranks, note=seen.note)
    times, losses = steps
    assert len(times) == LENGTH * EPOCHS
    first_epoch = 5 if name == "resumed" else 1
    check_steps(seen, times, first_epoch)
    check_rate(seen, times)
    has_one_loss = num_ranks == 1 and name != "GAN"  # the mean over two ranks or models equals neither loss
    check_headlines(
        seen,
        times,
        losses if has_one_loss else None,
        first_epoch=first_epoch,
        num_epochs=EPOCHS + first_epoch - 1,
    )
    print(f"{name}: the time left is off by {check_time_left(seen, times):.0%}")
    rank = view.ranks[0]
    assert (rank.epoch, rank.num_epochs) == (EPOCHS + first_epoch - 1, EPOCHS + first_epoch - 1)
    assert (rank.step, rank.total) == (LENGTH, LENGTH)
    assert rank.loss == pytest.approx(losses[-1], rel=1e-4)
    means = [epoch.loss for _, epoch in sorted(view.epochs.items())]
    if has_one_loss:
        wanted = [sum(losses[at : at + LENGTH]) / LENGTH for at in range(0, len(losses), LENGTH)]
        assert means == pytest.approx(wanted, rel=1e-3)


def test_a_streams_first_epoch_sets_its_length() -> None:
    seen = Seen()
    view, ((times, losses),) = run_job(iterable, ranks=1, note=seen.note)
    check_steps(seen, times)
    check_rate(seen, times)
    check_headlines(seen, times, losses, is_length_known=False)
    assert (view.ranks[0].epoch, view.ranks[0].num_epochs) == (EPOCHS, EPOCHS)
    assert view.ranks[0].loss == pytest.approx(losses[-1], rel=1e-4)
    assert {left_s for _, rank, left_s in seen.readings if rank.epoch == 1 and rank.step < LENGTH} == {None}
    check_time_left(seen, times)


def test_loops_left_early_have_true_steps() -> None:
    seen = Seen()
    view, ((times, losses),) = run_job(stopped_early, ranks=1, note=seen.note)
    check_steps(seen, times)
    check_rate(seen, times)
    check_headlines(seen, times, losses, num_epochs=50)
    (rank,) = view.ranks
    assert (rank.epoch, rank.num_epochs, rank.step) == (EPOCHS, 50, LENGTH)
    assert rank.loss == pytest.approx(losses[-1], rel=1e-4)


def test_session_functions_have_true_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(num_processes=1, backend="cpu") as session:
        for _ in range(2):  # the counts of an earlier call are not those of the next
            seen = Seen()
            views = Views(seen.note)
            monkeypatch.setattr("nblaunch.dashboard.choose", lambda *args, views=views, **options: [views])
            times, losses = notebook_launcher(plain, session=session)
            check_steps(seen, times)
            check_rate(seen, times)
            check_headlines(seen, times, losses)
            check_time_left(seen, times)
            (rank,) = views.view.ranks
            assert (rank.epoch, rank.num_epochs, rank.step) == (EPOCHS, EPOCHS, LENGTH)
            assert rank.loss == pytest.approx(losses[-1], rel=1e-4)

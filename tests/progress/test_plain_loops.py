"""Loops without an Accelerator: reported steps, epochs and losses equal the function's own counts."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nblaunch import Accelerator, context, notebook_launcher
from nblaunch.dashboard.view import JobView
from nblaunch.events import WorkerState
from tests.progress.jobs import run_job

pytestmark = [pytest.mark.usefixtures("first_store")]

LENGTH, EPOCHS = 5, 3


def rows(length: int = LENGTH) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2 * length, 4)), batch_size=2)


class Model:
    """A model whose loss in step n is n."""

    def __init__(self) -> None:
        self.linear = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.linear.parameters(), lr=0.0)
        self.num_steps = 0

    def loss(self) -> torch.Tensor:
        self.num_steps += 1
        return self.linear(torch.zeros(2, 4)).sum() * 0 + self.num_steps

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()


def plain() -> int:
    model = Model()
    for _epoch in range(EPOCHS):
        for _batch in rows():
            model.step()
        with torch.no_grad():
            for _batch in rows(7):
                model.linear(torch.zeros(2, 4))
    return model.num_steps


def in_functions() -> int:
    model = Model()

    def an_epoch() -> None:
        for _batch in enumerate(rows()):
            model.step()

    for _epoch in range(1, EPOCHS + 1):
        an_epoch()
    return model.num_steps


def with_two_loaders() -> int:
    model = Model()
    for _epoch in range(EPOCHS):
        for _pair in zip(rows(), rows(), strict=True):
            model.step()
    return model.num_steps


def two_optimizers() -> int:
    first, second = Model(), Model()
    for _epoch in range(EPOCHS):
        for _batch in rows():
            first.step()
            second.step()
    return first.num_steps


def without_loader() -> int:
    model = Model()
    for _epoch in range(EPOCHS):
        for _start in range(0, 2 * LENGTH, 2):
            model.step()
    return model.num_steps


KNOWN = (plain, in_functions, with_two_loaders, two_optimizers, without_loader)


@pytest.mark.alarms("repeated_training")
@pytest.mark.parametrize("train", KNOWN, ids=lambda train: train.__name__)
def test_a_plain_loop_has_steps_epochs_and_losses(train: Callable[[], int]) -> None:
    view, counted = run_job(train)
    assert counted == [LENGTH * EPOCHS] * 2
    for rank in view.ranks:
        assert (rank.step, rank.total, rank.epoch, rank.num_epochs) == (LENGTH, LENGTH, EPOCHS, EPOCHS)
        assert rank.loss == LENGTH * EPOCHS
        assert rank.job_fraction == 1.0
        if train in (in_functions, two_optimizers):  # other loops read more than they train, or use no loader
            assert rank.reading.samples == 2 * LENGTH * EPOCHS
    means = [epoch.loss for _, epoch in sorted(view.epochs.items())]
    assert means == [3.0, 8.0, 13.0]


def stopped_early() -> int:
    model = Model()
    for epoch in range(10):
        for _batch in rows():
            model.step()
        if epoch == 1:
            break
    return model.num_steps


def resumed() -> int:
    model = Model()
    for _epoch in range(7, 10):
        for _batch in rows():
            model.step()
    return model.num_steps


def a_while_loop() -> int:
    model = Model()
    while model.num_steps < 12:
        model.step()
    return model.num_steps


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(10, 4)


def a_stream() -> int:
    model = Model()
    for _epoch in range(2):
        for _batch in DataLoader(Stream(), batch_size=2):
            model.step()
    return model.num_steps


def a_count() -> int:
    model = Model()
    for step in itertools.count():
        if step == 12:
            break
        model.step()
    return model.num_steps


def rounds() -> int:
    model = Model()
    for _step in range(12):
        model.step()
    return model.num_steps


OTHERS: list[tuple[Callable[[], int], tuple[int, int, int, int], float]] = [
    (stopped_early, (LENGTH, LENGTH, 2, 10), 0.2),
    (resumed, (LENGTH, LENGTH, 10, 10), 1.0),
    (a_stream, (5, -1, 2, 2), 1.0),
    (rounds, (12, 12, 0, 0), 1.0),
]


@pytest.mark.parametrize(
    ("train", "shown", "fraction"), OTHERS, ids=lambda part: getattr(part, "__name__", "")
)
def test_unusual_loops_are_counted(train: Callable[[], int], shown: tuple[int, ...], fraction: float) -> None:
    view, counted = run_job(train, ranks=1)
    (rank,) = view.ranks
    assert (rank.step, rank.total, rank.epoch, rank.num_epochs) == shown
    assert rank.loss == counted[0]


@pytest.mark.parametrize("train", [a_while_loop, a_count], ids=lambda train: train.__name__)
def test_a_loop_of_unknown_length_shows_only_steps(train: Callable[[], int]) -> None:
    seen: list[float | None] = []
    view, counted = run_job(train, ranks=1, note=lambda view: seen.append(view.left_s))
    (rank,) = view.ranks
    assert (rank.step, rank.total, rank.epoch) == (counted[0], -1, 0)
    assert set(seen) <= {None}


def accumulated(divides: bool) -> list[float]:
    model = Model()
    losses = []
    for index, _batch in enumerate(rows(8)):
        loss = model.loss()
        losses.append(loss.item())
        (loss / 4 if divides else loss).backward()
        if index % 4 == 3:
            model.optimizer.step()
    return losses


@pytest.mark.parametrize("divides", [True, False])
def test_losses_of_micro_steps_are_shown_undivided(divides: bool) -> None:
    view, counted = run_job(accumulated, divides, ranks=1)
    (rank,) = view.ranks
    assert rank.loss == counted[0][-1]
    assert [loss for _, loss in rank.losses] == [
        2.5,
        6.5,
    ]  # two optimizer steps with four losses each


def scaled() -> None:
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _batch in rows():
        scaler.scale(model.loss()).backward()
        scaler.step(model.optimizer)
        scaler.update()


def test_losses_are_shown_unscaled() -> None:
    view, _ = run_job(scaled, ranks=1)
    assert view.ranks[0].loss == LENGTH


def mixed() -> None:
    """Train with a prepared model and an unprepared loader."""
    accelerator = Accelerator()
    model = Model()
    _, optimizer = accelerator.prepare(model.linear, model.optimizer)
    for _epoch in range(EPOCHS):
        for _batch in rows():
            accelerator.backward(model.loss())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.alarms("zero_learning_rate")  # the losses are known in advance
def test_an_accelerator_and_a_plain_loader_report_each_loss_once() -> None:
    view, _ = run_job(mixed)
    for rank in view.ranks:
        assert (rank.step, rank.total, rank.epoch, rank.num_epochs) == (LENGTH, LENGTH, EPOCHS, EPOCHS)
        assert [loss for _, loss in rank.losses] == [float(step) for step in range(1, LENGTH * EPOCHS + 1)]


def prepared() -> None:
    accelerator = Accelerator()
    model = Model()
    loader = DataLoader(TensorDataset(torch.ones(4 * LENGTH, 4)), batch_size=2)
    _, optimizer, loader = accelerator.prepare(model.linear, model.optimizer, loader)
    for _epoch in range(EPOCHS):
        for _batch in loader:
            accelerator.backward(model.loss())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.alarms("zero_learning_rate")  # the losses are known in advance
def test_a_prepared_loader_is_counted_once() -> None:
    view, _ = run_job(prepared)
    for rank in view.ranks:
        assert (rank.step, rank.total, rank.epoch) == (LENGTH, LENGTH, EPOCHS)
        assert rank.reading.steps_done == LENGTH * EPOCHS


def ahead() -> list[int]:
    """Read one batch ahead, as loaders with a prefetcher do; return the samples after each step."""
    model, samples = Model(), []
    slot: Any = context.current().slot
    for _epoch in range(2):
        batches = iter(rows())
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            model.step()
            samples.append(slot.samples)
            batch = following
    return samples


def test_samples_of_a_batch_that_is_read_ahead_count_with_its_step() -> None:
    view, [samples] = run_job(ahead, ranks=1)
    steps = [after - before for before, after in itertools.pairwise([0, *samples])]
    assert steps == [2] * 2 * LENGTH
    assert view.ranks[0].reading.samples == 2 * 2 * LENGTH


def evaluates(until: float) -> None:
    import time

    model, begun_s = Model(), time.monotonic()
    for _batch in rows():
        model.step()
    while time.monotonic() - begun_s < until:
        with torch.no_grad():
            for _batch in rows(20):
                time.sleep(0.02)


def compiled() -> list[str]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def compute(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (batch,) in rows():
            compute(batch)
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_a_compiled_backward_pass_is_reported_without_a_warning() -> None:
    view, [messages] = run_job(compiled, ranks=1)
    assert not [message for message in messages if "Dynamo" in message]
    assert (view.ranks[0].epoch, view.ranks[0].total) == (1, LENGTH)


def test_a_loop_without_backward_is_an_evaluation() -> None:
    states: set[WorkerState] = set()

    def note(view: JobView) -> None:
        states.update(rank.state for rank in view.ranks)

    run_job(evaluates, 1.5, ranks=1, note=note)
    assert WorkerState.EVALUATING in states


def subtracted(num_batches: int, data: bool = False, micro_steps: int = 1) -> list[float]:
    """Train without an optimizer, and return the losses."""
    model, losses = nn.Linear(4, 1), []
    for _epoch in range(EPOCHS):
        for number, batch in enumerate(rows(num_batches)):
            loss = model(*batch).sum()
            losses.append(loss.item())
            loss.backward()
            if (number + 1) % micro_steps:
                continue
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    target = parameter.data if data else parameter
                    target -= 0.1 * parameter.grad
                    parameter.grad = None
    return losses


@pytest.mark.parametrize(
    ("num_batches", "data", "micro_steps"), [(5, False, 1), (5, True, 1), (8, False, 4), (300, False, 1)]
)
def test_steps_without_an_optimizer_are_counted(num_batches: int, data: bool, micro_steps: int) -> None:
    """Keras and other libraries have their own optimizers, and lessons subtract gradients by hand."""
    view, [losses] = run_job(partial(subtracted, num_batches, data, micro_steps), ranks=1)
    (rank,) = view.ranks
    assert (rank.step, rank.epoch) == (num_batches, EPOCHS)
    assert rank.reading.losses.num_steps == EPOCHS * num_batches // micro_steps
    assert rank.loss == pytest.approx(losses[-1])
    means = [epoch.loss for _, epoch in sorted(view.epochs.items())]
    assert means == pytest.approx(_means(losses), rel=1e-4)


def _means(losses: list[float]) -> list[float]:
    size = len(losses) // EPOCHS
    return [sum(losses[start : start + size]) / size for start in range(0, len(losses), size)]


# --- objects of the user's that hooks must not trip over -------------------------------------------------------------


class MethodShape:
    """A batch whose shape is a method, as in some data frames."""

    def shape(self) -> int:
        return 2


class NoShape:
    shape = None


class NamedShape:
    shape = ("batch", 4)


class Unready:
    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("this batch is still on its way")


class LazyColumns(Mapping[str, Any]):
    """A mapping that hooks must not read."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("this column is still on its way")

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


class Nested(Sequence[Any]):
    """A sequence that contains itself, like a one-character string."""

    def __getitem__(self, index: Any) -> Any:
        return self

    def __len__(self) -> int:
        return 1


class Unhashable(torch.optim.SGD):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def trained(batch: Any, optimizer_class: type[torch.optim.SGD] = torch.optim.SGD) -> int:
    """Train over a loader that yields ``batch`` and return the number of steps."""
    torch.distributed.init_process_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    num_steps = 0
    for _ in DataLoader(range(8), batch_size=2, collate_fn=lambda items: batch):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("kind", [MethodShape, NoShape, NamedShape, Unready, LazyColumns, Nested])
def test_an_odd_batch_does_not_end_the_training(kind: Callable[[], Any]) -> None:
    assert run_job(partial(trained, kind()), ranks=2)[1] == [4, 4]


def test_a_hook_that_fails_says_so_once() -> None:
    view, _ = run_job(partial(trained, Unready()))
    notes = [(rank, text) for rank, text in view.notes if "this batch is still on its way" in text]
    assert sorted(rank for rank, _ in notes) == [0, 1]


def test_an_odd_optimizer_does_not_end_the_training() -> None:
    assert run_job(partial(trained, torch.ones(2, 4), Unhashable), ranks=2)[1] == [4, 4]


def test_libraries_without_fitting_hooks_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # the module lacks its class
    monkeypatch.setitem(sys.modules, "fastai.learner", ModuleType("fastai.learner"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # in the workers, which inherit the change
        _, steps = run_job(partial(trained, torch.ones(2, 4)), ranks=2)
    assert steps == [4, 4]


class Unable(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArithmeticError("no gradient")


def test_every_loss_counts_after_a_backward_failed_in_the_kernel() -> None:
    def fail() -> None:
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(4, 1))
        accelerator.backward(Unable.apply(model(torch.ones(1, 4))).sum())  # type: ignore[no-untyped-call]

    def train() -> None:
        model = Model()
        for _epoch in range(2):
            for _ in range(LENGTH):
                model.optimizer.zero_grad()
                model.loss().backward()
                model.optimizer.step()

    with pytest.raises(ArithmeticError):
        notebook_launcher(fail, num_processes=1, backend="cpu", engine="inline", dashboard="none")
    view, _ = run_job(train, ranks=1)
    assert [epoch.loss for _, epoch in sorted(view.epochs.items())] == pytest.approx([3.0, 8.0])


@pytest.mark.alarms("repeated_training")
def test_checks_of_an_accelerator_in_the_kernel_ignore_the_loops_of_workers() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(4, 1))
    accelerator.backward(model(torch.ones(1, 4)).sum())

    def train() -> int:
        """Train with a learning rate of 0 and clip after each step; a warning raises an error."""
        model = Model()
        for _ in range(2 * LENGTH):
            model.optimizer.zero_grad()
            model.step()
            nn.utils.clip_grad_norm_(model.linear.parameters(), 1.0)
        return model.num_steps

    assert run_job(train)[1] == [2 * LENGTH] * 2

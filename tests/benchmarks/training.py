"""Randomly drawn training loops, each compared with a plain loop of one process in double precision.

    python -m tests.benchmarks training [--loops 30] [--first 0]

A seed determines ranks, strategy, precision, division of the data, accumulation, clipping, schedule, optimizer and
number of models, and whether the job ends in the middle and resumes from its checkpoint, on another number of ranks if
the batches stay the same. :func:`expected` computes the mathematically expected weights from the samples that each rank
must get. Without mixed precision, weights must be equal up to rounding; in bf16, up to a fraction of their total
change.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from nblaunch import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from tests.benchmarks.bench import Row, count
from tests.training import ranks

EPOCHS = 2
_CYCLE = 60
_ALLOWED = {"no": 1e-9, "fp16": 1e-4, "bf16": 0.1}
"""Precision -> largest difference between weights, as a fraction of their change since the start. fp16 is fp32 on a
CPU.
"""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs, targets, positions in the dataset."""


@dataclass(frozen=True)
class Draw:
    """The loop that a seed selects.

    Args:
        sharing: how ranks divide the data: ``"even"``, ``"uneven"`` (with ``join_uneven_inputs``), ``"split"``,
            ``"dispatched"``, ``"dispatched split"``.
        source: ``"ordered"``, ``"generator"`` (of the loader), ``"sampler"``, ``"seeded"`` or ``"stream"``.
        batch_size: the loader's batch size, for one rank, or for all ranks if batches are split.
        models: ``"one"``, or two: ``"together"`` in one block, in ``"nested"`` blocks, or ``"apart"``.
        resume: position in the loop, from 0 to 1, at which the job ends and another one resumes it; negative: nowhere.
        resumed_world_size: number of ranks of the resuming job.
    """

    seed: int
    world_size: int
    strategy: str
    precision: str
    accumulation: dict[str, Any]
    sharing: str
    source: str
    num_rows: int
    batch_size: int
    drop_last: bool
    is_stateful: bool
    optimizer: str
    schedule: str
    steps_with_optimizer: bool
    clipping: str
    models: str
    resume: float
    resumed_world_size: int
    ddp_options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_split(self) -> bool:
        return "split" in self.sharing

    @property
    def num_steps(self) -> int:
        return int(self.accumulation["num_steps"])

    @property
    def num_models(self) -> int:
        return 1 if self.models == "one" else 2


def draw(seed: int) -> Draw:
    """Return the loop that a seed determines."""
    choose = random.Random(seed)
    world_size = choose.choice([1, 2, 2, 3])
    strategy = choose.choice(["ddp", "ddp", "fsdp"])
    sharings = ["even", "split", "dispatched", "dispatched split"]
    sharing = choose.choice([*sharings, "uneven", "uneven"] if strategy == "ddp" else sharings)
    is_split, is_uneven = "split" in sharing, sharing == "uneven"
    sources = ["ordered", "generator", "sampler", "seeded", *([] if is_uneven else ["stream"])]
    num_steps = choose.choice([1, 2, 3, 4])
    accumulation: dict[str, Any] = {
        "num_steps": num_steps,
        "sync_each_batch": choose.random() < 0.25,
        "sync_with_dataloader": choose.random() < 0.75,
        "divide_by_actual": choose.random() < 0.5,
    }
    options = [{}, {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
    if not is_uneven:
        options.append({"static_graph": True})
    return Draw(
        seed=seed,
        world_size=world_size,
        strategy=strategy,
        precision=choose.choice(["no", "no", "no", "fp16", "bf16"]),
        accumulation=accumulation,
        sharing=sharing,
        source=choose.choice(sources),
        num_rows=choose.randint(13, 61),
        batch_size=6 if is_split else choose.randint(1, 4),
        drop_last=choose.random() < 0.2,
        is_stateful=choose.random() < 0.3,
        optimizer=choose.choice(["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"]),
        schedule=choose.choice(["none", "step", "warmup", "onecycle", "sequential", "plateau", "cosine"]),
        steps_with_optimizer=choose.random() < 0.8,
        clipping=choose.choice(["none", "2.0", "inf", "1.0", "value"]),
        models=choose.choice(["one", "one", "together", "nested", "apart"]),
        resume=choose.random() if choose.random() < 0.6 else -1.0,
        resumed_world_size=choose.choice([1, 2, 3]) if is_split else world_size,
        ddp_options=choose.choice(options),
    )


# --- what both loops are made of -------------------------------------------------------------------------------------


def rows_of(drawn: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(drawn.seed)
    inputs = torch.randn(drawn.num_rows, 3, generator=generator, dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def make_models(drawn: Draw, dtype: torch.dtype) -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(drawn.seed)
        made = [
            nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)).double()
            for _ in range(drawn.num_models)
        ]
    return [model.to(dtype) for model in made]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    # A large eps keeps steps smooth: without it, the sign of a tiny gradient would determine a whole step.
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(parameters, lr=0.02, eps=0.1),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.02, eps=0.1, weight_decay=0.1),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=0.01, eps=0.1),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.03, eps=0.1),
    }
    return makers[name]()


def make_schedule(drawn: Draw, optimizer: torch.optim.Optimizer) -> Any:
    name = drawn.schedule
    if name == "onecycle":
        total_steps = _CYCLE if drawn.steps_with_optimizer else 10 * _CYCLE  # torch rejects more steps
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps, cycle_momentum=False)
    if name == "sequential":
        parts = [lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 5), lr_scheduler.CosineAnnealingLR(optimizer, 40)]
        return lr_scheduler.SequentialLR(optimizer, parts, [5])
    makers: dict[str, Callable[[], Any]] = {
        "step": lambda: lr_scheduler.StepLR(optimizer, 4, 0.7),
        "warmup": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.8, patience=2),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 50),
    }
    return makers[name]() if name in makers else None


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs).to(targets.dtype) - targets).pow(2).mean()


def with_answer(inputs: torch.Tensor, first: nn.Module) -> torch.Tensor:
    """Return the inputs of the second model, which depend on the first."""
    with torch.no_grad():
        return inputs + 0.1 * first(inputs).to(inputs.dtype)


def step_schedule(schedule: Any) -> None:
    if schedule is not None:
        inner = getattr(schedule, "scheduler", schedule)
        schedule.step(*[1.0] if isinstance(inner, lr_scheduler.ReduceLROnPlateau) else [])


# --- the plain loop --------------------------------------------------------------------------------------------------


def orders(drawn: Draw) -> Iterator[list[int]]:
    """Yield the positions of one process in each epoch."""
    generator = torch.Generator().manual_seed(drawn.seed)
    everything = range(drawn.num_rows)
    for epoch in range(EPOCHS):
        if drawn.source == "generator":
            loader = DataLoader(everything, 1, shuffle=True, generator=generator)  # type: ignore[arg-type]
            yield [int(batch) for batch in loader]
        elif drawn.source == "sampler":
            yield list(RandomSampler(everything, generator=generator))
        elif drawn.source == "seeded":
            generator.manual_seed(drawn.seed + epoch)
            yield torch.randperm(drawn.num_rows, generator=generator).tolist()
        else:
            yield list(everything)


def rounds_of(drawn: Draw, order: list[int], world_size: int) -> list[list[list[int]]]:
    """Return the positions that each rank gets in each round of batches; none if it has no batch."""
    size = drawn.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if drawn.drop_last and len(batches[-1]) < size:
        batches.pop()
    per_round = 1 if drawn.is_split else world_size
    rounds = [batches[start : start + per_round] for start in range(0, len(batches), per_round)]
    if drawn.drop_last and rounds and len(rounds[-1]) < per_round:
        rounds.pop()
    if drawn.sharing == "uneven":
        return [part + [[]] * (world_size - len(part)) for part in rounds]
    cut = []
    for part in rounds:
        rows = [row for batch in part for row in batch]
        whole = size * per_round
        if "dispatched" in drawn.sharing or world_size == 1:
            whole = -(-len(rows) // world_size) * world_size
        head = [row for batch in rounds[0] for row in batch]
        while len(rows) < whole:
            rows += head[: whole - len(rows)]
        own = len(rows) // world_size
        cut.append([rows[rank * own : (rank + 1) * own] for rank in range(world_size)])
    return cut


@dataclass
class Expected:
    """The result of the plain loop.

    Args:
        weights: flat weights of every model, before and after.
        rates: learning rates at the end.
        ends: (epoch, batches read in it, whether it is complete) for windows that ended on all ranks.
    """

    start: torch.Tensor
    weights: torch.Tensor
    rates: list[float]
    ends: list[tuple[int, int, bool]]


class _PlainModel:
    """A model of the plain loop, with the gradients that each rank has accumulated."""

    def __init__(self, drawn: Draw, model: nn.Module) -> None:
        self.drawn = drawn
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = make_optimizer(drawn.optimizer, model)
        self.schedule = make_schedule(drawn, self.optimizer)
        self.of_rank = [self._zeros() for _ in range(3)]

    def _zeros(self) -> list[torch.Tensor]:
        return [torch.zeros_like(one) for one in self.parameters]

    def add(self, rank: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = loss_of(self.model, inputs, targets) / self.drawn.num_steps
        for total, gradient in zip(
            self.of_rank[rank], torch.autograd.grad(loss, self.parameters), strict=True
        ):
            total += gradient

    def step(self, present: Sequence[int], world_size: int, factor: float) -> None:
        """Step with the mean over ranks; absent ranks count as zeros, and keep their gradients."""
        for position, one in enumerate(self.parameters):
            total = sum(self.of_rank[rank][position] for rank in present)
            one.grad = torch.as_tensor(total) / world_size * factor
        if self.drawn.clipping == "value":
            nn.utils.clip_grad_value_(self.parameters, 0.05)
        elif self.drawn.clipping != "none":
            nn.utils.clip_grad_norm_(self.parameters, 0.1, float(self.drawn.clipping))
        self.optimizer.step()
        for rank in present:
            self.of_rank[rank] = self._zeros()

    def step_schedule(self, is_due: bool) -> None:
        """Step the schedule as often as a single process would that reads the ranks' batches one by one."""
        if not self.drawn.steps_with_optimizer:
            step_schedule(self.schedule)
            return
        is_single = self.drawn.is_split or self.drawn.schedule == "plateau"
        for _ in range(1 if is_single else self.drawn.world_size):
            is_over = self.drawn.schedule == "onecycle" and self.schedule.last_epoch >= _CYCLE
            if is_due and not is_over:
                step_schedule(self.schedule)


def expected(drawn: Draw, stop: tuple[int, int, bool] | None = None) -> Expected:
    """Train in one process, in double precision.

    Args:
        drawn: the loop.
        stop: position at which another number of ranks resumes.
    """
    inputs, targets = rows_of(drawn)
    models = [_PlainModel(drawn, model) for model in make_models(drawn, torch.float64)]
    start, ends = flat([one.model for one in models]), []
    step = size = 0
    for epoch, order in enumerate(orders(drawn)):
        both = [rounds_of(drawn, order, size) for size in (drawn.world_size, drawn.resumed_world_size)]
        is_uneven = any(not rows for part in both[0] for rows in part)
        for number, rounds in enumerate(zip(*both, strict=True), 1):
            part = rounds[stop is not None and (epoch, number) > stop[:2]]
            present = [rank for rank, rows in enumerate(part) if rows]
            step, size = step + 1, size + 1
            is_due = step % drawn.num_steps == 0
            if number == len(both[0]) and drawn.accumulation.get("sync_with_dataloader", True):
                step, is_due = 0, is_due or not is_uneven
            factor = drawn.num_steps / size if drawn.accumulation.get("divide_by_actual") else 1.0
            batches = [(rank, inputs[part[rank]], targets[part[rank]]) for rank in present]
            for group in [models[:1], models[1:]] if drawn.models == "apart" else [models]:
                for one in group:
                    for rank, rows, wanted in batches:
                        given = rows if one is models[0] else with_answer(rows, models[0].model)
                        one.add(rank, given, wanted)
                for one in group:
                    if is_due:
                        one.step(present, len(part), factor)
                    one.step_schedule(is_due)
            size = 0 if is_due else size
            if is_due and len(present) == len(part):
                ends.append((epoch, number, number == len(both[0])))
    rates = [group["lr"] for one in models for group in one.optimizer.param_groups]
    return Expected(start, flat([one.model for one in models]), rates, ends)


def flat(models: Sequence[nn.Module]) -> torch.Tensor:
    return torch.cat([one.detach().double().flatten() for model in models for one in model.parameters()])


# --- the loop of a rank ----------------------------------------------------------------------------------------------


class _Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, drawn: Draw, dtype: torch.dtype) -> None:
        self.columns = [column.to(dtype) for column in rows_of(drawn)]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, position: int) -> Batch:
        inputs, targets = (column[position] for column in self.columns)
        return inputs, targets, torch.tensor(position)


class _Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: _Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Batch]:
        return (self.rows[position] for position in range(len(self.rows)))


def _make_loader(drawn: Draw, dtype: torch.dtype, is_resumed: bool) -> Any:
    data = _Rows(drawn, dtype)
    # A resumed job uses the checkpoint's generators, not these.
    generator = torch.Generator().manual_seed(drawn.seed + 1000 * is_resumed)
    options: dict[str, Any] = {"batch_size": drawn.batch_size, "drop_last": drawn.drop_last}
    if drawn.source == "stream":
        return DataLoader(_Stream(data), **options)
    if drawn.source == "sampler":
        return DataLoader(data, sampler=RandomSampler(data, generator=generator), **options)
    return DataLoader(
        data,
        shuffle=drawn.source in ("generator", "seeded"),
        generator=generator if drawn.source == "generator" else None,
        **options,
    )


def _make_accelerator(drawn: Draw) -> Accelerator:
    config = DataLoaderConfiguration(
        split_batches=drawn.is_split,
        dispatch_batches="dispatched" in drawn.sharing,
        even_batches=drawn.sharing != "uneven",
        use_seedable_sampler=drawn.source == "seeded",
        data_seed=drawn.seed if drawn.source == "seeded" else None,
        use_stateful_dataloader=drawn.is_stateful,
    )
    return Accelerator(
        mixed_precision=drawn.precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(**drawn.accumulation),
        dataloader_config=config,
        step_scheduler_with_optimizer=drawn.steps_with_optimizer,
        kwargs_handlers=[DistributedDataParallelKwargs(**drawn.ddp_options)],
        fsdp_plugin=FullyShardedDataParallelPlugin() if drawn.strategy == "fsdp" else None,
    )


class _Job:
    """A rank's prepared objects, and its micro-steps."""

    def __init__(self, drawn: Draw, is_resumed: bool) -> None:
        self.drawn = drawn
        dtype = torch.float64 if drawn.precision == "no" else torch.float32
        self.accelerator = _make_accelerator(drawn)
        modules = make_models(drawn, dtype)
        optimizers = [make_optimizer(drawn.optimizer, module) for module in modules]
        schedules = [make_schedule(drawn, optimizer) for optimizer in optimizers]
        loader = _make_loader(drawn, dtype, is_resumed)
        prepared = self.accelerator.prepare(loader, *modules, *optimizers, *schedules)
        self.loader, count = prepared[0], drawn.num_models
        self.models = prepared[1 : 1 + count]
        self.answering = modules[0] if drawn.sharing == "uneven" else self.models[0]
        self.optimizers = prepared[1 + count : 1 + 2 * count]
        self.schedules = prepared[1 + 2 * count :]

    def micro_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        accumulate, everything = self.accelerator.accumulate, range(len(self.models))
        if self.drawn.models == "apart":
            for position in everything:
                with accumulate(self.models[position]):
                    self._backward(position, inputs, targets)
                    self._step(position)
            return
        blocks = [accumulate(*self.models)]
        if self.drawn.models == "nested":
            blocks = [accumulate(model) for model in self.models]
        with blocks[0], blocks[-1] if len(blocks) > 1 else warnings.catch_warnings():
            for position in everything:
                self._backward(position, inputs, targets)
            for position in everything:
                self._step(position)

    def _backward(self, position: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        # Use the user's own module: a rank that has joined takes part in only one forward of a prepared model.
        given = inputs if position == 0 else with_answer(inputs, self.answering)
        self.accelerator.backward(loss_of(self.models[position], given, targets))

    def _step(self, position: int) -> None:
        parameters = self.models[position].parameters()
        if self.accelerator.sync_gradients and self.drawn.clipping == "value":
            self.accelerator.clip_grad_value_(parameters, 0.05)
        elif self.accelerator.sync_gradients and self.drawn.clipping != "none":
            self.accelerator.clip_grad_norm_(parameters, 0.1, float(self.drawn.clipping))
        self.optimizers[position].step()
        step_schedule(self.schedules[position])
        self.optimizers[position].zero_grad()

    def train(
        self, folder: str, begin: tuple[int, int, bool] | None, end: tuple[int, int, bool] | None
    ) -> None:
        """Train from the saved position ``begin`` to ``end``, and save there."""
        first, num_read, is_whole = begin or (0, 0, False)
        if begin is not None:
            self.accelerator.load_state(folder)
        for epoch in range(first + is_whole, EPOCHS):
            loader = self.loader
            if epoch == first and num_read:
                loader = self.accelerator.skip_first_batches(loader)
            num_before = num_read if epoch == first and not is_whole else 0
            with self._joining():
                for number, (inputs, targets, _) in enumerate(loader, num_before + 1):
                    self.micro_step(inputs, targets)
                    if end is not None and (epoch, number) == end[:2]:
                        self.accelerator.save_state(folder)
                        return

    def _joining(self) -> Any:
        is_joined = self.drawn.sharing == "uneven" and self.drawn.world_size > 1
        return self.accelerator.join_uneven_inputs(self.models) if is_joined else warnings.catch_warnings()

    def evaluate(self) -> list[int]:
        """Return the positions that gather_for_metrics returns in an epoch of evaluation."""
        for model in self.models:
            model.eval()
        found: list[int] = []
        for *_, positions in self.loader:
            found += self.accelerator.gather_for_metrics(positions).tolist()
        return sorted(found)


def _as_rank(
    drawn: Draw, folder: str, begin: Any, end: Any
) -> tuple[list[torch.Tensor], list[float], list[int]]:
    warnings.filterwarnings("ignore", "mixed_precision='fp16'")  # on a CPU
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # at every call, on request
    job = _Job(drawn, is_resumed=begin is not None)
    job.train(folder, begin, end)
    weights = [job.accelerator.get_state_dict(model) for model in job.models]
    rates = [group["lr"] for optimizer in job.optimizers for group in optimizer.param_groups]
    positions = [] if drawn.sharing == "uneven" or end is not None else job.evaluate()
    values = [one.detach().double().cpu().flatten() for state in weights for one in state.values()]
    return values, rates, positions


# --- both side by side -----------------------------------------------------------------------------------------------


def play(drawn: Draw) -> str:
    """Train with both loops; return the differences, or an empty string."""
    wanted = expected(drawn)
    stop = wanted.ends[int(drawn.resume * len(wanted.ends))] if drawn.resume >= 0 and wanted.ends else None
    wanted = expected(drawn, stop)
    with tempfile.TemporaryDirectory() as folder:
        if stop is not None:
            ranks.run(_as_rank, drawn.world_size, drawn, folder, None, stop, timeout_s=240)
            drawn = replace(drawn, world_size=drawn.resumed_world_size)
        answers = ranks.run(_as_rank, drawn.world_size, drawn, folder, stop, None, timeout_s=240)
    way = float((wanted.weights - wanted.start).norm())
    # Each step rounds the weights to single precision, which matters if they change little.
    num_roundings = 0 if drawn.precision == "no" else len(wanted.ends) + 1
    rounding = num_roundings * torch.finfo(torch.float32).eps / 2 * float(wanted.weights.norm())
    rounds = rounds_of(drawn, list(range(drawn.num_rows)), drawn.world_size)
    num_seen = len({row for part in rounds for rows in part for row in rows})
    problems = []
    for rank, (weights, rates, positions) in enumerate(answers):
        if weights:
            distance = float((torch.cat(weights) - wanted.weights).norm())
            if not distance <= _ALLOWED[drawn.precision] * way + rounding:
                problems.append(f"rank {rank} is {distance / way:.2e} of the way off")
        if rates != wanted.rates:
            problems.append(f"rank {rank} has the rates {rates}, not {wanted.rates}")
        if drawn.sharing != "uneven" and not len(set(positions)) == len(positions) == num_seen:
            problems.append(f"rank {rank} has gathered {positions}")
    return "; ".join(problems)


def measure(loops: int = 30, first: int = 0) -> Iterator[Row]:
    ranks.start_server()
    good = 0
    try:
        for seed in range(first, first + loops):
            drawn = draw(seed)
            try:
                problem = play(drawn)
            except ranks.RankFailed as error:
                problem = str(error)
            good += not problem
            if problem:
                print(f"{drawn}: {problem}", file=sys.stderr)
    finally:
        ranks.stop_server()
    yield count("random loops that train as one process does", good, loops)

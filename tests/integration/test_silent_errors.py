"""Errors in training loops that raise no exception: each is reported once with ranks, line and advice; correct
loops that look odd are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.kernels import Kernel

SETUP = """
import builtins, contextlib, copy, fcntl, io, json, pathlib, pickle, random
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import DataLoaderConfiguration
from nblaunch import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin, LocalSGD

def parts(rows=192, rate=0.01, norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    data = TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1))
    return model, optimizer, DataLoader(data, 8, shuffle=True)

def prepared(accelerator=None, **options):
    accelerator = accelerator or Accelerator()
    return accelerator, *accelerator.prepare(*parts(**options))

def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean()

def step(accelerator, model, optimizer, batch):
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()

class Noisy(torch.utils.data.Dataset):
    "Draws noise from a generator of its own, or from one of torch's."
    def __init__(self, kind=""):
        self.kind = kind
        self.transforms = [random.Random(0)]
    def __len__(self):
        return 192
    def __getitem__(self, index):
        if self.kind == "index":
            self.transforms = [random.Random(index)]
        noise = torch.rand(()) if self.kind == "torch" else self.transforms[0].random()
        return torch.ones(4) * noise, torch.zeros(1)

PATH = os.path.join(os.environ["NBLAUNCH_LOG_DIR"], "written")
"""

WRONG = {
    "gradients_not_cleared": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()  # here""",
    "optimizer_without_gradients": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model = copy.deepcopy(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()  # here
        optimizer.zero_grad()""",
    "optimizer_without_gradients=head": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model[2] = nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()  # here
        optimizer.zero_grad()""",
    "optimizer_without_gradients=cleared": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.zero_grad()
        optimizer.step()  # here""",
    "clipping_after_step": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # here
        optimizer.zero_grad()""",
    "clipping_after_step=torch": """
    from torch.nn.utils import clip_grad_norm_
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        clip_grad_norm_(model.parameters(), 1.0)  # here
        optimizer.zero_grad()""",
    "clipping_after_step=value": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)  # here
        optimizer.zero_grad()""",
    "zero_learning_rate": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / 6))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()  # here
        scheduler.step()
        optimizer.zero_grad()""",
    "scheduler_per_micro_step": """
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))  # here
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()""",
    "replicas_differ": """
    accelerator = Accelerator()
    plain, optimizer, loader = parts()
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(plain, batch))
        optimizer.step()  # here
        optimizer.zero_grad()""",
    "replicas_differ=weights": """
    accelerator, model, optimizer, loader = prepared()
    if accelerator.process_index == 2:
        nn.init.ones_(accelerator.unwrap_model(model)[0].weight)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()  # here
        optimizer.zero_grad()""",
    "replicas_differ=plain": """
    torch.distributed.init_process_group("gloo")
    plain, optimizer, loader = parts()
    model = nn.parallel.DistributedDataParallel(plain)
    for batch in DataLoader(loader.dataset, 8, sampler=torch.utils.data.DistributedSampler(loader.dataset)):
        loss_of(plain, batch).backward()
        optimizer.step()  # here
        optimizer.zero_grad()""",
    "steps_on_some_ranks": """
    accelerator, model, optimizer, loader = prepared(rows=384)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))  # here
        if accelerator.is_main_process:
            optimizer.step()
        optimizer.zero_grad()""",
    "same_samples": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))  # here
        optimizer.step()
        optimizer.zero_grad()""",
    "same_samples=sampler": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    sampler = torch.utils.data.DistributedSampler(loader.dataset, num_replicas=3, rank=0)
    for batch in DataLoader(loader.dataset, 8, sampler=sampler):
        accelerator.backward(loss_of(model, batch))  # here
        optimizer.step()
        optimizer.zero_grad()""",
    "repeated_training": """
    class Library:  # knows nothing of the launch
        def fit(self, model, optimizer, loader):
            for _ in range(2):
                for batch in loader:
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    Library.fit.__code__ = Library.fit.__code__.replace(co_filename=os.path.join(torch.__path__[0], "library.py"))
    Library().fit(*parts())  # here""",
    "epoch_not_set": """
    accelerator = Accelerator()
    model, optimizer, loader = parts(rows=72)
    model, optimizer = accelerator.prepare(model, optimizer)
    sampler = torch.utils.data.DistributedSampler(loader.dataset)
    loader = DataLoader(loader.dataset, 8, sampler=sampler)
    for epoch in range(4):
        for batch in loader:  # here
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()""",
    "epoch_not_set=": """
    torch.distributed.init_process_group("gloo")
    model, optimizer, loader = parts(rows=72)
    model = nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(loader.dataset, 8, sampler=torch.utils.data.DistributedSampler(loader.dataset))
    for epoch in range(3):
        for batch in loader:  # here
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()""",
    "equal_noise": """
    accelerator = Accelerator()
    model, optimizer, _ = parts()
    loader = DataLoader(Noisy(), 8, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))  # here
        optimizer.step()
        optimizer.zero_grad()""",
    "equal_noise=": """
    accelerator = Accelerator()
    model, optimizer, _ = parts()
    loader = DataLoader(Noisy("torch"), 8, shuffle=True, num_workers=2, worker_init_fn=lambda _: torch.manual_seed(0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))  # here
        optimizer.step()
        optimizer.zero_grad()""",
    "same_file": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        step(accelerator, model, optimizer, batch)
    torch.save(model.state_dict(), PATH)  # here""",
    "same_file=": """
    from safetensors.torch import save_file
    save_file({"weight": torch.ones(2)}, PATH)  # here""",
    "same_file=open": """
    with open(PATH, "w") as file:  # here
        file.write("accuracy: 0." + os.environ["RANK"])""",
    "same_file=path": """
    import pathlib
    pathlib.Path(PATH).write_text("accuracy: 0." + os.environ["RANK"])  # here""",
    "same_file=logging": """
    import logging
    logging.FileHandler(PATH, mode="w").emit(logging.makeLogRecord({"msg": os.environ["RANK"]}))  # here""",
    "same_file=numpy": """
    import numpy
    numpy.save(PATH, numpy.ones(3))  # here""",
    "statistics_differ": """
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator, model, optimizer, loader = prepared(Accelerator(kwargs_handlers=[ddp]), norm=True)
    for batch in loader:
        step(accelerator, model, optimizer, batch)
    model.eval()
    with torch.no_grad():
        for batch in loader:  # here
            loss_of(model, batch)""",
}


def _declared(names: Iterable[str]) -> list[Any]:
    """Return the names of programs as parameters of a test, each of which causes the alarm of its program."""
    return [pytest.param(name, marks=pytest.mark.alarms(name.partition("=")[0])) for name in names]


@pytest.mark.parametrize("error", _declared(WRONG))
def test_a_silent_error_is_named_once_with_ranks_line_and_check(shared: Kernel, error: str) -> None:
    name, _, subject = error.partition("=")
    program = f"def train():{WRONG[error]}\nnotebook_launcher(train, num_processes=3)"
    line = next(number for number, text in enumerate(program.splitlines(), 1) if "# here" in text)
    shared.run(SETUP)
    shown = " ".join(shared.run(program).shown.split())
    warnings = shown.partition("warning: ")[2]  # line of the summary
    assert f"NBLAUNCH_CHECKS=-{name} silences" in warnings
    assert warnings.count("NBLAUNCH_CHECKS") == 1
    assert f", line {line})" in warnings
    ranks = "rank 2 differs from ranks 0 and 1" if subject == "weights" else "ranks 0-2"
    if name == "same_file":
        test = "accelerator.is_main_process" if "prepared()" in program else "rank == 0"
        assert f"Write it on one rank only (`if {test}:`)" in warnings
    assert f"({'rank 0 differs from ranks 1 and 2' if name == 'steps_on_some_ranks' else ranks}, " in warnings


NAN = """
    accelerator, model, optimizer, loader = prepared()
    for number, batch in enumerate(loader, 1):
        loss = loss_of(model, batch)
        if accelerator.process_index == 2 and number == 3:
            loss = loss * float("nan")
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()"""


@pytest.mark.alarms("replicas_differ")
def test_the_warning_names_unused_parameters(shared: Kernel) -> None:
    shared.run(SETUP)
    cell = shared.run(
        """def train():
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model[0].unused = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        step(accelerator, model, optimizer, batch)
notebook_launcher(train, num_processes=2)""",
        raises="RuntimeError",
    )
    assert "unused parameters, such as 0.unused.weight. Pass Accelerator(kwargs_handlers=" in cell.shown


@pytest.mark.alarms("nan_on_one_rank")
def test_nan_is_traced_to_its_first_rank(shared: Kernel) -> None:
    shared.run(SETUP)
    shown = " ".join(
        shared.run(f"def train():{NAN}\nnotebook_launcher(train, num_processes=3)").shown.split()
    )
    warnings = shown.partition("warning: ")[2]
    assert "since step 3" in warnings
    assert "(rank 2 differs from ranks 0 and 1, " in warnings
    assert "NBLAUNCH_CHECKS=-nan_on_one_rank silences" in warnings
    assert warnings.count("NBLAUNCH_CHECKS") == 1


HINTS = {
    "training_in_eval_mode": """
    accelerator = Accelerator()
    model, optimizer, loader = parts(norm=True)
    model, optimizer, loader = accelerator.prepare(model.eval(), optimizer, loader)
    for batch in loader:
        step(accelerator, model, optimizer, batch)""",
    "loss_divided_twice": """
    accelerator, model, optimizer, loader = prepared(Accelerator(gradient_accumulation_steps=4))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch) / 4)
            optimizer.step()
            optimizer.zero_grad()""",
    "evaluation_in_train_mode": """
    accelerator, model, optimizer, loader = prepared(norm=True)
    for batch in loader:
        step(accelerator, model, optimizer, batch)
    with torch.no_grad():
        for batch in loader:
            loss_of(model, batch)""",
    "no_optimizer_steps": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.zero_grad()""",
    "parameters_without_gradients": """
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model, _, loader = parts()
    model.append(nn.Linear(1, 1))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for batch in loader:
        layers = accelerator.unwrap_model(model)
        accelerator.backward(layers[2](layers[1](layers[0](batch[0]))).mean())
        for p in layers[:3].parameters(): p.grad = accelerator.reduce(p.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()""",
}


ONE_SHARE = """
    accelerator, model, optimizer, loader = prepared()
    held_out = accelerator.prepare(parts()[2])
    for epoch in range(2):
        for batch in loader:
            step(accelerator, model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, batch) for batch in held_out]
        model.train()
        mean = torch.stack(losses).mean()"""

PAIRS = """
    accelerator = Accelerator()
    model, optimizer, inputs = accelerator.prepare(*parts())
    targets = accelerator.prepare(DataLoader(TensorDataset(torch.ones(192, 1)), 8, shuffle=True))
    for (first, _), (second,) in zip(inputs, targets):
        accelerator.backward(loss_of(model, (first, second)))
        optimizer.step()
        optimizer.zero_grad()"""

HINTS |= {
    "metric_of_one_share": ONE_SHARE
    + """
        accelerator.print(f"epoch {epoch}, loss {mean:.3f}")""",
    "metric_of_one_share=log": ONE_SHARE
    + """
        accelerator.log({"lr": 0.1})
        accelerator.log({"eval/mse": mean})""",
    "scheduler_per_epoch": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(3):
        for batch in loader:
            step(accelerator, model, optimizer, batch)
        scheduler.step()""",
    "loaders_in_different_orders": PAIRS,
}


@pytest.mark.parametrize("hint", _declared(HINTS))
def test_possibly_intended_patterns_are_hints(shared: Kernel, hint: str) -> None:
    shared.run(SETUP)
    cell = shared.run(
        f"def train():{HINTS[hint]}\nnotebook_launcher(train, num_processes=2)\nnblaunch.last_job().hints()"
    )
    assert [f"NBLAUNCH_CHECKS=-{hint.partition('=')[0]} " in text for text in cell.value] == [True]
    assert cell.shown.count("NBLAUNCH_CHECKS") == 1, "as the value of the cell"
    assert "1 hint" in cell.shown


RIGHT = {
    "a search in which each rank trains with another learning rate": """
    model, optimizer, loader = parts(rate=0.1 * (1 + int(os.environ["RANK"])))
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()""",
    "plain models whose gradients or weights the loop averages by hand": """
    torch.distributed.init_process_group("gloo")
    plain, optimizer, loader = parts()
    model = nn.parallel.DistributedDataParallel(plain)
    def average(tensors):
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
            tensor /= torch.distributed.get_world_size()
    sampler = torch.utils.data.DistributedSampler(loader.dataset)
    for batch in DataLoader(loader.dataset, 8, sampler=sampler):
        loss_of(plain, batch).backward()
        average(parameter.grad for parameter in plain.parameters())
        optimizer.step()
        optimizer.zero_grad()
    model = nn.parallel.DistributedDataParallel(plain)
    for number, batch in enumerate(DataLoader(loader.dataset, 8, sampler=sampler)):
        with model.no_sync():
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 3:
            average(parameter.data for parameter in plain.parameters())""",
    "a loss that all ranks compute from the samples of all ranks": """
    torch.distributed.init_process_group()
    model, optimizer, loader = parts()
    model = nn.parallel.DistributedDataParallel(model)
    sampler = torch.utils.data.DistributedSampler(loader.dataset)
    for batch in DataLoader(loader.dataset, 8, sampler=sampler):
        loss = loss_of(model, batch)
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        (loss - loss.detach() + total).backward()
        optimizer.step()
        optimizer.zero_grad()""",
    "a schedule that is computed without training, to plot it": """
    accelerator, model, optimizer, loader = prepared(rows=384)
    batch = next(iter(loader))
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    plotted = torch.optim.AdamW(nn.Linear(2, 1).parameters(), lr=0.1)
    schedule, rates = torch.optim.lr_scheduler.CosineAnnealingLR(plotted, 20), []
    for _ in range(20):
        rates.append(plotted.param_groups[0]["lr"])
        plotted.step()
        schedule.step()
    optimizer.zero_grad()
    for batch in loader:
        step(accelerator, model, optimizer, batch)""",
    "gradients of the main process, whose weights are sent to all ranks": """
    accelerator, model, optimizer, loader = prepared(rows=384)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        if accelerator.is_main_process:
            optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)""",
    "an additional backward pass of one rank, and accumulation": """
    accelerator = Accelerator()
    plain, optimizer, loader = parts(rows=384)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    probe = nn.Linear(4, 1)
    for number, batch in enumerate(loader, 1):
        if accelerator.process_index == 1 and number % 3 == 0:
            accelerator.backward(probe(batch[0]).sum())
        accelerator.backward(loss_of(model, batch))
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()""",
    "gradients without steps, for a look at them, and weights changed by hand": """
    accelerator, model, optimizer, loader = prepared(rows=384)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None""",
    "a GAN": """
    accelerator = Accelerator()
    first, second = parts()[0], parts()[0]
    for_first, for_second = (torch.optim.Adam(model.parameters()) for model in (first, second))
    first, second, for_first, for_second, loader = accelerator.prepare(first, second, for_first, for_second, parts()[2])
    for batch in loader:
        for_first.zero_grad()
        accelerator.backward(first(batch[0]).mean() - first(batch[0] + second(batch[0]).detach()).mean())
        for_first.step()
        for_second.zero_grad()
        accelerator.backward(first(batch[0] + second(batch[0])).mean())
        for_second.step()""",
    "frozen layers, and a group with a rate of 0": """
    accelerator = Accelerator()
    model, _, loader = parts()
    model[0].weight.requires_grad_(False)
    groups = [{"params": [model[0].bias], "lr": 0.0}, {"params": model[2].parameters()}]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(groups, 0.1), loader)
    for batch in loader:
        step(accelerator, model, optimizer, batch)""",
    "a warm-up from 0 and a decay to 0": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 6, max(0, (24 - step) / 18)))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()""",
    "accumulation by hand": """
    accelerator, model, optimizer, loader = prepared()
    for number, batch in enumerate(loader, 1):
        accelerator.backward(loss_of(model, batch) / 2)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()""",
    "accumulation with a short window, and a rate by hand": """
    windows = GradientAccumulationPlugin(3, divide_by_actual=True)
    accelerator, model, optimizer, loader = prepared(Accelerator(gradient_accumulation_plugin=windows))
    for number, batch in enumerate(loader):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()""",
    "no_sync by hand": """
    accelerator, model, optimizer, loader = prepared()
    for number, batch in enumerate(loader):
        is_last = number % 2 == 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            accelerator.backward(loss_of(model, batch))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()""",
    "an average of weights": """
    accelerator, model, optimizer, loader = prepared()
    average = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(model))
    for batch in loader:
        step(accelerator, model, optimizer, batch)
        average.update_parameters(accelerator.unwrap_model(model))""",
    "evaluation between, with statistics": """
    accelerator, model, optimizer, loader = prepared(norm=True)
    other = accelerator.prepare(parts()[2])
    for epoch in range(2):
        for batch in loader:
            step(accelerator, model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            for batch in other:
                accelerator.gather_for_metrics(loss_of(model, batch))
        model.train()""",
    "two optimizers, each clipped before its step": """
    accelerator = Accelerator()
    model, _, loader = parts()
    both = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)]
    model, loader, *both = accelerator.prepare(model, loader, *both)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        for optimizer in both:
            accelerator.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
            optimizer.step()
        for optimizer in both:
            optimizer.zero_grad()""",
    "a closure": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            return loss
        optimizer.step(closure)""",
    "a second model, trained without the Accelerator": """
    accelerator = Accelerator()
    other, for_other, _ = parts()
    model, optimizer, loader = accelerator.prepare(*parts())
    for number, batch in enumerate(loader):
        loss_of(other, batch).backward()
        for_other.step()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        for_other.zero_grad(set_to_none=number % 8 < 4)
        optimizer.zero_grad()""",
    "gradients dropped by hand": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        for parameter in model.parameters():
            parameter.grad = None
        accelerator.backward(loss_of(model, batch))
        optimizer.step()""",
    "gradients cleared by the model, before": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        model.zero_grad(set_to_none=False)
        accelerator.backward(loss_of(model, batch))
        optimizer.step()""",
    "gradients with a memory": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)""",
    "local steps": """
    accelerator, model, optimizer, loader = prepared()
    with LocalSGD(accelerator, model, local_sgd_steps=4) as local:
        for batch in loader:
            step(accelerator, model, optimizer, batch)
            local.step()""",
    "a scheduler for epochs that is not prepared": """
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                step(accelerator, model, optimizer, batch)
        scheduler.step()""",
    "clipping with torch before the step, measuring after it": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.zero_grad()""",
    "half precision": """
    accelerator, model, optimizer, loader = prepared(Accelerator(mixed_precision="fp16"))
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()""",
    "uneven inputs": """
    accelerator, model, optimizer, loader = prepared(rows=100)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            step(accelerator, model, optimizer, batch)""",
    "layers that a step leaves out": """
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        def forward(self, inputs, number):
            return self.heads[number](inputs)
    model = Heads()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), parts()[2])
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch[0], (number // 4) % 2).mean())
        optimizer.step()
        optimizer.zero_grad()""",
    "two passes to a step": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves): p.add_(move)
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves): p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()""",
    "an optimizer that steps now and then": """
    accelerator, model, optimizer, loader = prepared()
    rare = accelerator.prepare(torch.optim.SGD(accelerator.unwrap_model(model)[2].parameters(), 0.001))
    for number, batch in enumerate(loader):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        if number % 3 == 0:
            rare.step()
        optimizer.zero_grad()""",
    "a norm that is measured after the step": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.zero_grad()""",
    "ranks that read the same, each a model of its own": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    nn.init.constant_(model[0].weight, accelerator.process_index / 10)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()""",
    "a sampler with its epochs set": """
    accelerator = Accelerator()
    model, optimizer, loader = parts(rows=32)
    model, optimizer = accelerator.prepare(model, optimizer)
    sampler = torch.utils.data.DistributedSampler(loader.dataset)
    loader = DataLoader(loader.dataset, 8, sampler=sampler)
    for _ in range(2):  # a look, and a trial of a few steps
        for batch in loader:
            step(accelerator, model, optimizer, batch)
            break
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for batch in loader:
            step(accelerator, model, optimizer, batch)""",
    "samples that each rank draws by itself": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    for batch in loader:
        step(accelerator, model, optimizer, batch)""",
    "a part of the data for each rank": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    share = range(accelerator.process_index, len(loader.dataset), accelerator.num_processes)
    for batch in DataLoader(loader.dataset, 8, sampler=list(share)):
        step(accelerator, model, optimizer, batch)""",
    "a subset for each rank, in one order": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    data = loader.dataset
    mine = torch.utils.data.Subset(data, range(accelerator.process_index, len(data), accelerator.num_processes))
    for shuffle in (False, True):
        torch.manual_seed(1)
        for batch in DataLoader(mine, 8, shuffle=shuffle):
            step(accelerator, model, optimizer, batch)""",
    "a part of each batch for each rank": """
    accelerator = Accelerator()
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in DataLoader(loader.dataset, 16):
        mine = [rows[accelerator.process_index :: accelerator.num_processes] for rows in batch]
        accelerator.backward(loss_of(model, mine))
        optimizer.step()
        optimizer.zero_grad()""",
    "a layer of no optimizer, and parameters of no model": """
    accelerator = Accelerator()
    model, _, loader = parts()
    unused = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model[2].parameters(), unused], 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        step(accelerator, model, optimizer, batch)""",
    "an evaluation mode of frozen statistics only": """
    accelerator = Accelerator()
    model, optimizer, loader = parts(norm=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.unwrap_model(model)[1].eval()
    for batch in loader:
        step(accelerator, model, optimizer, batch)""",
    "noise by index, from torch, and equal in an evaluation": """
    accelerator = Accelerator()
    model, optimizer, _ = parts()
    loaders = [DataLoader(Noisy(kind), 8, shuffle=bool(kind), num_workers=2) for kind in ("", "index", "torch")]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    for batch in loaders[0]:
        loss_of(model, batch)
    for loader in loaders[1:]:
        for batch in loader:
            step(accelerator, model, optimizer, batch)""",
    "NaN that a loop leaves out, and NaN everywhere": """
    accelerator, model, optimizer, loader = prepared()
    for epoch in range(2):
        for number, batch in enumerate(loader):
            loss = loss_of(model, batch) * (float("nan") if number % 4 == 1 or epoch else 1)
            accelerator.backward(loss)
            if number % 4 != 1 or epoch:
                optimizer.step()
            optimizer.zero_grad()""",
    "files in turn, of each rank, and of the main process": """
    accelerator = Accelerator()
    with accelerator.main_process_first():
        torch.save([1], PATH + "-turn")
    torch.save([1], f"{PATH}-{accelerator.process_index}")
    if accelerator.is_main_process:
        torch.save([1], PATH + "-main")
    torch.save([1], os.devnull)""",
    "files opened in turn, of each rank, of the main process, and by all to add lines": """
    accelerator = Accelerator()
    class Reader:
        open = builtins.open  # unlike a function, not bound to readers
    def write(path, mode="w"):
        with open(path, mode) as file:
            file.write("line")
    with accelerator.main_process_first():
        write(PATH + "-turn")
    write(f"{PATH}-{accelerator.process_index}")
    os.makedirs(f"{PATH}-folder-{accelerator.process_index}")
    write(f"{PATH}-folder-{accelerator.process_index}/same")
    if accelerator.is_main_process:
        write(PATH + "-main")
    for mode in ("a", "x" if accelerator.is_main_process else "a", "r+"):
        write(PATH + "-add", mode) if mode != "x" else write(PATH + "-x", mode)
    write(os.devnull)
    with open(PATH + "-lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write(PATH + "-locked")
    with Reader().open(f"{PATH}-{accelerator.process_index}") as file:
        assert file.read() == "line"
    assert io.open is builtins.open is copy.deepcopy(io.open) is pickle.loads(pickle.dumps(io.open))""",
    "files in which all ranks write the same": """
    accelerator = Accelerator()
    with open(PATH + "-equal", "w") as file:
        json.dump({"accuracy": 0.5}, file)
    accelerator.wait_for_everyone()
    pathlib.Path(PATH + "-bytes").write_bytes(b"0.5")""",
    "files opened in unusual ways": """
    path = f"{PATH}-unusual-{os.environ['RANK']}"
    read = pathlib.Path(path).read_bytes
    open(path, "w", newline="\\r\\n").write("line\\n")  # closed without a reference
    assert read() == b"line\\r\\n"
    with open(path, "wb") as file:
        file.write(b"abc")
        file.seek(1)
        file.write(b"d")
        file.truncate(2)
    assert read() == b"ad"
    write = open(path, "w").write
    write("kept by its method")
    del write
    assert read() == b"kept by its method"
    with open(path, "w", encoding="utf-16") as file:
        assert (file.mode, file.name, file.encoding, file.errors) == ("w", path, "utf-16", "strict")
        assert type(file) is io.TextIOWrapper and isinstance(file.buffer, io.BufferedWriter)""",
    "a share of the parameters for each rank, with its own rate": """
    accelerator = Accelerator()
    rank = accelerator.process_index
    model, _, loader = parts()
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = torch.optim.SGD(layers[rank], 0.01 * (1 + rank))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        for owner, layer in enumerate(layers):
            for parameter in layer:
                torch.distributed.broadcast(parameter.data, owner)
        model.zero_grad()""",
    "gradients averaged by hand": """
    accelerator, model, optimizer, loader = prepared()
    for batch in loader:
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, batch))
        for parameter in model.parameters():
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()""",
}


RIGHT |= {
    "fewer batches on one rank": """
    torch.distributed.init_process_group("gloo")
    plain, _, loader = parts()
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    number = 5 if torch.distributed.get_rank() else 2
    for epoch in range(3):
        with model.join():
            for batch in (each for each, _ in zip(loader, range(number))):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()""",
    "a search in which each model trains for one epoch, on the same order": """
    torch.distributed.init_process_group("gloo")
    data = parts()[2].dataset
    sampler = torch.utils.data.DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for rate in (0.1, 0.01, 0.001, 0.0001):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), rate)
        sampler.set_epoch(0)
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()""",
    "several models of one class": """
    torch.distributed.init_process_group("gloo")
    loader = parts()[2]
    models = [nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 1))) for _ in range(4)]
    both = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in models]
    for batch in loader:
        for model, optimizer in both:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()""",
    "weights averaged after steps with gradients of one rank and of all ranks": """
    torch.distributed.init_process_group("gloo")
    plain, optimizer, loader = parts()
    model = nn.parallel.DistributedDataParallel(plain)
    sampler = torch.utils.data.DistributedSampler(loader.dataset)
    for number, batch in enumerate(DataLoader(loader.dataset, 8, sampler=sampler)):
        with model.no_sync() if number % 3 < 2 else contextlib.nullcontext():
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.data)
                parameter.data /= 2""",
    "a metric of all ranks, and other numbers": ONE_SHARE
    + """
        accelerator.print(f"train loss: {losses[0]:.3f}, train_mse={losses[0]:.3f}, evaluated in {0.25} s")
        accelerator.log({"train/loss": losses[0], "lr": 0.5, "epoch": epoch})
        print(f"rank {accelerator.process_index}: loss {mean:.3f}, of its own share")
        accelerator.print(f"loss: {accelerator.reduce(mean, 'mean'):.3f}")
        accelerator.log({"eval_loss": mean})""",
    "labelled and unlabelled data, pairs of one data set, and pairs that one seed shuffles": """
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    data = TensorDataset(torch.randn(192, 4), torch.randn(192, 1))
    again = copy.copy(data)
    model, optimizer, *loaders = accelerator.prepare(
        *parts()[:2], *(DataLoader(each, 8, shuffle=True) for each in (data, again)))
    for (first, _), (_, second) in zip(*loaders):
        accelerator.backward(loss_of(model, (first, second)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator = Accelerator()
    fewer = DataLoader(TensorDataset(torch.randn(96, 4)), 8, shuffle=True)
    loaders = accelerator.prepare(*(DataLoader(data, 8, shuffle=True) for _ in range(2)), fewer)
    for others in (loaders[1:2], loaders[2:]):
        for batch, *_ in zip(loaders[0], *others):
            step(accelerator, model, optimizer, batch)
    for batch in DataLoader(again, 96, shuffle=True):
        for batch in loaders[0]:
            step(accelerator, model, optimizer, batch)""",
}


@pytest.mark.parametrize("loop", RIGHT)
def test_unusual_correct_loops_get_no_warning(shared: Kernel, loop: str) -> None:
    shared.run(SETUP)
    cell = shared.run(
        f"def train():{RIGHT[loop]}\n    return True\nnotebook_launcher(train, num_processes=2)"
    )
    assert cell.value is True
    assert "NBLAUNCH_CHECKS" not in cell.shown
    assert shared.run("nblaunch.last_job().hints()").value == []


@pytest.mark.alarms("zero_learning_rate")
def test_checks_can_be_silenced(fresh: Kernel) -> None:
    program = f"def train():{WRONG['zero_learning_rate']}\nnotebook_launcher(train, num_processes=2)"
    fresh.run(SETUP)
    for setting in ("-zero_learning_rate,-replicas_differ", "off"):
        fresh.run(f"os.environ['NBLAUNCH_CHECKS'] = {setting!r}")
        assert "NBLAUNCH_CHECKS" not in fresh.run(program).shown
    fresh.run("os.environ['NBLAUNCH_CHECKS'] = '-replicas_differ'")
    assert "NBLAUNCH_CHECKS=-zero_learning_rate" in fresh.run(program).shown

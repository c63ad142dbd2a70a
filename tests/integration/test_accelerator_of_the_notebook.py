"""Objects from a cell work in a worker: Accelerators, states, a Trainer, its arguments, event files."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

CELL = """
import torch
from torch.utils.data import DataLoader
from nblaunch import Accelerator, PartialState, notebook_launcher
accelerator = Accelerator(gradient_accumulation_steps=2)
state, gradients, partial = accelerator.state, accelerator.gradient_state, PartialState()
accelerator.even_batches = False
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

TRAIN = """
def train(*own):
    seen = [partial.process_index, accelerator.process_index, accelerator.num_processes]
    wrapped, updater = accelerator.prepare(model, optimizer)
    for _ in range(accelerator.gradient_accumulation_steps):
        accelerator.backward(wrapped(torch.full((1, 2), float(accelerator.process_index))).sum())
    gradient = model.weight.grad[0, 0].item()
    seen += [state.num_processes, gradients.num_steps, accelerator.even_batches, gradient]
    return [*seen, *(one.process_index for one in own)]
"""


@pytest.mark.parametrize("how", ["2", "2, start_method='forkserver'"])
def test_workers_rebuild_an_accelerator_and_its_states(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"{CELL}{TRAIN}\nranks = notebook_launcher(train, (accelerator, partial), num_processes={how}, return_all=True)"
        "\nranks, accelerator.process_index, partial.num_processes, accelerator.prepare(model) is model"
    )
    # The gradient is the mean of both ranks' inputs, so they train together.
    rows = [[rank, rank, 2, 2, 2, False, 0.5, rank, rank] for rank in (0, 1)]
    assert cell.value == (rows, 0, 1, True)


def test_inline_launches_use_a_separate_accelerator(shared: Kernel) -> None:
    cell = shared.run(
        f"""{CELL}
def train():
    accelerator.prepare(model)
    return len(accelerator._models)
print(notebook_launcher(train, engine="inline"), len(accelerator._models))
"""
    )
    assert cell.stdout.splitlines()[-1] == "1 0"


def test_inline_launches_release_prepared_objects(shared: Kernel) -> None:
    cell = shared.run(
        f"""{CELL}
import gc, weakref
def train():
    own = torch.nn.Linear(1, 1)
    accelerator.prepare(own)
    return weakref.ref(own)
made = notebook_launcher(train, engine="inline")
gc.collect()
made() is None
"""
    )
    assert cell.value is True


def test_loops_left_in_a_cell_end_with_it(shared: Kernel) -> None:
    in_loop = "Accelerator().gradient_state.in_dataloader"
    read = "batches = iter(accelerator.prepare(DataLoader([1, 2])))\nbatch = next(batches)"
    assert shared.run(f"{CELL}{read}\n{in_loop}").value is True
    assert shared.run(in_loop).value is False
    shared.run("del batches")


REGISTERED = """
import json, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
class Counter:
    count = 5
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]
counter, saved, loaded = Counter(), [], []
accelerator = Accelerator(log_with="jsonl", project_dir=folder)
accelerator.register_for_checkpointing(counter)
accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: saved.append(len(models)))
accelerator.register_load_state_pre_hook(lambda models, input_dir: loaded.append(len(models)))
accelerator.init_trackers("run", {"lr": 1})
def train():
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(folder / "checkpoint")
    counter.count = 0
    accelerator.load_state(folder / "checkpoint")
    accelerator.log({"loss": accelerator.process_index})
    found = [counter.count, saved, loaded, len(accelerator.trackers)]
    accelerator.end_training()
    return found
"""


@pytest.mark.parametrize("how", ["2", thorough("2, start_method='spawn'"), "engine='inline'"])
def test_objects_registered_in_a_cell_reach_workers(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"""{CELL}{REGISTERED}
ranks = notebook_launcher(train, (), {how}, return_all=True)
rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
found = ranks, [json.loads(row)["loss"] for row in rows], len(accelerator.trackers), accelerator._models
accelerator.end_training()
found
"""
    )
    of_main, of_other = [5, [1], [1], 1], [5, [1], [1], 0]
    assert cell.value == ([of_main] if "inline" in how else [of_main, of_other], [0], 1, [])


COLLECTIVES = """
import datetime, os, warnings
from nblaunch import InitProcessGroupKwargs
from nblaunch.utils import gather_object
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=9))])

def begin():
    return gather_object([int(os.environ["RANK"])])

def use(method, value):
    warnings.simplefilter("error")  # of a timeout that comes too late
    found = getattr(accelerator, method)(value + int(os.environ["RANK"]))
    return found.tolist(), accelerator.num_processes
"""

FIRST_USES = {"gather": [0.0, 1.0], "reduce": [1.0], "broadcast": [0.0], "pad_across_processes": None}


def test_a_collective_can_be_the_first_use_in_a_worker(shared: Kernel) -> None:
    shared.run(f"{CELL}{COLLECTIVES}")
    how = "num_processes=2, dashboard='none', return_all=True"
    assert shared.run(f"print(notebook_launcher(begin, (), {how}))").stdout == "[[0, 1], [0, 1]]\n"
    for method, found in FIRST_USES.items():
        cell = shared.run(f"print(notebook_launcher(use, ('{method}', torch.zeros(1)), {how}))")
        expected = [([float(rank)] if found is None else found, 2) for rank in (0, 1)]
        assert cell.stdout == f"{expected}\n", method


FIRST_LOOKS = """
from nblaunch.logging import get_logger
logger = get_logger("first")

def label(): return accelerator.distributed_type.value
def size(): return accelerator.state.num_processes
def plugin(): return accelerator.deepspeed_plugin
def shown(): return "Num processes: 2" in repr(accelerator)
def message(): return logger.warning("hello")
"""

LOOKS = {"label": "MULTI_CPU", "size": "2", "plugin": "None", "shown": "True", "message": "None"}


def test_a_state_or_logger_can_be_the_first_use_in_a_worker(shared: Kernel) -> None:
    shared.run(f"{CELL}{FIRST_LOOKS}")
    for look, found in LOOKS.items():
        cell = shared.run(f"print(notebook_launcher({look}, (), num_processes=2, dashboard='none'))")
        assert cell.stdout.splitlines()[-1] == found, look


USES = {
    "prepare": "accelerator.prepare(torch.nn.Linear(1, 1))",
    "backward": "accelerator.backward(model(torch.ones(1, 2)).sum())",
    "rank": "accelerator.process_index",
    "barrier": "accelerator.wait_for_everyone()",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_prepared_accelerator_is_rejected_at_its_line(shared: Kernel, use: str) -> None:
    prepared = f"{CELL}\naccelerator.prepare(model, optimizer)\ndef train():\n    return {use}\n"
    for how in ("num_processes=2", "engine='inline'"):
        cell = shared.run(f"{prepared}notebook_launcher(train, (), {how})", raises="RuntimeError")
        assert "has prepared objects in the notebook" in cell.raised.value
        assert use in cell.raised.text
    shared.run("accelerator.free_memory()")
    shared.run("notebook_launcher(train, (), 2)")


@pytest.mark.parametrize("kind", ["DataLoader", "optimizer", "scheduler"])
def test_objects_that_the_notebook_prepared_are_rejected(shared: Kernel, kind: str) -> None:
    shared.run(
        f"{CELL}\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "values = dict(zip(('DataLoader', 'optimizer', 'scheduler'), accelerator.prepare(\n"
        "    DataLoader(range(8)), optimizer, scheduler)))\n"
        "def train(value): return Accelerator().prepare(value) is value"
    )
    call = f"notebook_launcher(train, (values[{kind!r}],), num_processes="
    message = shared.run(f"{call}2)", raises="ValueError").raised.value
    assert "was prepared for 1 process" in message
    assert f"pass it the original {kind}" in message
    assert shared.run(f"{call}1)").result == "True"


# The default depends on the Python version.
@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_the_notebooks_accelerator_still_works(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""{CELL}
class Ranks:
    def __init__(self, accelerator): self.accelerator = accelerator
    def __len__(self): return 4
    def __getitem__(self, row): return self.accelerator.process_index
def train():
    accelerator = Accelerator()
    loader = DataLoader(Ranks(accelerator), batch_size=4, num_workers=1, multiprocessing_context="{method}")
    rows = [batch.tolist() for batch in loader]
    return accelerator.num_processes, rows
ranks = notebook_launcher(train, num_processes=2, return_all=True)
found = ranks, accelerator.num_processes, notebook_launcher(train, engine="inline"), accelerator.process_index
prepared = accelerator.prepare(model)
accelerator.backward(prepared(torch.ones(1, 2)).sum())
found
"""
    )
    assert cell.value == ([(2, [[rank] * 4]) for rank in (0, 1)], 1, (1, [[0] * 4]), 0)


def test_loader_processes_know_their_rank(shared: Kernel) -> None:
    """Only rank 1 has one, which would wait for others that never come if it joined."""
    cell = shared.run(
        """
import torch.distributed as dist
from torch.utils.data import DataLoader
from nblaunch import Accelerator, PartialState, notebook_launcher
class Places:
    def __init__(self, *objects): self.objects = objects
    def __len__(self): return 1
    def __getitem__(self, row):
        own = [one.process_index for one in (*self.objects, Accelerator(), PartialState())]
        return [*own, PartialState().num_processes, dist.is_initialized()]
def train():
    accelerator = Accelerator(mixed_precision="bf16")
    data = Places(accelerator, accelerator.state, PartialState())
    for _ in range(accelerator.process_index):
        found, = DataLoader(data, num_workers=1, collate_fn=list, multiprocessing_context="spawn")
        return found
notebook_launcher(train, num_processes=2, return_all=True)
""",
    )
    assert cell.value == [None, [[1] * 5 + [2, False]]]


THEIRS = """
import accelerate, torch
from nblaunch import notebook_launcher
accelerate.state.AcceleratorState._reset_state(True)
accelerate.state.GradientState._reset_state()
theirs = accelerate.Accelerator(cpu=True)
"""


THEIR_TRAIN = """
accelerate.state.AcceleratorState._reset_state(True)
accelerate.state.GradientState._reset_state()
theirs = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
partial, state, gradients = accelerate.PartialState(), theirs.state, theirs.gradient_state
model = torch.nn.Linear(2, 1)
def train(*own):
    seen = [partial.process_index, theirs.process_index, theirs.num_processes, state.mixed_precision]
    seen += [gradients.num_steps, theirs.gradient_accumulation_steps, gradients.sync_gradients]
    wrapped = theirs.prepare(model)
    wrapped(torch.full((1, 2), float(theirs.process_index))).sum().backward()
    return [*seen, model.weight.grad[0, 0].item(), *(one.process_index for one in own)]
"""


@pytest.mark.parametrize("how", ["2", "2, start_method='forkserver'", thorough("2, start_method='spawn'")])
def test_workers_rebuild_accelerates_objects(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"{THEIRS}{THEIR_TRAIN}\nranks = notebook_launcher(train, (theirs, partial), {how}, return_all=True)"
        "\nranks, theirs.process_index, partial.num_processes, theirs.prepare(model) is model"
    )
    rows = [[rank, rank, 2, "bf16", 2, 2, True, 0.5, rank, rank] for rank in (0, 1)]
    assert cell.value == (rows, 0, 1, True)


def test_a_prepared_accelerate_object_is_reported(shared: Kernel) -> None:
    cell = shared.run(
        f"""{THEIRS}
theirs.prepare(torch.nn.Linear(1, 1))
def train():
    return theirs.process_index
print(notebook_launcher(train, (), 2, return_all=True))
"""
    )
    assert "train uses theirs from the notebook, an accelerate.Accelerator that prepared" in cell.stdout
    cell = shared.run("import functools; notebook_launcher(functools.partial(print, theirs), (), 2)")
    assert "print uses argument 0 of the partial from the notebook, an accelerate.Accelerator" in cell.stdout
    for method in ("fork", "spawn"):
        cell = shared.run(
            f"notebook_launcher(print, (1, theirs), 2, start_method={method!r})", raises="ValueError"
        )
        assert "args[1] is an accelerate.Accelerator" in cell.raised.value
        assert "inside the function" in cell.raised.value
    shared.run("theirs.free_memory(); notebook_launcher(train, (theirs,)[:0], 2)")


TRAINER = """
import os, tempfile, torch
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
import transformers
from nblaunch import notebook_launcher
transformers.utils.logging.set_verbosity_error()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).pow(2).mean(), "logits": self.layer(x)}
rows = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
model = Model()
torch.nn.init.zeros_(model.layer.weight)
args = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=2, num_train_epochs=1, learning_rate=0.1, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=True, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0,
)
args._n_gpu = 2  # as on a machine with two GPUs, where one process would use both
trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows)
trainer._train_batch_size = 4
"""


@pytest.mark.parametrize("how", ["2", thorough("2, start_method='forkserver'")])
def test_workers_rebuild_a_trainer_and_its_arguments(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"""{TRAINER}
def train():
    seen = [args.process_index, args.world_size, args.n_gpu, args.train_batch_size]
    seen.append(trainer.accelerator.num_processes)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    return [*seen, trainer.state.global_step, round(loss, 4), trainer.model.layer.weight.item()]
ranks = notebook_launcher(train, (), {how}, return_all=True)
ranks, args.world_size, args.process_index, trainer.accelerator.num_processes
"""
    )
    (first, second), *in_cell = cell.value
    # Two ranks with batches of two take two steps over eight rows, and get the same weights.
    assert first[:6] == [0, 2, 0, 2, 2, 2]
    assert second[:6] == [1, 2, 0, 2, 2, 2]
    assert first[6:] == second[6:]
    assert in_cell == [1, 0, 1]


def test_accelerate_objects_created_inside_are_fine(shared: Kernel) -> None:
    cell = shared.run(
        f"""{THEIRS}
def train():
    theirs = accelerate.Accelerator(cpu=True)
    return theirs.num_processes
def inline():
    return theirs.num_processes
notebook_launcher(train, (), 2), notebook_launcher(inline, engine="inline")
"""
    )
    assert cell.value == (2, 1)
    assert "accelerate.Accelerator" not in cell.stdout
    failing = "def fail():\n    return torch.nosuch\nnotebook_launcher(fail, (), 2)"
    assert "Accelerator" not in shared.run(failing, raises="AttributeError").raised.text


WRITER = """
import os, tempfile
from nblaunch import notebook_launcher
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
folder = tempfile.mkdtemp()
writer = SummaryWriter(folder, filename_suffix=".v2")
writer.add_scalar("loss", 1.0, 0)
def log():
    for step in range(1, 31):
        writer.add_scalar("loss", 1 / step, step)
    return "done"
"""


def test_workers_rebuild_a_summary_writer(shared: Kernel) -> None:
    """Its queue has room for ten events, which a thread of the kernel removes."""
    cell = shared.run(
        f"""{WRITER}
value = notebook_launcher(log, num_processes=1, start_method="fork", hang_timeout_s=20, on_hang="stop")
writer.add_scalar("loss", 1 / 31, 31)
writer.close()
events = EventAccumulator(folder).Reload().Scalars("loss")
value, sorted(event.step for event in events), [name[-3:] for name in os.listdir(folder)]
"""
    )
    assert cell.value == ("done", list(range(32)), [".v2", ".v2"])

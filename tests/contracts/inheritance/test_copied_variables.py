"""Variables of which every rank has an independent copy: a line says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

CELL = """
import itertools, torch, nblaunch
numbers = (number for number in range(10)); next(numbers)
counter = itertools.count(5)
batches = iter(torch.utils.data.DataLoader(range(10))); next(batches)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run(CELL)
        yield kernel


def launch(
    kernel: Kernel, function: str, start_method: str, num_processes: int = 2, args: str = "()"
) -> list[str]:
    """Launch, keep the values of all ranks as ``value`` and return the warnings."""
    cell = kernel.run(
        f"{function}\n"
        f"value = nblaunch.notebook_launcher(function, {args}, num_processes={num_processes}, return_all=True,"
        f" start_method={start_method!r})"
    )
    return [line for line in cell.shown.splitlines() if line.startswith("warning: ")]


def names_in(note: str) -> list[str]:
    """Return the variables that are listed in a note about lost changes."""
    return re.split(", | and ", note.partition("changes ")[2].partition(" only in the workers")[0])


@contract("generators and iterators")
def test_each_rank_gets_a_copy_and_a_note_says_so(shared: Kernel, start_method: str) -> None:
    warnings = launch(shared, "def function(): return [next(counter) for _ in range(2)]", start_method)
    assert [line.partition(":")[2].partition(":")[0].strip() for line in warnings] == ["counter"]
    first = shared.run("next(counter)").value  # the kernel's variable has not advanced
    assert shared.run("value").value == [[first, first + 1]] * 2


@contract("generators and iterators")
def test_only_forks_copy_generators(shared: Kernel, start_method: str) -> None:
    function = "def function(): return [next(numbers) for _ in range(2)]"  # the name is in a comprehension
    if start_method == "fork":
        (warning,) = launch(shared, function, start_method)
        assert "numbers: each rank has a copy of this generator" in warning
        assert shared.run("value").value == [[1, 2], [1, 2]]
        return
    launch_it = f"nblaunch.notebook_launcher(function, num_processes=2, start_method={start_method!r})"
    error = shared.run(f"{function}\n{launch_it}", raises="PayloadError").raised
    assert "numbers (TypeError: cannot pickle 'generator' object)" in error.value


def test_copied_iterators_are_named_on_several_ranks(shared: Kernel) -> None:
    assert "batches: " in "".join(launch(shared, "def function(): return int(next(batches))", "fork"))
    listed = "items = iter([1, 2, 3])\ndef function(): return next(items)"
    assert "items: " in "".join(launch(shared, listed, "fork"))
    assert "args[0]: " in "".join(launch(shared, "def function(own): pass", "fork", args="(numbers,)"))
    assert not launch(shared, "def function(): return next(counter)", "fork", num_processes=1)
    assert not launch(shared, "ended = (1 for _ in ()); list(ended)\ndef function(): list(ended)", "fork")


def test_iterators_in_user_objects_are_named(shared: Kernel) -> None:
    shared.run(
        "class Source:\n"
        "    def __init__(self): self.rows, self.ids = (row for row in range(9)), itertools.count()\n"
        "source = Source()\n"
        "next(source.rows)"
    )
    (warning,) = launch(shared, "def function(): return next(source.rows), next(source.ids)", "fork")
    assert "source.rows: each rank has a copy of this generator" in warning
    assert shared.run("value").value == [(1, 0), (1, 0)]


def test_c_compressors_are_named(shared: Kernel, tmp_path: Path) -> None:
    shared.run(
        "import zstandard\n"
        f"file = zstandard.open({str(tmp_path / 'file')!r}, 'wb')\n"
        f"text = zstandard.open({str(tmp_path / 'text')!r}, 'wt')"
    )
    warnings = launch(shared, "def function(): file.closed, text.closed", "fork")
    assert sum("compresses into a file" in line for line in warnings) == 2
    shared.run("file.close(); text.close()")


@contract("memory maps")
def test_writable_maps_are_shared_only_with_forks(shared: Kernel, tmp_path: Path, start_method: str) -> None:
    shared.run(
        f"import numpy; path = {str(tmp_path / 'map')!r}; mapped = numpy.memmap(path, 'i8', 'w+', shape=4)"
    )
    warnings = launch(shared, "def function(): mapped[:] = 7", start_method)
    written = shared.run("numpy.fromfile(path, 'i8').tolist()").value
    if start_method == "fork":
        assert not warnings
        assert written == [7] * 4
    else:
        assert f"mapped maps {tmp_path / 'map'} for writing" in "".join(warnings)
        assert written == [0] * 4


COLLECTORS = """
import collections, dataclasses, math, torch, types, numpy
losses, history, counts, best, total = [], {"loss": []}, collections.Counter(), 0.0, torch.zeros(4)
table, cache, of_rank, returned, untouched, options = numpy.zeros(4), {}, 0, [], [], {"lr": 0.1}

class Tracker:
    def __init__(self):
        self.values, self.best, self.step, self.rank, self.num_samples, self.worst = [], None, 0, 0, 4000, math.inf
    def add(self, value):
        self.values.append(value); self.best = value; self.step = self.rank = 1
        self.num_samples += 8; self.worst = torch.tensor(value)

class Average:
    def __init__(self, value): self.weights, self.fixed = [torch.full((4,), value)], torch.ones(4)
    def update(self): self.weights[0].mul_(0.5)

class Trainer:
    def __init__(self): self.average, self.epochs, self.noise = Average(2.0), [1, 2], torch.ones(2)

class Shadow:
    def __init__(self): self.weights = {"weight": torch.ones(2)}
    def update(self): self.weights["weight"] = self.weights["weight"] * 0.5

class Samples(torch.utils.data.Dataset):
    def __init__(self): self.loaded = {}
    def __getitem__(self, i): return self.loaded.setdefault(i, torch.ones(1))

class Timer:
    def __init__(self): self.start_time, self.total = None, 0.0
    def stop(self): self.start_time, self.total = 12.5, 1.5

class Batches:
    def __init__(self): self.position, self.epoch = 0, 0
    def __iter__(self): self.position = 0; self.epoch += 1; return self
    def __next__(self):
        if self.position == 2: raise StopIteration
        self.position += 1
        return self.position

@dataclasses.dataclass
class Result: tracker: Tracker; inner: dict

tracker, trainer, weight, data = Tracker(), Trainer(), torch.nn.Parameter(torch.ones(2)), torch.ones(2)
others = types.SimpleNamespace(shadow=[torch.ones(2)], unused=torch.full((2,), math.nan))
shadow, samples, timer, its_tracker = Shadow(), Samples(), Timer(), Tracker()
inner, state, cell = [], {"best": math.inf}, [0.0]
batches = Batches()
best_state = best_row = None

def record(value):
    global best, best_state, best_row
    best_state, best_row = torch.nn.Linear(1, 1).state_dict(), torch.ones(2)
    shadow.update(); samples[0]; timer.stop(); its_tracker.add(value * 2); inner.append(value * 3)
    state["best"] = cell[0] = value
    losses.append(value); history["loss"].append(value); counts["steps"] += 1; tracker.add(value)
    total[0] = table[0] = best = value
    sum(batches)
    trainer.average.update(); trainer.epochs.append(3); others.shadow[0].data.mul_(2); data.div_(2)
    with torch.no_grad(): weight.sub_(1)

def function(out):
    global _step
    _step = 1
    record(0.5); out.append(1); cache["key"] = 1; returned.append(1); options["lr"] = 0.2
    return {"returned": returned, "result": Result(its_tracker, {"inner": [inner]})}
"""


@contract("variables of the notebook")
def test_variables_that_the_function_fills_are_named(shared: Kernel, start_method: str) -> None:
    cell = shared.run(
        f"{COLLECTORS}\nnblaunch.notebook_launcher(function, ([],), num_processes=2, start_method={start_method!r})"
    )
    (note,) = {
        line for line in cell.shown.splitlines() if "the notebook's variables keep their values" in line
    }
    named = names_in(note)
    assert set(named) == {
        "losses",
        "history",
        "counts",
        "tracker.values",
        "tracker.best",
        "tracker.num_samples",
        "tracker.worst",
        "trainer.average.weights",
        "trainer.epochs",
        "others.shadow",
        "weight",
        "total",
        "table",
        "args[0]",
        "best",
        "best_state",
        "best_row",
        "shadow.weights",
        "timer.total",
        "state",
        "cell",
    }
    assert shared.run("losses").value == []
    cell = shared.run(
        f"nblaunch.notebook_launcher(len, ('ab',), num_processes=2, start_method={start_method!r})"
    )
    assert "keep their values" not in cell.shown


HELD = """
import argparse, dataclasses, math, numpy, pandas, torch, torchmetrics, nblaunch
from torch.optim.swa_utils import AveragedModel

predictions, large, minus = numpy.full(9, math.nan), numpy.zeros((300_000, 2)), torch.full((3,), -1)
table = pandas.DataFrame({"y": [1.0, 2.0], "prediction": math.nan})
data, constant, rows, other_table = numpy.arange(9.0), numpy.ones(3), [None] * 2, pandas.DataFrame({"a": [1, 1]})

class CFG: best_score, history, lr, num_ranks, name = 0.0, [], 0.1, 1, "a"

@dataclasses.dataclass(slots=True)
class Slots: history: list; best: float = 0.0; lr: float = 0.1

class Stopping:
    history = []
    def __init__(self):
        self.state = self.loader = self.params = None
        self.best_loss, self.values, self.counter, self.order = 999, numpy.zeros(0), 0, [1, 2]
    def step(self):
        self.state, self.loader, self.best_loss, self.counter = {"weight": torch.ones(1)}, object(), 0.5, 1
        self.values, self.order = numpy.concatenate([self.values, [0.5]]), [2, 1]
        self.params = {"p": 0.5}
        self.history.append(1)

class Net(torch.nn.Linear):
    def __init__(self): super().__init__(2, 1); self.losses, self.last, self.best = [], None, 0.0

slots, stopping, options, activations = Slots([]), Stopping(), argparse.Namespace(best=None, lr=0.1), {}
net, metric, unchanged = Net(), torchmetrics.MeanMetric(), torch.nn.Linear(2, 1)
average, statistics, its_weight = AveragedModel(net), torch.nn.BatchNorm1d(2), net.weight
net.register_forward_hook(lambda module, inputs, output: activations.__setitem__("net", output.detach()))

def launch_with_closure(start_method):
    best, count, kept = 0.0, 0, None
    def function(model):
        def inner():
            nonlocal kept
            global best_of_all
            kept, best_of_all = [1], 0.5
        nonlocal best, count
        best = 0.5; count += 1; inner()
        predictions[:3] = 1; large[5] = 1; minus[0] = 3; table.loc[1, "prediction"] = 0.5; rows[1] = 1
        CFG.best_score = 0.5; CFG.lr = 0.2; CFG.num_ranks = 2; CFG.history.append(1)
        slots.history.append(1); slots.best = 0.5; slots.lr = 0.2; stopping.step()
        options.best = 0.5; options.lr = 0.2
        model(torch.ones(2, 2)); model.losses.append(1); model.last = torch.ones(1); model.best = 0.5
        with torch.no_grad(): model.weight.add_(1)
        average.update_parameters(model); metric.update(1.0)
        statistics(unchanged.weight + torch.randn(2, 2)); its_weight.sum()
        data.sum(), constant.sum(), other_table["a"].sum()
    nblaunch.notebook_launcher(function, (net,), num_processes=2, start_method=start_method)
"""


@contract("variables of the notebook")
def test_results_kept_in_any_kind_of_variable_are_named(shared: Kernel, start_method: str) -> None:
    shown = shared.run(f"{HELD}\nlaunch_with_closure({start_method!r})").shown
    (note,) = {line for line in shown.splitlines() if "the notebook's variables keep their values" in line}
    assert set(names_in(note)) == {
        "predictions",
        "large",
        "minus",
        "table",
        "rows",
        "CFG.best_score",
        "CFG.history",
        "slots.history",
        "slots.best",
        "stopping.history",
        "stopping.state",
        "stopping.best_loss",
        "stopping.values",
        "options.best",
        "args[0].losses",
        "args[0].best",
        "activations",
        "metric",
        "best_of_all",
        "best",
        "count",
        "kept",
    }
    (note,) = {line for line in shown.splitlines() if "only modules in args come back" in line}
    assert note.partition("changes ")[2].partition(" only in the workers")[0] == (
        "average (AveragedModel) and statistics (BatchNorm1d)"
    )


RECORDS = """
history, best, plan = [], 0.0, {"lr": 0.1}
_handled = []

class Scores:
    best, values = 0.0, []

    def add(self, value):
        self.values.append(value); type(self).best = value; self.losses = [value]

scores = Scores()

def add(value):
    global best
    history.append(value); scores.add(value); plan["lr"] = value; _handled.append(value)
    best = value
"""

PLACES = """
import functools, numpy, records, sklearn.linear_model, sklearn.pipeline, sklearn.preprocessing, torch
from records import Scores
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models

class Meter:
    def __init__(self): self.total = 0.0
    def add(self, value): self.total += value; self.history = [value]

class Once:
    @functools.cached_property
    def history(self): return [1]
    def set_up(self): self.files, self.lr, self.steps = ["a"], 0.1, 3; return self.history

def memo(function):
    values = {}
    def call(value): return values.setdefault(value, function(value))
    return call

@memo
def square(value): return value * value

def log(value):
    log.values = [value]; log.counts.append(value); log.cache = {1: 2}

rows, features = numpy.arange(8.0).reshape(4, 2), numpy.array([0, 1, 0, 1])
log.counts, folds, nested, meters = [], [[], []], {"train": {"loss": []}}, {"loss": Meter()}
scaler, fitted = sklearn.preprocessing.StandardScaler(), sklearn.linear_model.SGDClassifier().fit(rows, features)
pipe = sklearn.pipeline.make_pipeline(sklearn.preprocessing.MinMaxScaler(), sklearn.linear_model.Ridge())
online = sklearn.linear_model.SGDClassifier().partial_fit(rows, features, classes=[0, 1])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
model, once = torch.nn.Linear(1, 1), Once()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

def function(model):
    records.add(0.5); records.latest_loss = 0.5; log(1); square(2); once.set_up(); Scores.lr = 0.1
    folds[1].append(1); nested["train"]["loss"].append(1); meters["loss"].add(0.5)
    scaler.fit(rows); pipe.fit(rows, features); fitted.predict(rows); fitted.score(rows, features)
    online.partial_fit(rows, features); tokenizer.add_tokens(["b"])
    model(torch.ones(1, 1)).sum().backward(); optimizer.step()
"""


COUNTERS = """
import types
class Counted:
    n, shown = 0, 0
    def step(self): type(self).n += 1
class Slots:
    __slots__ = "n", "score", "losses"
    def __init__(self): self.n, self.losses = 0, []
counted, slots, returned, space, total, num = Counted(), Slots(), Slots(), types.SimpleNamespace(n=0, best=None), 0, 0
def function():
    global total, num
    counted.step(); Counted.shown += 1; slots.n += 1; slots.score = 0.5
    space.n += 1; space.best = 0.5; total += 1; num += 1
    returned.n += 1; returned.losses.append(1)
    return 1, num, returned, print(Counted.shown)
"""


def test_each_counter_is_named_once_even_if_an_equal_number_is_returned(shared: Kernel) -> None:
    shown = shared.run(f"{COUNTERS}\nnblaunch.notebook_launcher(function, num_processes=1)").shown
    (note,) = {line for line in shown.splitlines() if "the notebook's variables keep their values" in line}
    names = names_in(note)
    assert sorted(names) == ["Counted.n", "slots.n", "slots.score", "space.best", "space.n", "total"]


def test_results_kept_in_functions_modules_and_libraries_objects_are_named(tmp_path: Path) -> None:
    (tmp_path / "records.py").write_text(RECORDS)
    with Kernel.start(cwd=tmp_path) as kernel:
        kernel.run(f"import nblaunch\n{PLACES}")
        shown = kernel.run("nblaunch.notebook_launcher(function, (model,), num_processes=2)").shown
    (note,) = {line for line in shown.splitlines() if "the notebook's variables keep their values" in line}
    assert set(names_in(note)) == {
        "records.history",
        "records.best",
        "Scores.values",
        "Scores.best",
        "records.scores.losses",
        "records.latest_loss",
        "log.values",
        "log.counts",
        "folds",
        "nested",
        "meters['loss'].total",
        "meters['loss'].history",
        "scaler (StandardScaler)",
        "pipe (Pipeline)",
        "online (SGDClassifier)",
        "tokenizer (TokenizersBackend)",
    }
    (note,) = {line for line in shown.splitlines() if "keep their old states" in line}
    assert "optimizer (SGD)" in note
    assert "pass it in args" in note


@contract("variables of the notebook")
def test_modules_that_replace_others_are_named(shared: Kernel, start_method: str) -> None:
    shared.run(
        "import torch\n"
        "def function(models, pair):\n"
        "    models['a'], pair[0] = torch.nn.Linear(1, 2), torch.nn.Sequential(pair[0])\n"
        "    models['b'] = torch.nn.Linear(1, 1)  # its weights come back\n"
        "models, pair = {name: torch.nn.Linear(1, 1) for name in 'ab'}, [torch.nn.Linear(1, 1)]"
    )
    call = f"nblaunch.notebook_launcher(function, (models, pair), num_processes=2, start_method={start_method!r})"
    (line,) = {line for line in shared.run(call).shown.splitlines() if "other modules" in line}
    assert line.startswith("nblaunch: the function replaces args[0]['a'] (Linear) with other modules")


UNUSUAL = """
import torch, warnings

class Broken(list):
    def __len__(self): raise RuntimeError("no length")

class Unread(dict):
    def values(self): raise RuntimeError("no values")

class Holder: pass

class Gone:
    @property
    def __class__(self): raise RuntimeError("no object")

class Unlisted:
    def __reduce__(self): return Unlisted, ()
    @property
    def __dict__(self): raise RuntimeError("no attributes")

warnings.simplefilter("ignore")
graph, rows = torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse_csr()
broken, unread, holder = Broken(), Unread(a=1), Holder()
holder.graph, unlisted = graph, Unlisted()
with torch.inference_mode():
    samples = torch.utils.data.TensorDataset(torch.zeros(3), torch.eye(3).to_sparse())

def function(given):
    return len([graph, rows, broken, unread, holder, given, unlisted, samples])
"""


@contract("variables of the notebook")
def test_variables_that_can_not_be_examined_are_harmless(shared: Kernel, start_method: str) -> None:
    shared.run(UNUSUAL)
    if start_method == "fork":  # no other start method can send such a proxy
        shared.run("holder.gone = Gone()")
    for given in ("graph", "unlisted"):
        launch = f"nblaunch.notebook_launcher(function, ({given},), num_processes=2, start_method={start_method!r})"
        assert shared.run(f"result = {launch}\nresult").value == 8

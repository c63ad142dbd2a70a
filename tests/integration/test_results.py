"""Results: values, tensors, trained weights, and as much as possible if a part can't come back."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

PARTLY = """
import threading
def train(model):
    with torch.no_grad():
        model.weight.fill_(7.0)
    return {"accuracy": 0.9, "tensor": torch.arange(3), "deep": [1, {"lock": threading.Lock()}], "pair": (2, 3)}
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_values_come_back_by_rank(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
def train(scale):
    rank = int(os.environ["RANK"])
    return {{"rank": rank, "value": rank * scale, "none": None}} if rank != 1 else None
one = notebook_launcher(train, (2.5,), 3, start_method={method!r})
job = nblaunch.last_job()
every = notebook_launcher(train, (2.5,), 3, start_method={method!r}, return_all=True)
one, job.results(), every, job.result()
"""
    )
    zero, two = {"rank": 0, "value": 0.0, "none": None}, {"rank": 2, "value": 5.0, "none": None}
    assert cell.value == (zero, [zero, None, None], [zero, None, two], zero)


LEAVES_BEHIND = """
class Learner:
    def __init__(self):
        self.model, self.cache = nn.Linear(2, 1), nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
    def __getstate__(self):
        return {"model": self.model}
def train(learner):
    with torch.no_grad():
        learner.model.weight.fill_(7.0)
    return hasattr(learner, "cache")
learner = Learner()
"""


@pytest.mark.parametrize(
    "launch",
    [
        "notebook_launcher(train, (learner,), 2, start_method='forkserver', sync_optimizers=True)",
        thorough("notebook_launcher(train, (learner,), 2, start_method='spawn')"),
        "session.run(train, (learner,))",
    ],
)
def test_state_dropped_by_pickling_is_named(shared: Kernel, launch: str) -> None:
    shared.run(LEAVES_BEHIND)
    cell = shared.run(
        f"with nblaunch.Session(2) as session: result = {launch}\nresult, learner.model.weight.tolist()"
        if launch.startswith("session")
        else f"{launch}, learner.model.weight.tolist()"
    )
    assert cell.value == (False, [[7.0, 7.0]])
    shown = " ".join(cell.shown.split())
    assert "args[0].cache (Linear) could not be copied back" in shown
    assert ("args[0].optimizer (SGD) was not copied back" in shown) == ("sync_optimizers" in launch)


@pytest.mark.parametrize(("leaving", "call"), [("one", "sys.exit(0)"), ("all", "exit()")])
def test_a_rank_that_exits_among_returns_is_named(shared: Kernel, leaving: str, call: str) -> None:
    cell = shared.run(
        f"""
def train():
    rank = int(os.environ["RANK"])
    if rank == 1 or {leaving!r} == "all":
        {call}
    return rank
notebook_launcher(train, num_processes=3, return_all=True)
"""
    )
    assert cell.value == ([0, None, 2] if leaving == "one" else [None] * 3)
    shown = " ".join(cell.shown.split())
    assert ("rank 1 called sys.exit(0)" in shown) == (leaving == "one")
    assert ("called sys.exit" in shown) == (leaving == "one")


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_every_kind_of_tensor_arrives_unchanged(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import numpy as np
def make():
    torch.manual_seed(1)
    base = torch.randn(1000, 50)
    linear = nn.Linear(3, 3)
    tensors = {{str(dtype): (torch.arange(2000) % 100).to(dtype) for dtype in (
        torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64,
        torch.float8_e4m3fn)}}
    tensors["bool"] = base > 0
    tensors |= {{"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "column": base[:, 3], "transposed": base.T,
        "strided": base[::7, ::3], "expanded": torch.ones(1, 4).expand(5, 4),
        "conj": torch.ones(3, dtype=torch.cfloat).conj(),
        "parameter": linear.weight, "leaf": torch.ones(2, requires_grad=True),
        "result": linear(torch.ones(1, 3)).detach(), "sparse": torch.eye(3).to_sparse(), "small": torch.zeros(1),
        "frozen": nn.Parameter(torch.ones(2), False)}}
    tensors["same"] = tensors["scalar"]
    arrays = {{"large": np.arange(5000.0), "fortran": np.asfortranarray(np.ones((40, 50))),
              "text": np.array(["a", "bc"]), "objects": np.array([1, "x"], dtype=object), "bytes": b"z" * 9999,
              "mutable": bytearray(b"y" * 9999)}}
    return tensors, arrays
(tensors, arrays), (own, own_arrays) = notebook_launcher(make, num_processes=2, start_method={method!r}), make()
problems = []
for name, mine in own.items():
    other = tensors[name]
    same = torch.equal(other.to_dense().float() if "float8" in name or name == "sparse" else other,
                       mine.to_dense().float() if "float8" in name or name == "sparse" else mine)
    if not same or (other.dtype, other.shape, type(other), other.requires_grad) != (
            mine.dtype, mine.shape, type(mine), mine.requires_grad):
        problems.append((name, other))
for name, mine in own_arrays.items():
    if type(arrays[name]) is not type(mine) or not np.array_equal(arrays[name], mine):
        problems.append((name, arrays[name]))
tensors["bool"].logical_not_(); tensors["strided"].add_(1); arrays["large"] += 1; arrays["mutable"] += b"!"  # writable
with torch.no_grad():
    tensors["parameter"].zero_()
problems, tensors["same"] is tensors["scalar"], arrays["large"][0]
"""
    )
    assert cell.result in ("([], True, 1.0)", "([], True, np.float64(1.0))")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_cell_classes_come_back_as_themselves(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import dataclasses, enum
@dataclasses.dataclass
class Report:
    losses: list
class Mood(enum.Enum):
    GOOD = 1
def helper(x):
    return x + 1
def train():
    return Report([0.5]), Mood.GOOD, helper, Report
value, mood, function, cls = notebook_launcher(train, (), 2, start_method={method!r})
isinstance(value, Report), value == Report([0.5]), mood is Mood.GOOD, cls is Report, function(1)
"""
    )
    assert cell.value == (True, True, True, True, 2)


def test_a_prepared_model_comes_back_without_its_wrapper(shared: Kernel) -> None:
    """``DistributedDataParallel`` can't be rebuilt without a process group."""
    cell = shared.run(
        """
def train():
    accelerator = nblaunch.Accelerator(mixed_precision="bf16")
    return {"accuracy": 0.5, "model": accelerator.prepare(nn.Linear(2, 1))}
result = notebook_launcher(train, num_processes=2)
result["accuracy"], type(result["model"]).__name__, tuple(result["model"](torch.ones(3, 2)).shape)
"""
    )
    assert cell.value == (0.5, "Linear", (3, 1))


ESTIMATORS = """
class Estimator:
    "Creates its module anew in each fit, like those of skorch and TabNet."
    def fit(self, value, width=1):
        self.module = nn.Linear(2, width)
        nn.init.constant_(self.module.weight, value)
        return self
    def wrap(self):
        self.wrapped = nn.Sequential(self.module)
fitted, unfitted, wider, wrapped = Estimator().fit(1.0), Estimator(), Estimator().fit(1.0), Estimator().fit(1.0)
"""


def test_the_module_of_an_estimator_that_is_fitted_again_comes_back(shared: Kernel) -> None:
    shared.run(ESTIMATORS)
    cell = shared.run(
        """
def train(fitted, unfitted, wider, wrapped):
    fitted.fit(3.0)
    unfitted.fit(3.0)
    wider.fit(3.0, width=2)
    wrapped.wrap()
notebook_launcher(train, (fitted, unfitted, wider, wrapped), 2)
fitted.module.weight.tolist(), wider.module.weight.tolist()
"""
    )
    assert cell.value == ([[3.0, 3.0]], [[1.0, 1.0]])
    assert "changes args[1].module only in the workers" in cell.stdout
    assert "replaces args[2].module (Linear) with other modules" in cell.stdout
    assert "trained weights into args[0].module" in cell.stdout


def test_a_new_module_of_a_global_object_is_named_unless_it_is_returned(shared: Kernel) -> None:
    shared.run(ESTIMATORS)
    program = "def train():\n    fitted.fit(3.0){}\nnotebook_launcher(train, num_processes=2)"
    assert "changes fitted.module only in the workers" in shared.run(program.format("")).stdout
    returned = shared.run(program.format("; return fitted"))
    assert "only in the workers" not in returned.stdout


def test_a_large_state_dict_comes_back_without_many_copies(shared: Kernel) -> None:
    cell = shared.run(
        """
import psutil, resource, gc
def peak_kb():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
def reset_peak():
    open("/proc/self/clear_refs", "w").write("5")
def train():
    state = {f"layer {i}": torch.full((1 << 20,), float(i)) for i in range(75)}     # 300 MB
    reset_peak()
    worker_now = psutil.Process().memory_info().rss
    import atexit
    atexit.register(lambda: print("grew by", peak_kb() // 1024 - worker_now // (1 << 20)))
    return state
gc.collect(); reset_peak()
before = psutil.Process().memory_info().rss
state = notebook_launcher(train, num_processes=1)
mapped = peak_kb() // 1024 - before // (1 << 20)
total = sum(tensor.sum().item() for tensor in state.values())
touched = peak_kb() // 1024 - before // (1 << 20)
del state
mapped, touched, total == sum(range(75)) * (1 << 20)
"""
    )
    mapped, touched, is_right = cell.value
    assert is_right
    # Nothing is read before its first use; the pages then belong to the file that the worker wrote.
    assert mapped < 60
    assert touched < 380
    grown = int(next(line for line in cell.stdout.splitlines() if line.startswith("grew by")).split()[-1])
    assert grown < 60
    # The file is freed with the last of its tensors.
    cell = shared.run(
        """
def held():
    sizes = (line.split()[0].split("-") for line in open("/proc/self/maps") if "nblaunch-outbox" in line)
    return sum(int(end, 16) - int(begin, 16) for begin, end in sizes) >= 300 << 20
state = nblaunch.last_job().result()
with_job = held()
notebook_launcher(print, num_processes=1)
with_tensors = held()
one = state.pop("layer 3"); del state; gc.collect()
with_one = held()
del one
with_job, with_tensors, with_one, held()
"""
    )
    assert cell.result == "(True, True, True, False)"


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_the_rest_of_an_unpicklable_result_is_kept(shared: Kernel, method: str) -> None:
    shared.run(PARTLY)
    cell = shared.run(
        f"model = nn.Linear(2, 2)\nnotebook_launcher(train, (model,), 2, start_method={method!r})",
        raises="ResultError",
    )
    assert "result['deep'][1]['lock']" in cell.raised.value
    assert "lock" in cell.raised.value
    assert ".partial" in cell.raised.value
    cell = shared.run(
        """
partial = nblaunch.last_job().exception().partial
missing = partial["deep"][1].pop("lock")
partial["tensor"] = partial["tensor"].tolist()
partial, type(missing).__name__, "lock" in missing.description, model.weight.unique().tolist()
"""
    )
    partial = {"accuracy": 0.9, "tensor": [0, 1, 2], "deep": [1, {}], "pair": (2, 3)}
    assert cell.value == (partial, "Unpicklable", True, [7.0])


def test_an_unpicklable_result_of_another_rank_is_named_too(shared: Kernel) -> None:
    cell = shared.run(
        """
import threading
def train():
    return [threading.Lock()] if os.environ["RANK"] == "1" else "fine"
notebook_launcher(train, num_processes=2, return_all=True)
""",
        raises="ResultError",
    )
    assert "rank 1" in cell.raised.value
    assert "result[0]" in cell.raised.value
    assert shared.run("nblaunch.last_job().exception().partial[0].why").result is not None
    # If rank 1's value was not requested, its error does not matter.
    assert shared.run("notebook_launcher(train, num_processes=2)").result == "'fine'"


def test_an_unloadable_result_keeps_the_rest(shared: Kernel) -> None:
    cell = shared.run(
        """
class Moody:
    def __reduce__(self):
        return reject, (os.getpid(),)
def reject(pid):
    if pid != os.getpid():
        raise OSError("not in this process")
    return Moody()
def train(model):
    with torch.no_grad():
        model.weight.fill_(3.0)
    return {"good": 1, "bad": Moody()}
model = nn.Linear(2, 2)
notebook_launcher(train, (model,), 2)
""",
        raises="ResultError",
    )
    assert "not in this process" in cell.raised.value
    assert shared.run("model.weight.unique().tolist()").result == "[3.0]"


TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        return self.head(self.norm(self.embed(x)))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_trained_weights_are_loaded_back(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
{TIED}def train(model, other, steps):
    accelerator = nblaunch.Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    prepared.train()
    for _ in range(steps):
        loss = prepared(torch.arange(5)).logsumexp(-1).mean()
        accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
    model.eval()
    return {{name: tensor.clone() for name, tensor in model.state_dict().items()}}
torch.manual_seed(0)
model, other = Tied(), nn.Linear(2, 2).bfloat16()
weight, before = model.embed.weight, model.embed.weight.clone()
state = notebook_launcher(train, (model, other, 3), 2, start_method={method!r})
same = all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
(same, torch.equal(before, model.embed.weight), model.embed.weight is weight, model.head.weight is weight,
 model.norm.num_batches_tracked.item(), weight.requires_grad, model.training)
"""
    )
    assert cell.value == (True, False, True, True, 3, True, True)
    notes = [line for line in cell.stdout.splitlines() if "weights" in line]
    assert len(notes) == 2, cell.stdout  # one line for each module
    assert "copied trained weights into args[0] (Tied)" in notes[0]
    assert "warning" not in cell.displays[0].data["text/plain"]
    cell = shared.run(
        f"""
kept = {{name: tensor.clone() for name, tensor in model.state_dict().items()}}
notebook_launcher(train, (model, other, 1), 2, start_method={method!r}, sync_weights=False)
all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in kept.items()), nblaunch.last_job().weights()
"""
    )
    assert cell.result == "(True, {})"
    assert "weights" not in cell.stdout


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_weights_inside_containers_are_loaded_back(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
from dataclasses import dataclass
@dataclass
class Setup:
    teacher: nn.Module
    name: str
def train(models, setup, encoder):
    for number, model in enumerate((models["pair"][0], models["pair"][1], setup.teacher, models["whole"]), 1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(float(number))
    assert models["whole"][0] is encoder
    models["pair"][0] = None  # what stands there now is not what was passed
    return "done"
encoder = nn.Linear(2, 2)
models = {{"pair": [nn.Linear(2, 2), nn.Linear(2, 2)], "whole": nn.Sequential(encoder, nn.Linear(2, 2))}}
models["again"] = models["pair"][0]
setup = Setup(nn.Linear(2, 2), "x")
kept = encoder.weight
value = notebook_launcher(train, (models, setup, encoder), 2, start_method={method!r})
(value, [model.weight.unique().tolist() for model in (*models["pair"], setup.teacher, encoder)],
 encoder.weight is kept, models["again"] is models["pair"][0], nblaunch.last_job().weights())
"""
    )
    assert cell.value == ("done", [[1.0], [2.0], [3.0], [4.0]], True, True, {})
    (note,) = [line for line in cell.stdout.splitlines() if "trained weights" in line]
    assert "args[0]['pair'][1] (Linear), args[0]['whole'] (Sequential) and 1 more: " in note


def test_kept_result_holds_no_descriptors_or_weights(shared: Kernel) -> None:
    """A sweep collects its losses: each keeps a few bytes, not a model or an open file."""
    cell = shared.run(
        """
def held():
    files = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
    return sum("nblaunch-outbox" in name for name in [*files, *open("/proc/self/maps")])
def train(model):
    return {"loss": torch.tensor(0.5), "predictions": torch.ones(1 << 20)}
import gc
gc.collect()
model, before = nn.Linear(2000, 2000), held()
kept = [notebook_launcher(train, (model,), 2) for _ in range(3)]
kept += notebook_launcher(train, (model,), 2, return_all=True)
gc.collect()
[result["loss"].item() + result["predictions"].sum().item() for result in kept], held() - before
"""
    )
    assert cell.value == ([(1 << 20) + 0.5] * 5, 0)


def test_weights_that_no_longer_fit_are_kept_whole_and_named(shared: Kernel) -> None:
    """This includes weights that were not sent because they have not changed."""
    cell = shared.run(
        """
def train(model):
    model.head = nn.Linear(4, 9)
    with torch.no_grad():
        model.body.weight.fill_(2.0)
    return "trained"
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
model = Net()
before = model.body.weight.clone()
value = notebook_launcher(train, (model,), 2)
weights = nblaunch.last_job().weights()[0]
is_untouched, is_whole = torch.equal(before, model.body.weight), torch.equal(weights["left.weight"], model.left.weight)
(value, sorted(weights), tuple(weights["head.weight"].shape), weights["body.weight"].unique().tolist(), is_untouched,
 is_whole)
"""
    )
    names = [f"{part}.{kind}" for part in ("body", "head", "left") for kind in ("bias", "weight")]
    assert cell.value == ("trained", names, (9, 4), [2.0], True, True)
    (line,) = [line for line in cell.stdout.splitlines() if "weights" in line]
    assert "args[0] (Net)" in line
    assert "head.weight" in line
    assert "weights()[0]" in line


def test_unpicklable_state_keeps_the_result(shared: Kernel) -> None:
    cell = shared.run(
        """
import threading
class Odd(nn.Linear):
    def get_extra_state(self):
        return threading.Lock()
    def set_extra_state(self, state):
        pass
def train(model, plain):
    with torch.no_grad():
        model.weight.fill_(4.0); plain.weight.fill_(5.0)
    return 42
model, plain = Odd(2, 2), nn.Linear(2, 2)
value = notebook_launcher(train, (model, plain), 2)
value, model.weight.unique().tolist(), plain.weight.unique().tolist()
"""
    )
    value, _, plain = cell.value
    assert (value, plain) == (42, [5.0])
    assert "args[0]" in cell.stdout
    assert "_extra_state" in cell.stdout


def test_empty_layers_do_not_affect_others(shared: Kernel) -> None:
    cell = shared.run(
        """
model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False, device="meta"))
def train(model):
    with torch.no_grad():
        model[0].weight.fill_(7.0)
notebook_launcher(train, (model,), 2)
model[0].weight.item(), model[1].weight.is_meta
"""
    )
    assert cell.value == (7.0, True)
    assert "1.weight (on the meta device" in cell.stdout + cell.stderr


def test_weights_of_a_failed_job_are_not_loaded(shared: Kernel) -> None:
    cell = shared.run(
        """
def train(model):
    with torch.no_grad():
        model.weight.fill_(9.0)
    if os.environ["RANK"] == "1":
        raise ValueError("after training")
model = nn.Linear(2, 2)
before = model.weight.clone()
try:
    notebook_launcher(train, (model,), 2)
except ValueError:
    pass
torch.equal(before, model.weight)
"""
    )
    assert cell.result == "True"


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_weights_that_did_not_change_are_not_sent_and_averages_are(shared: Kernel, method: str) -> None:
    """Frozen weights may also change: by an optimizer, by averaging, through ``.data``."""
    cell = shared.run(
        f"""
{TIED}def frozen(module):
    return module.requires_grad_(False)
def train(student, teacher, averages, tied):
    with torch.no_grad():
        student.weight.fill_(2.0)
        averages["lerp"].weight.lerp_(student.weight, 0.5)
        averages["loaded"].load_state_dict(student.state_dict())
    averages["data"].weight.data.copy_(student.weight.data)
    averages["replaced"].weight = nn.Parameter(student.weight.detach().clone(), False)
    averages["numpy"].bias.numpy()[:] = 2.0
    tied.norm(torch.randn(3, 4))
def parts(*modules):
    return [[tensor.clone() for tensor in module.state_dict().values()] for module in modules]
def linear():
    module = nn.Linear(300, 300)
    nn.init.zeros_(module.weight); nn.init.zeros_(module.bias)
    return module
student, teacher = linear(), frozen(nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)).eval())
averages = {{name: frozen(linear()) for name in ("lerp", "loaded", "data", "replaced", "numpy", "left")}}
tied = Tied()
before, (embedding,) = parts(teacher, averages["left"]), parts(tied.embed)
kept = averages["replaced"].weight
notebook_launcher(train, (student, teacher, averages, tied), 2, start_method={method!r})
after = parts(teacher, averages["left"])
(all(torch.equal(a, b) for one, other in zip(before, after) for a, b in zip(one, other)),
 {{name: (m.weight.unique().tolist(), m.bias.unique().tolist()) for name, m in averages.items()}},
 averages["replaced"].weight is kept, tied.norm.num_batches_tracked.item(), tied.head.weight is tied.embed.weight,
 torch.equal(embedding[0], tied.embed.weight), nblaunch.last_job().weights())
"""
    )
    left, averages, is_kept, num_batches, is_tied, is_same, weights = cell.value
    assert (left, is_kept, num_batches, is_tied, is_same, weights) == (True, True, 1, True, True, {})
    assert averages == {
        "lerp": ([1.0], [0.0]),
        "loaded": ([2.0], [0.0]),
        "data": ([2.0], [0.0]),
        "replaced": ([2.0], [0.0]),
        "numpy": ([0.0], [2.0]),
        "left": ([0.0], [0.0]),
    }
    lines = [line for line in cell.stdout.splitlines() if "weights" in line]
    assert len(lines) == 2, cell.stdout
    assert "args[0] (Linear), args[2]['lerp'] (Linear), args[2]['loaded'] (Linear) and 4 more: " in lines[0]
    assert "args[1] (Sequential), args[2]['left'] (Linear) were not changed" in lines[1]


BROKEN_SENDING = {
    # The system does this when memory runs out; a real test would need a control group.
    "killed": ("os.kill(os.getpid(), 9)", "rank 0 was killed by SIGKILL while sending them"),
    "rejected": ("raise MemoryError('no room')", "rank 0 could not send them (MemoryError: no room)"),
    "full": (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))",
        "rank 0 could not send them (OSError: [Errno 27] File too large)",
    ),
}


@pytest.mark.parametrize(
    ("method", "end"), [*(("fork", end) for end in BROKEN_SENDING), ("forkserver", "killed")]
)
def test_unsendable_weights_keep_value_and_log(shared: Kernel, method: str, end: str) -> None:
    code, note = BROKEN_SENDING[end]
    cell = shared.run(
        f"""
class Heavy(nn.Linear):
    def state_dict(self, *args, **kwargs):
        if nblaunch.context.is_worker():
            {code}
        return super().state_dict(*args, **kwargs)
def train(first, heavy):
    print("training done")
    with torch.no_grad():
        first.weight.fill_(3.0); heavy.weight.fill_(3.0)
    return {{"loss": torch.full((1000,), 0.5)}}
first, heavy = nn.Linear(2, 2), Heavy(1000, 1000)
before = heavy.weight.clone()
value = notebook_launcher(train, (first, heavy), 2, start_method={method!r})
job = nblaunch.last_job()
(value["loss"].unique().tolist(), first.weight.unique().tolist(), torch.equal(before, heavy.weight), job.status,
 "training done" in job.logs(), job.result()["loss"].sum().item(), job.weights())
"""
    )
    assert cell.value == ([0.5], [3.0], True, "done", True, 500.0, {})
    (line,) = [line for line in cell.stdout.splitlines() if "could not be copied back" in line]
    assert "args[1] (Heavy)" in line
    assert note in line
    assert "sync_weights=False" in line
    assert "warning" in cell.displays[0].data["text/plain"]


@pytest.mark.alarms("hang")
def test_missing_weights_are_reported_as_a_hang(shared: Kernel) -> None:
    cell = shared.run(
        """
import threading
class Stuck(nn.Linear):
    def state_dict(self, *args, **kwargs):
        if nblaunch.context.is_worker():
            threading.Event().wait()
        return super().state_dict(*args, **kwargs)
notebook_launcher(lambda model: "value", (Stuck(2, 2),), 2, hang_timeout_s=0.5, on_hang="stop", interrupt_grace_s=0)
"""
    )
    assert cell.result == "'value'"
    assert "while sending them" in cell.stdout
    assert any("state_dict" in display.data["text/plain"] for display in cell.displays)

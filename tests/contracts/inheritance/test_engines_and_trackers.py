"""Ray, optuna and experiment trackers, replaced by stubs with the names that nblaunch uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

RAY = """
from types import SimpleNamespace

is_connected = True

def is_initialized():
    return is_connected

def get_runtime_context():
    return SimpleNamespace(gcs_address="10.0.0.1:6379")
"""

WANDB = """
from types import SimpleNamespace

run = None

class Run:
    def __init__(self, id): self.id = id
    def log(self, values): return self.id, values
    def watch(self, model): return self.id, model

def _called_too_early(*args): raise RuntimeError("You must call wandb.init() before")

log = watch = _called_too_early

def init(id): set_global(run=Run(id), log=Run(id).log, watch=Run(id).watch)

def set_global(run=None, config=None, log=None, watch=None): globals().update(run=run, log=log, watch=watch)

sdk = SimpleNamespace(lib=SimpleNamespace(module=SimpleNamespace(set_global=set_global)))
"""


OPTUNA = """
class InMemoryStorage:
    def __init__(self): self.values = {}
    def set_trial_intermediate_value(self, trial_id, step, value): self.values[step] = value
    def get_trial(self, trial_id): return self.values

class Trial:
    def __init__(self): self.storage = InMemoryStorage()
    def report(self, value, step): self.storage.set_trial_intermediate_value(0, step, value)
    def values(self): return self.storage.get_trial(0)
"""

MLFLOW = """
import atexit, os, threading

class Active:
    def __init__(self): self.local, self._all = threading.local(), {}
    def get(self):
        value, pid = getattr(self.local, "value", ([], os.getpid()))
        if pid != os.getpid(): value = []
        self.set(value)
        return value
    def set(self, value):
        self.local.value = value, os.getpid()
        self._all[threading.get_ident()] = value
    def get_all_thread_values(self): return dict(self._all)

_active_run_stack = Active()

def start_run(name="new", nested=False):
    if _active_run_stack.get() and not nested: raise Exception(f"{active_run()} is already active")
    _active_run_stack.get().append(name)
    return name

def active_run(): return _active_run_stack.get()[-1] if _active_run_stack.get() else None

def end_run():
    with open("ended", "a") as file: print(_active_run_stack.get().pop(), file=file)

def _safe_end_run():
    while active_run(): end_run()

atexit.register(_safe_end_run)
"""

TRACKIO = """
import threading, time

class Run:
    def __init__(self):
        self._is_local, self._stop_flag, self._queued = True, threading.Event(), []
        self._local_sender_thread = None
        self._start()
    def _start(self):
        self._local_sender_thread = threading.Thread(target=self._send, daemon=True)
        self._local_sender_thread.start()
    def log(self, text):
        self._queued.append(text)
        if not self._local_sender_thread.is_alive(): self._start()
    def _send(self):
        self._stop_flag.wait()
        with open("sent", "a") as file: print(*self._queued, sep="\\n", file=file)
"""

COMET = """
class CometExperiment:
    def __init__(self): self.messages = []
    def log_metric(self, name, value): self._enqueue_message((name, value))
    def _enqueue_message(self, message): self.messages.append(message)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder: Path = tmp_path_factory.mktemp("libraries")
    (folder / "ray.py").write_text(RAY)
    (folder / "wandb.py").write_text(WANDB)
    (folder / "optuna" / "storages").mkdir(parents=True)
    for package in ("optuna", "optuna/storages"):
        (folder / package / "__init__.py").touch()
    (folder / "optuna" / "storages" / "_in_memory.py").write_text(OPTUNA)
    for package, module, text in (
        ("mlflow/tracking", "fluent", MLFLOW),
        ("trackio", "run", TRACKIO),
        ("comet_ml", "experiment", COMET),
    ):
        (folder / package).mkdir(parents=True)
        (folder / package / f"{module}.py").write_text(text)
        (folder / package / "__init__.py").touch()
    (folder / "mlflow" / "__init__.py").write_text("from mlflow.tracking.fluent import start_run")
    with Kernel.start(cwd=folder) as kernel:
        kernel.run(
            "import os, torch\n"
            "from nblaunch import notebook_launcher\n"
            "def launch(function, start_method):\n"
            "    return notebook_launcher(function, num_processes=2, start_method=start_method, dashboard='text',\n"
            "                             backend='cpu', return_all=True)"
        )
        yield kernel


@contract("Ray connections")
def test_a_connected_process_is_not_forked(shared: Kernel, start_method: str) -> None:
    shared.run("import ray\nray.is_connected = True\ndef address(): return os.environ['RAY_ADDRESS']")
    try:
        if start_method == "fork":
            cell = shared.run("launch(address, 'fork')", raises="LaunchError")
            assert "connected to a Ray cluster" in cell.raised.value
            start_method = "auto"
        cell = shared.run(f"launch(address, {start_method!r})")
        assert cell.value == ["10.0.0.1:6379"] * 2
    finally:
        shared.run("ray.is_connected = False")
    assert "cpu, fork)" in shared.run("launch(os.getpid, 'auto')").shown


@contract("experiment tracker runs")
def test_workers_log_to_the_kernels_run(shared: Kernel, start_method: str) -> None:
    shared.run(
        "import wandb\nwandb.init('r1')\ndef log(): return wandb.log({'loss': 1}), wandb.watch('model')"
    )
    try:
        cell = shared.run(f"launch(log, {start_method!r})")
        assert cell.value == [(("r1", {"loss": 1}), ("r1", "model"))] * 2
    finally:
        shared.run("wandb.run = None")


@contract("experiment tracker runs")
def test_workers_adopt_the_active_run_of_mlflow_and_do_not_end_it(shared: Kernel, start_method: str) -> None:
    shared.run(
        "import mlflow.tracking.fluent\n"
        "def active(): return mlflow.tracking.fluent.active_run()\n"
        "def another(): return mlflow.start_run(f'of rank {os.environ[\"RANK\"]}'), active()\n"
        "def inner(): return mlflow.start_run('inner', nested=True), active()\n"
        "def ended(): return set(open('ended').read().split('\\n')) if os.path.exists('ended') else set()\n"
        "mlflow.start_run('of the cell')"
    )
    try:
        assert shared.run(f"launch(active, {start_method!r})").value == ["of the cell"] * 2
        assert not shared.run("ended()").value
        started = shared.run(f"launch(another, {start_method!r})").value
        assert started == [("of rank 0", "of rank 0"), ("of rank 1", "of rank 1")]
        assert shared.run("ended()").value == {"of rank 0", "of rank 1", ""}
        assert shared.run(f"launch(inner, {start_method!r})").value == [("inner", "inner")] * 2
        assert shared.run("ended()").value == {"of rank 0", "of rank 1", "inner", ""}
        assert shared.run("active()").value == "of the cell"
    finally:
        shared.run("mlflow.tracking.fluent.end_run(); os.remove('ended')")
    assert shared.run(f"launch(active, {start_method!r})").value == [None] * 2


def test_a_worker_waits_until_trackio_has_sent_what_it_has_logged(shared: Kernel) -> None:
    shared.run("import trackio.run\nrun = trackio.run.Run()\ndef log(): run.log(os.environ['RANK'])")
    shared.run("launch(log, 'fork')")
    assert shared.run("sorted(open('sent').read().split())").value == ["0", "1"]


def test_a_comet_experiment_of_the_kernel_is_named(shared: Kernel) -> None:
    shared.run(
        "import comet_ml.experiment\n"
        "experiment = comet_ml.experiment.CometExperiment()\n"
        "def log(): experiment.log_metric('loss', 0.5); experiment.log_metric('loss', 0.4)\n"
        "def log_own(): comet_ml.experiment.CometExperiment().log_metric('loss', 0.5)"
    )
    assert shared.run("launch(log, 'fork')").stdout.count("the Comet experiment") == 1
    assert "Comet" not in shared.run("launch(log_own, 'fork')").stdout


@contract("Optuna studies")
def test_writes_to_an_in_memory_study_are_named_once(shared: Kernel, start_method: str) -> None:
    shared.run(
        "import optuna.storages._in_memory as optuna\n"
        "trial = optuna.Trial()\n"
        "def report():\n"
        "    for step in range(3): trial.report(0.5, step)\n"
        "def read(): return trial.values()\n"
        "def search():\n"
        "    own = optuna.Trial()\n"
        "    own.report(0.5, 0)\n"
        "    return own.values()"
    )
    cell = shared.run(f"launch(report, {start_method!r})")
    assert cell.stdout.count("optuna study in the kernel's memory") == 1
    for function in ("read", "search"):
        assert "optuna study" not in shared.run(f"launch({function}, {start_method!r})").shown

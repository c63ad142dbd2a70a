"""Ray, Weights & Biases and optuna, replaced by stubs with the names that nblaunch uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(90)

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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder: Path = tmp_path_factory.mktemp("libraries")
    (folder / "ray.py").write_text(RAY)
    (folder / "wandb.py").write_text(WANDB)
    (folder / "optuna" / "storages").mkdir(parents=True)
    for package in ("optuna", "optuna/storages"):
        (folder / package / "__init__.py").touch()
    (folder / "optuna" / "storages" / "_in_memory.py").write_text(OPTUNA)
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

"""A device family that only this file defines: a cell registers it, and real launches use it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nblaunch import backends
from nblaunch.backends.base import Backend
from tests.kernels import Kernel
from tests.thorough import thorough

DEVICE = """
import os
import torch
from nblaunch import Accelerator, backends, last_job, notebook_launcher
from nblaunch.backends.base import Backend

class Toy(Backend):
    "Three chips that compute on the CPU."

    name = "toy"
    device_noun = "toy chip"
    device_type = "cpu"
    dist_backend = "gloo"
    is_oversubscribable = False
    num_steps = 0

    def affinity(self):
        return 100

    def unavailable_reason(self):
        return "toy chips are always there"

    def device_count(self):
        return 3

    def fork_hazard(self):
        return None

    def worker_env(self, topology):
        return {**super().worker_env(topology), "TOY_VISIBLE_CHIPS": str(topology.local_rank)}

    def device(self, topology):
        return torch.device("cpu", topology.local_rank)

    def precision_problem(self, precision):
        return None if precision == "no" else f"toy chips have no {precision}"

    def begin_step(self, phase, batch):
        self.num_steps += 1

    def explain_failure(self, error):
        return ("toy chips melt at zero",) if isinstance(error, ZeroDivisionError) else ()

backends.register(Toy())

def train():
    accelerator = Accelerator()
    model, loader = accelerator.prepare(torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.ones(8, 4), 2))
    for batch in loader:
        accelerator.backward(model(batch).sum())
    accelerator.log({"loss": 0.5})
    ones = accelerator.gather(torch.ones(1, device=accelerator.device)).tolist()
    backend = backends.discover()["toy"]
    return str(accelerator.device), os.environ["TOY_VISIBLE_CHIPS"], ones, backend.num_steps, type(backend).__name__
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}) as kernel:
        kernel.run(DEVICE)
        yield kernel


@pytest.mark.parametrize("start_method", ["fork", "forkserver", thorough("spawn")])
def test_workers_compute_on_the_device(toy: Kernel, start_method: str) -> None:
    cell = toy.run(
        f"found = notebook_launcher(train, (), 2, return_all=True, dashboard='html', start_method={start_method!r})\n"
        "found, [(row['rank'], row['loss']) for row in last_job().metrics]"
    )
    workers, metrics = cell.value
    assert workers == [
        ("cpu:0", "0", [1.0, 1.0], 2, "Toy"),
        ("cpu:1", "1", [1.0, 1.0], 2, "Toy"),
    ]
    assert metrics == [(0, 0.5)]
    assert any(f"(toy, {start_method}" in str(display.data) for display in cell.displays)


def test_the_device_is_chosen_and_counted(toy: Kernel) -> None:
    assert (
        toy.run("len(notebook_launcher(lambda: os.getpid(), return_all=True, dashboard='none'))").value == 3
    )
    error = toy.run("notebook_launcher(train, (), 4)", raises="ValueError").error
    assert error is not None
    assert "this machine has 3 toy chips for backend='toy': valid values are 1 to 3" in error.text


def test_the_device_defines_precisions_and_errors(toy: Kernel) -> None:
    error = toy.run("notebook_launcher(train, (), 2, mixed_precision='fp16')", raises="ValueError").error
    assert error is not None
    assert "toy chips have no fp16" in error.text
    error = toy.run("notebook_launcher(lambda: 1 / 0, (), 2)", raises="ZeroDivisionError").error
    assert error is not None
    assert "toy chips melt at zero" in error.text


def test_commands_offer_the_device() -> None:
    program = f"""{DEVICE}
from nblaunch.cli import config, environment
from nblaunch.config.settings import SETTINGS
machine = config.Machine.here()
answers = {{"backend": "toy"}}
assert machine.best == "toy" and machine.count("toy") == 3
assert ("toy", "toy chips (3 on this machine)") in config._devices(answers, machine)
assert [value for value, _ in config._precisions(answers, machine)] == ["no"]
assert [value for value, _ in config._compilers(answers, machine)] == ["no", "inductor"]
assert environment.collect()[0]["devices"]["toy"] == "3 toy chips"
assert SETTINGS["backend"].converter.convert("toy") == "toy"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


class _Named(Backend):
    name = "cpu"


@pytest.mark.parametrize("name", ["cpu", "auto", "Toy chip", ""])
def test_invalid_and_duplicate_names_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Named, "__abstractmethods__", frozenset())
    backend = _Named()  # type: ignore[abstract]
    backend.name = name
    before = backends.discover()
    with pytest.raises(ValueError, match=re.escape(f"can't be named {name!r}")):
        backends.register(backend)
    assert backends.discover() == before


def test_only_a_backend_can_be_registered() -> None:
    with pytest.raises(TypeError, match="Toy"):
        backends.register("Toy")  # type: ignore[arg-type]

"""nblaunch on a Linux that lacks what macOS lacks. ``tests/backends/test_other_gpus.py`` tests its decisions there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

AS_ON_MAC = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "mac"), str(Path(__file__).parents[2])])
}
"""Return the variables of a process that lacks what macOS lacks."""

PROGRAM = """
import pathlib, signal, sys
import torch
from nblaunch import Accelerator, last_job, notebook_launcher

def train(model):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return accelerator.reduce(torch.ones(1), "sum").item()

def wait():
    pipe = open(sys.argv[1], "w")
    print("up", file=pipe, flush=True)
    signal.pause()

if __name__ == "__main__":
    pipe = open(sys.argv[1], "w")
    assert sys.platform == "darwin" and not pathlib.Path("/proc").exists()
    model = torch.nn.Linear(4, 1)
    before = model.weight.clone()
    assert notebook_launcher(train, (model,), 2, return_all=True) == [2.0, 2.0]
    assert last_job().plan.start_method == "spawn"
    assert not torch.equal(model.weight, before)
    notebook_launcher(wait, (), 1)
"""


def test_a_launch_needs_nothing_that_macos_lacks(tmp_path: Path) -> None:
    """Results and weights come back, and no worker outlives its launcher, which only the guardian ensures there."""
    script, pipe = tmp_path / "launch.py", tmp_path / "pipe"
    script.write_text(PROGRAM)
    os.mkfifo(pipe)
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(pipe)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **AS_ON_MAC, "NBLAUNCH_LOG_DIR": str(tmp_path / "logs")},
    )  # fmt: skip
    with launcher, pipe.open() as workers:
        up = workers.readline()  # empty if the program has ended
        launcher.kill()
        output = launcher.communicate()[0]
        assert up == "up\n", output
        assert workers.read() == ""  # returns once no worker has the pipe open


def test_mac_report_omits_core_binding() -> None:
    report = subprocess.run(
        [sys.executable, "-m", "nblaunch", "env"],
        capture_output=True, text=True, timeout=300, check=True, env={**os.environ, **AS_ON_MAC},
    ).stdout  # fmt: skip
    cores = os.cpu_count()
    assert re.search(rf"^  cpu +{cores} CPU cores? usable \(the machine has {cores}\)$", report, re.MULTILINE)

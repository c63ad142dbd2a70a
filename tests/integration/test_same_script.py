"""One training script learns the same when started in three ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import Kernel

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("scripts") / "train.py"


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")

THREADS_AT_EXIT = """
import atexit, sys, threading, time

def write_names():
    with open(f"{sys.argv[1]}-{accelerator.process_index}", "w") as file:
        file.write(" ".join(thread.name for thread in threading.enumerate()))

atexit.register(write_names)    # before multiprocessing's, so it runs after the finalizers
import torch
from nblaunch import Accelerator

def set_slowly(store, *args, set=torch.distributed.PrefixStore.set):
    set(store, *args)
    if threading.current_thread().name == "nblaunch-saves-end":
        time.sleep(0.3)

torch.distributed.PrefixStore.set = set_slowly
accelerator = Accelerator()
accelerator.prepare(torch.nn.Linear(1, 1))
"""


def _run(*command: str) -> None:
    run = subprocess.run(
        [sys.executable, *command],
        env=_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def _by_command(*command: str, path: Path) -> dict[str, Any]:
    _run(*command, str(SCRIPT), str(path))
    return torch.load(path)


def _by_notebook(kernel: Kernel, num_processes: int, path: Path) -> dict[str, Any]:
    kernel.run(
        f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
from nblaunch import notebook_launcher
from train import main
notebook_launcher(main, ({str(path)!r},), num_processes={num_processes}, backend="cpu")
""",
    )
    return torch.load(path)


@pytest.mark.slow
def test_notebook_python_and_torchrun_train_alike(kernel: Kernel, tmp_path: Path) -> None:
    expected = _by_command(path=tmp_path / "python")
    answers = [_by_notebook(kernel, number, tmp_path / f"notebook {number}") for number in (1, 2)]
    answers.append(_by_command(*TORCHRUN, path=tmp_path / "torchrun"))
    assert expected["num_processes"] == 1
    assert [answer["num_processes"] for answer in answers] == [1, 2, 2]
    for answer in answers:
        assert answer["rows"] == expected["rows"] == 52
        assert answer["error"] == pytest.approx(expected["error"], rel=1e-4)
        torch.testing.assert_close(answer["weights"], expected["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_no_thread_uses_the_store_when_a_rank_exits(tmp_path: Path) -> None:
    """Before Python 3.14, a thread that returns from C++ at exit makes the process abort."""
    script = tmp_path / "script.py"
    script.write_text(THREADS_AT_EXIT)
    _run(*TORCHRUN, str(script), str(tmp_path / "threads"))
    names = [(tmp_path / f"threads-{rank}").read_text().split() for rank in (0, 1)]
    assert not [name for name in names[0] + names[1] if name.startswith("nblaunch-saves")], names

"""One training script, started in three ways, learns the same."""

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


def _by_command(*command: str, path: Path) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, *command, str(SCRIPT), str(path)],
        env=_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return torch.load(path)


def _by_notebook(kernel: Kernel, num_processes: int, path: Path) -> dict[str, Any]:
    kernel.run(
        f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
from nblaunch import notebook_launcher
from train import main
notebook_launcher(main, ({str(path)!r},), num_processes={num_processes}, backend="cpu")
""",
        timeout_s=100,
    )
    return torch.load(path)


@pytest.mark.slow
def test_python_torchrun_and_notebook_learn_the_same(kernel: Kernel, tmp_path: Path) -> None:
    expected = _by_command(path=tmp_path / "python")
    answers = [_by_notebook(kernel, number, tmp_path / f"notebook {number}") for number in (1, 2)]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    answers.append(_by_command(*torchrun, path=tmp_path / "torchrun"))
    assert expected["num_processes"] == 1
    assert [answer["num_processes"] for answer in answers] == [1, 2, 2]
    for answer in answers:
        assert answer["rows"] == expected["rows"] == 52
        assert answer["error"] == pytest.approx(expected["error"], rel=1e-4)
        torch.testing.assert_close(answer["weights"], expected["weights"], rtol=1e-4, atol=1e-5)

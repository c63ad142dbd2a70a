"""``nblaunch launch`` and ``nblaunch config`` on a machine with GPUs. Skipped without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nblaunch.backends.gpu import CUDA
from nblaunch.config import files

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
]

TRAIN = """
import os
import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), "visible", torch.cuda.device_count(), flush=True)
dist.destroy_process_group()
"""


def nblaunch(folder: Path, *words: str, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run a command, which must succeed, and return its output."""
    ended = subprocess.run(
        [sys.executable, "-m", "nblaunch", *words],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=folder,
        env={**os.environ, "NBLAUNCH_CONFIG_FILE": str(folder / "config.yaml"), **(env or {})},
        input=stdin,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_plain_script_runs_on_every_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    count = CUDA.device_count()
    out = nblaunch(tmp_path, "launch", "--multi_gpu", "train.py")
    assert out.count(f"sum {count} of {count}") == count, out


def test_gpu_ids_choose_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    out = nblaunch(tmp_path, "launch", "--gpu_ids", "0", "train.py")
    assert [line for line in out.splitlines() if "sum" in line] == ["sum 1 of 1 visible 1"], out


def test_the_questionnaire_finds_the_gpus(tmp_path: Path) -> None:
    nblaunch(tmp_path, "config", stdin="\n" * 40)
    values = files.read(tmp_path / "config.yaml").values
    assert (values["backend"], values["num_processes"]) == ("cuda", CUDA.device_count())
    (tmp_path / "train.py").write_text("from nblaunch import Accelerator; print(Accelerator().device.type)\n")
    assert "cuda" in nblaunch(tmp_path, "launch", "train.py")

"""``nblaunch test`` passes on a good machine, and each of its checks fails with evidence if something is broken."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from nblaunch import cli
from nblaunch.cli.selfcheck_jobs import CHECKS

# For each check, break the library in one place; forked workers inherit that.
BROKEN = """
import sys
from nblaunch.cli import main, selfcheck_jobs
from nblaunch.launcher import weights
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.strategies.replicated import DdpStrategy
from nblaunch.training.strategies.fsdp2.strategy import Fsdp2Strategy

DdpStrategy.setup_module = Fsdp2Strategy.setup_module = lambda self, model, process: model
Accelerator.reduce = lambda self, tensor, reduction="sum", scale=1.0: tensor
Accelerator.gather_for_metrics = lambda self, data, **options: self.gather(data)
Accelerator.load_state = lambda self, folder: None
weights.load_back = lambda modules, state_dicts, lost, *more: (set(modules), [])
selfcheck_jobs._raise_in_last_rank = lambda: Accelerator().wait_for_everyone()

sys.exit(main(["test", "--cpu", "--num_processes", "2", "--start_method", "fork"]))
"""


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]


def test_cpu_cores_pass_all_checks() -> None:
    ended = run("-m", "nblaunch", "test", "--cpu", "--num_processes", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("3 processes on cpu (gloo), started by fork")
    assert re.findall(r"^  ok +([\w-]+) +[\d.]+ s  \S", ended.stdout, re.MULTILINE) == list(CHECKS)
    assert "all passed" in ended.stdout
    assert not ended.stderr


def test_every_check_can_fail_and_shows_its_evidence() -> None:
    ended = run("-c", BROKEN)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    parts = re.split(r"^  FAILED +([\w-]+) .*\n", ended.stdout, flags=re.MULTILINE)
    evidence = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(evidence) == list(CHECKS), ended.stdout
    # the unreduced value happens to equal the sum
    assert "rank 1: reduce(sum)" not in evidence["collectives"]
    assert "rank 0: reduce(sum) gave [0.0, 0.0], expected [1.0, 10.0]" in evidence["collectives"]
    assert re.search(
        r"rank 0: 0\.weight differs from single-process training by [\d.e-]+ ", evidence["gradients"]
    )
    assert "differs from single-process training" in evidence["sharded"]
    assert "gave the samples [0, 1, " in evidence["metrics"]
    assert "the steps before load_state" in evidence["checkpoint"]
    assert "rank 0's trained weights begin with [" in evidence["weights-back"]
    assert "ZeroDivisionError, but the job raised None" in evidence["errors"]
    assert "7 failed" in ended.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_processes", "0"], "num_processes=0"),
        (["--backend", "tpu"], "backend='tpu'"),
        (["--backend", "cpu", "--only", "gradients", "speed"], "--only speed: valid checks are collectives"),
    ],
)
def test_wrong_use_is_one_line_and_starts_nothing(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["test", *words]) == 2
    shown = capfd.readouterr()
    assert not shown.out
    assert message in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.thorough
def test_an_interrupt_ends_it_and_its_workers() -> None:
    """The fixture of all tests checks that nothing is left."""
    program = subprocess.Popen(
        [sys.executable, "-m", "nblaunch", "test", "--cpu", "--num_processes", "2"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    with program.stdout as shown:
        assert "fork" in shown.readline()
        assert "collectives" in shown.readline()
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(180) == 130

"""State of the process itself: exit handlers, environment, random generators."""

from __future__ import annotations

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(60)


@contract("exit handlers")
def test_exit_handlers_of_the_kernel_run_in_the_kernel_alone(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import atexit, os, nblaunch\n"
        "atexit.register(print, 'exit handler ran')\n"
        "def train(): print('worker', os.getpid())"
    )
    cell = kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none')\n"
        "logs = [nblaunch.last_job().logs(rank) for rank in (0, 1)]\n"
        "print(logs)"
    )
    assert "worker" in cell.stdout
    assert "exit handler ran" not in cell.stdout


@contract("environment variables")
def test_the_environment_is_the_kernels_and_the_workers_own(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, nblaunch\n"
        "os.environ['SET_IN_A_CELL'] = 'yes'\n"
        "def train(): return os.environ['SET_IN_A_CELL'], os.environ['RANK'], os.environ['WORLD_SIZE']"
    )
    cell = kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='none', "
        "return_all=True)"
    )
    assert cell.result == "[('yes', '0', '2'), ('yes', '1', '2')]"


@contract("random generators")
def test_generators_continue_from_the_kernels_states(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import random, numpy, torch, nblaunch\n"
        "random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "def draw(): return random.random(), float(numpy.random.rand()), torch.rand(1).item()"
    )
    kernel.run(
        f"values = nblaunch.notebook_launcher(draw, num_processes=2, start_method={start_method!r}, "
        "dashboard='none', return_all=True)\n"
        "random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "assert values == [draw()] * 2, values"
    )

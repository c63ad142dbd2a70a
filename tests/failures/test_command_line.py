"""A function that parses the command line; in a notebook, it is the kernel's."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_arguments_that_argparse_rejects_are_explained_at_the_users_line(
    kernel: Kernel, start_method: str
) -> None:
    kernel.run(
        "import argparse, nblaunch\n"
        "def train(*arguments):\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--lr', type=float, default=0.5)\n"
        "    return parser.parse_args(*arguments).lr"
    )
    launch = f"num_processes=2, start_method={start_method!r}, dashboard='none')"
    error = kernel.run(f"nblaunch.notebook_launcher(train, {launch}", raises="RuntimeError").raised
    assert "parse_args([])" in error.value
    assert "----> 5     return parser.parse_args(*arguments).lr" in error.text
    assert kernel.run(f"nblaunch.notebook_launcher(train, ([],), {launch}").value == 0.5


def test_rejected_arguments_are_explained_if_the_kernel_has_replaced_sys_exit(kernel: Kernel) -> None:
    kernel.run(
        "import argparse, sys, nblaunch\n"
        "plain_exit = sys.exit\n"
        "sys.exit = lambda code=None: plain_exit(code)  # as wandb does, to learn the code\n"
        "def train(): argparse.ArgumentParser().parse_args()"
    )
    try:
        launch = "nblaunch.notebook_launcher(train, num_processes=2, start_method='fork', dashboard='none')"
        error = kernel.run(launch, raises="RuntimeError").raised
    finally:
        kernel.run("sys.exit = plain_exit")
    assert "parse_args([])" in error.value

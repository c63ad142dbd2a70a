"""Variables of a failed rank in the traceback of its exception, which ``%debug`` and verbose tracebacks read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

PREAMBLE = """
import numpy, torch, nblaunch
from nblaunch import notebook_launcher

class Waits:
    "A value whose code must not run: it may wait for another rank."
    def __getattr__(self, name): raise SystemExit(name)
    def __len__(self): raise SystemExit("len")
    def __repr__(self): raise SystemExit("repr")

def inner(batch, names, waits):
    pwd, login, addresses = "one", {"user": "me", "password": "two"}, ["https://me:three@host"]
    total, error, values = float("inf"), 1, 2
    hf_token, long, huge = "hf_abc", "x" * 1000, 10**5000
    raise ValueError("bad batch")

def train(model, is_fast=False):
    config = {"lr": 0.1, "layers": [1, 2]}
    inner(torch.ones(8, 4), ["a"] * 50, Waits())
"""
UNUSUAL = """
class Hides(type):
    "The class of a class whose module can't be asked for."
    @property
    def __module__(cls): raise SystemExit("module")

class Hidden(metaclass=Hides): pass

def broken():
    hidden, lazy = Hidden(), torch.nn.LazyLinear(3).weight
    class Inside:
        vars()[3] = lazy
        raise KeyError("bad class")
"""
LAUNCH = "notebook_launcher(train, (torch.nn.Linear(4, 1), True), num_processes=2, {options})"


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.mark.parametrize("start_method", ["fork", thorough("forkserver"), thorough("spawn")])
def test_debug_shows_the_variables_of_the_failed_rank(shared: Kernel, start_method: str) -> None:
    shared.run(LAUNCH.format(options=f"start_method={start_method!r}"), raises="ValueError")
    cell = shared.submit("%debug", is_typed_into=True)
    lines = (
        "p total, batch, names, waits, error + values",
        "p hf_token, long, huge",
        "p batch.shape",
        "p pwd, login, addresses",
        "p str(__import__('copy').deepcopy(batch)) * 2",
        "up",
        "p config['lr'] * 2, model, is_fast",
        "q",
    )
    for line in lines:
        cell.type(line)
    shown = cell.wait().stdout
    assert "(inf, <Tensor float32[8, 4] on cpu>, <list of 50>, <__main__.Waits>, 3)" in shown, cell.describe()
    assert "(<str, not shown because it may be secret>, <str of 1,000>, <builtins.int>)" in shown
    kinds = ", ".join(f"<{kind}, not shown because it may be secret>" for kind in ("str", "dict", "list"))
    assert f"({kinds})" in shown
    assert "<Tensor float32[8, 4] on cpu><Tensor float32[8, 4] on cpu>" in shown, (
        "a description can be copied"
    )
    assert "post_mortem=True" in shown.partition("AttributeError")[2], "a description has no attributes"
    assert "(0.2, <torch.nn.modules.linear.Linear>, True)" in shown


def test_a_failed_background_job_keeps_the_variables(shared: Kernel) -> None:
    shared.run(f"job = {LAUNCH.format(options='background=True')}")
    shared.run("job.result()", raises="ValueError")
    shared.run("import sys; names = sys.last_value.__traceback__")
    shared.run("while names.tb_next: names = names.tb_next")
    assert "total" in shared.run("sorted(names.tb_frame.f_locals)").value


def test_a_failing_command_of_a_session_shows_its_variables(shared: Kernel) -> None:
    shared.run("session = nblaunch.Session(num_processes=2)")
    try:
        shared.run("session.run(train, (torch.nn.Linear(4, 1), True))", raises="ValueError")
        cell = shared.submit("%debug", is_typed_into=True)
        for line in ("p total", "q"):
            cell.type(line)
        assert "inf" in cell.wait().stdout, cell.describe()
    finally:
        shared.run("session.close()")


def test_variables_that_can_not_be_described_do_not_hide_the_error(shared: Kernel) -> None:
    shared.run(UNUSUAL)
    shared.run("notebook_launcher(broken, num_processes=2)", raises="KeyError")
    cell = shared.submit("%debug", is_typed_into=True)
    for line in ("up", "p lazy, hidden", "q"):
        cell.type(line)
    assert "UninitializedParameter>, <__main__.Hidden>)" in cell.wait().stdout, cell.describe()

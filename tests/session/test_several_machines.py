"""A session over two "machines": two kernels, each with its own part of the ranks, that run the same cells."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Cell, Kernel

CELL = """
import os, torch
from torch import nn
from nblaunch import Session, notebook_launcher
base = 40
def start():
    return Session({count}, threads_per_process=1, backend="cpu", num_nodes=2, node_rank={node}, use_port={port},
                   rdzv_timeout_s=120, rdzv_conf={{"keep_alive_interval": 3}})
"""
SUM = "x = torch.ones(2); torch.distributed.all_reduce(x); x.sum().item()"


class Pair:
    """Two kernels that run the same cells."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels

    def submit(self, code: str) -> list[Cell]:
        return [kernel.submit(code) for kernel in self.kernels]

    def run(self, code: str) -> list[Cell]:
        cells = self.submit(code)
        for cell in cells:
            assert cell.wait().error is None, cell.describe()
        return cells

    def results(self, code: str) -> list[str | None]:
        return [cell.result for cell in self.run(code)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Kernels with a session of the ranks 0 and 1 here and 2 there, which every test leaves running."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("machines")
    logs = [{"NBLAUNCH_LOG_DIR": str(folder / name)} for name in ("0", "1")]
    with Kernel.start(env=logs[0]) as one, Kernel.start(env=logs[1]) as other:
        for node, kernel in enumerate((one, other)):
            kernel.run(CELL.format(count=2 - node, node=node, port=port))
        both = Pair([one, other])
        both.run("session = start()")
        yield both
        both.run("session.close()")
        for kernel in both.kernels:
            kernel.wait_for_no_processes(10.0)


def test_each_kernel_holds_its_ranks_and_collectives_span_all(pair: Pair) -> None:
    assert pair.results(f"session.execute({SUM!r})") == ["[0-1] 6.0", "[2] 6.0"]
    pair.run("session.execute('mine = base + torch.distributed.get_rank()')")
    assert [cell.value for cell in pair.run("dict(session['mine']), session.num_processes")] == [
        ({0: 40, 1: 41}, 3),
        ({2: 42}, 3),
    ]
    one, other = pair.kernels
    assert one.run("session.ranks(1).execute('mine + 1')").result == "[1] 42"
    error = other.run("session.ranks(0)", raises="ValueError").error
    assert error is not None
    assert "ranks 2 to 2 on this machine" in error.value


def test_a_call_trains_the_models_of_both_notebooks(pair: Pair) -> None:
    pair.run(
        """
torch.manual_seed(0)
model = nn.Linear(2, 1)
def train(model):
    from nblaunch import Accelerator
    accelerator = Accelerator()
    wrapped = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    accelerator.backward((wrapped(torch.ones(4, 2)) * accelerator.process_index).sum())
    optimizer.step()
    return accelerator.process_index
"""
    )
    seen = [cell.value for cell in pair.run("session.run(train, (model,)), model.weight.tolist()")]
    assert [value for value, _ in seen] == [0, 2]
    assert seen[0][1] == seen[1][1]
    cells = pair.run("notebook_launcher(train, (model,), session=session, return_all=True)")
    assert [cell.value for cell in cells] == [[0, 1], [2]]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_ends_the_command_on_both_machines_and_the_group_is_formed_anew(
    pair: Pair, rank: int
) -> None:
    fails = f"kept = {rank}\nif torch.distributed.get_rank() == {rank}: raise ValueError('no such batch')\n"
    cells = pair.submit(f"session.execute({fails + SUM!r})")
    for cell in cells:
        error = cell.wait().error
        assert error is not None, cell.describe()
        assert error.name == "ValueError", cell.describe()
        assert "no such batch" in error.value
        assert f"rank {rank}" in error.text
    # What ranks have can be looked at on one machine alone.
    assert pair.kernels[1].run("session['kept']").result == f"[2] {rank}"
    assert pair.results(f"session.execute({SUM!r})") == ["[0-1] 6.0", "[2] 6.0"]


def test_an_interrupt_frees_ranks_that_wait_for_a_machine_whose_kernel_is_idle(pair: Pair) -> None:
    one, other = pair.kernels
    for waits in (SUM, "torch.distributed.barrier()"):  # in the group; then for another group to be formed
        cell = other.submit(f"session.execute({'print(1)' + chr(10) + waits!r})").wait_for_text("1")
        other.interrupt()
        assert cell.wait().error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
        pair.run("session.execute('kept = 1')")
    assert pair.results(f"session.execute({SUM!r})") == ["[0-1] 6.0", "[2] 6.0"]
    cells = pair.submit(f"session.execute({'print(1)' + chr(10) + 'import time; time.sleep(1000)'!r})")
    for cell in cells:
        cell.wait_for_text("1")
    one.interrupt()
    assert [cell.wait().error.name for cell in cells] == ["KeyboardInterrupt"] * 2  # type: ignore[union-attr]
    assert "interrupted on node 0" in cells[1].stdout + cells[1].stderr
    assert pair.results(f"session.execute({SUM!r})") == ["[0-1] 6.0", "[2] 6.0"]


def test_a_lost_rank_ends_the_session_everywhere_and_a_restart_begins_anew(pair: Pair) -> None:
    dies = "import signal, os\nif torch.distributed.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    for cell in pair.submit(f"session.execute({dies + SUM!r})"):
        error = cell.wait().error
        assert error is not None, cell.describe()
        assert error.name == "WorkerDied", cell.describe()
        assert "rank 1" in error.value
        assert "SIGKILL" in error.value
    for kernel in pair.kernels:
        assert kernel.run("session.execute('1')", raises="LaunchError").error is not None
    pair.run("base = 50; session.restart()")
    assert pair.results("session['base']") == ["[0-1] 50", "[2] 50"]
    assert pair.results(f"session.execute({SUM!r})") == ["[0-1] 6.0", "[2] 6.0"]


def test_a_session_that_is_closed_on_one_machine_alone_ends_on_the_other(pair: Pair) -> None:
    one, other = pair.kernels
    one.run("session.close()")
    other.wait_for_no_processes(20.0)
    error = other.run("session.execute('1')", raises="NodeLost").error
    assert error is not None
    assert "has ended its session" in error.value
    pair.run("session = start()")

"""Queues, pipes and managers of ``multiprocessing`` that a cell has created."""

from __future__ import annotations

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Cell, Kernel

SETUP = "import multiprocessing, os, nblaunch, numpy, torch\n"


def launch(kernel: Kernel, start_method: str, options: str = "", raises: str | None = None) -> Cell:
    return kernel.run(
        f"nblaunch.notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard='text'{options})",
        raises=raises,
    )


@contract("queues between processes")
@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue"])
def test_values_larger_than_a_pipe_arrive(kernel: Kernel, start_method: str, kind: str) -> None:
    kernel.run(
        f"{SETUP}queue = multiprocessing.{kind}()\n"
        "def train():\n"
        "    for number in range(3): queue.put((os.environ['RANK'], number, numpy.full(1_000_000, number)))"
    )
    if start_method != "fork":
        assert "queue" in launch(kernel, start_method, raises="PayloadError").raised.value
        return
    launch(kernel, start_method)
    cell = kernel.run(
        "assert not queue.empty()\n"
        "values = [queue.get(timeout=180) for _ in range(6)]\n"
        "assert all((array == number).all() and array.size == 1_000_000 for _, number, array in values)\n"
        "[[number for rank, number, _ in values if rank == wanted] for wanted in '01'], queue.empty()"
    )
    assert cell.value == ([[0, 1, 2], [0, 1, 2]], True)


@contract("queues between processes")
def test_proxies_of_a_manager_reach_it(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        f"{SETUP}manager = multiprocessing.Manager()\n"
        "values, queue = manager.dict(), manager.Queue()\n"
        "def train():\n"
        "    values[os.environ['RANK']] = 1\n"
        "    queue.put(numpy.ones(1_000_000))"
    )
    launch(kernel, start_method)
    cell = kernel.run(
        "result = dict(values), [queue.get().size for _ in range(2)]; manager.shutdown(); result"
    )
    assert cell.value == ({"0": 1, "1": 1}, [1_000_000] * 2)


@contract("queues between processes")
@pytest.mark.parametrize(
    ("make", "put"),
    [
        ("multiprocessing.SimpleQueue()", "channel.put(bytes(1_000_000))"),
        ("multiprocessing.Queue(1)", "channel.put(1); channel.put(2)"),
        ("ends[1]", "channel.send(bytes(1_000_000))"),
    ],
    ids=["simple", "bounded", "pipe"],
)
def test_a_put_that_no_process_reads_is_named(kernel: Kernel, start_method: str, make: str, put: str) -> None:
    kernel.run(f"{SETUP}ends = multiprocessing.Pipe()\nchannel = {make}\ndef train(): {put}")
    if start_method != "fork":
        assert "channel" in launch(kernel, start_method, raises="PayloadError").raised.value
        return
    error = launch(kernel, start_method, ", hang_timeout_s=8, on_hang='stop'", raises="JobHung").raised
    assert f"line 4 in train: def train(): {put}" in error.value
    assert "Return the value instead" in error.value


@pytest.mark.parametrize("make", ["multiprocessing.Queue()", "torch.multiprocessing.Queue()"])
def test_queued_tensors_outlive_their_ranks(kernel: Kernel, make: str) -> None:
    kernel.run(
        f"{SETUP}queue = {make}\ndef train(): queue.put({{'small': torch.ones(2), 'large': torch.ones(10**6)}})"
    )
    launch(kernel, "fork")
    cell = kernel.run(
        "values = [queue.get(timeout=180) for _ in range(2)]\n"
        "[(value['small'].tolist(), value['large'].sum().item()) for value in values]"
    )
    assert cell.value == [([1.0, 1.0], 1e6)] * 2


def test_queued_values_arrive_after_an_error(kernel: Kernel) -> None:
    kernel.run(
        f"{SETUP}queue = multiprocessing.Queue()\n"
        "def train():\n"
        "    for number in range(3000): queue.put('x' * 100)\n"
        "    if os.environ['RANK'] == '0': raise ValueError('mine')"
    )
    assert launch(kernel, "fork", raises="ValueError").raised.value == "mine"
    # Rank 1 may have been interrupted before it put all values.
    assert kernel.run("sum(len(queue.get(timeout=180)) for _ in range(3000))").value == 300_000


def test_values_of_several_launches_stay_in_order(kernel: Kernel) -> None:
    kernel.run(
        f"{SETUP}queue = multiprocessing.Queue()\n"
        "def train(first):\n"
        "    for number in range(first, first + 3): queue.put((number, bytes(500_000)))\n"
        "queue.put((0, b''))\n"
        "for first in (1, 4): nblaunch.notebook_launcher(train, (first,), num_processes=1, dashboard='none')\n"
        "queue.put((7, b''))"
    )
    assert kernel.run("[queue.get(timeout=180)[0] for _ in range(8)]").value == list(range(8))


def test_a_kernel_reader_gets_all_values_in_order(kernel: Kernel) -> None:
    kernel.run(
        f"{SETUP}import threading\n"
        "queue, read = multiprocessing.Queue(), []\n"
        "def take():\n"
        "    while len(read) < 40: read.append(queue.get()[0])\n"
        "def train():\n"
        "    for number in range(40): queue.put((number, bytes(300_000)))\n"
        "reader = threading.Thread(target=take)\n"
        "reader.start()\n"
        "nblaunch.notebook_launcher(train, num_processes=1, dashboard='none')\n"
        "reader.join(180)"
    )
    assert kernel.run("read").value == list(range(40))


def test_a_rank_reads_what_another_has_put(kernel: Kernel) -> None:
    kernel.run(
        f"{SETUP}queue = multiprocessing.Queue()\n"
        "def train():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        for number in range(20): queue.put((number, bytes(300_000)))\n"
        "    else:\n"
        "        return [queue.get()[0] for _ in range(20)]"
    )
    assert launch(kernel, "fork").value == list(range(20))

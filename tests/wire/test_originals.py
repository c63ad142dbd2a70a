"""Tensors that a worker has changed in any way are distinguished from unchanged ones."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch.start_methods.fork import pause_pools
from nblaunch.wire import outbox
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.originals import Originals, Unchanged
from nblaunch.wire.pickling import payload

LARGE = 300_000  # number of elements; more bytes than are compared at once


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(LARGE), requires_grad=False)
        self.grid = nn.Parameter(torch.randn(8, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, 0.0]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", torch.empty(0))
        self.tied = self.weight


def nothing(net: Net) -> None:
    """Change nothing, like a function that uses a teacher model."""


def average(net: Net) -> None:
    with torch.no_grad():
        net.weight.lerp_(torch.ones(LARGE), 0.5)


def last_element(net: Net) -> None:
    net.weight.data[-1] += 1e-6


def numpy(net: Net) -> None:
    net.weight.detach().numpy()[LARGE // 2] = 3


def load(net: Net) -> None:
    net.load_state_dict({**net.state_dict(), "weight": torch.zeros(LARGE), "tied": torch.zeros(LARGE)})


def another_parameter(net: Net) -> None:
    net.weight = nn.Parameter(torch.zeros(LARGE))


def another_with_the_same_values(net: Net) -> None:
    net.weight = net.tied = nn.Parameter(net.weight.detach().clone())


def another_dtype(net: Net) -> None:
    net.weight.data = net.weight.data.view(torch.int32)


def another_layout(net: Net) -> None:
    net.grid.data = net.grid.data.contiguous()


def rearranged(net: Net) -> None:
    """Change values without changing bytes in memory."""
    net.grid.data = net.grid.data.permute(0, 2, 3, 1).reshape(8, 3, 4, 4)


def counted(net: Net) -> None:
    net.count += 1  # type: ignore[operator,assignment]


def signed_zero(net: Net) -> None:
    net.odd[2] = -0.0  # type: ignore[index,operator]


def two_names(net: Net) -> None:
    """Tie two weights: the tensor is unchanged under one name and changed under the other."""
    net.register_buffer("count", torch.tensor(0))
    net.weight.data.zero_()
    net.tied = net.weight


def moved(net: Net) -> None:
    net.double().float()


CHANGED: list[tuple[Callable[[Net], None], set[str]]] = [
    (nothing, set()),
    (average, {"weight", "tied"}),
    (last_element, {"weight", "tied"}),
    (numpy, {"weight", "tied"}),
    (load, {"weight", "tied"}),
    (another_parameter, {"weight"}),
    (another_with_the_same_values, set()),
    (another_dtype, {"weight", "tied"}),
    # the values are the same, but it is sent, because its bytes have another order
    (another_layout, {"grid"}),
    (rearranged, {"grid"}),
    (counted, {"count"}),
    (signed_zero, {"odd"}),
    (two_names, {"weight", "tied"}),
    (moved, set()),
]


def sent(module: nn.Module, originals: Originals) -> set[str]:
    """Return the names of sent tensors; check that the others are marked as unchanged, with their shapes."""
    state = module.state_dict()
    fd = create_memory_file("test")
    at, _, lost = outbox.Outbox(fd).put_state(0, state, originals.equality_tests(0, state))
    arrived = payload.load_mapped(fd, at)
    os.close(fd)
    assert not lost
    assert arrived.keys() == state.keys()
    names = {name for name, value in arrived.items() if not isinstance(value, Unchanged)}
    assert all(torch.equal(arrived[name].nan_to_num(), state[name].nan_to_num()) for name in names)
    assert all(value.shape == state[name].shape for name, value in arrived.items())
    return names - {"none"}  # empty tensors are not compared


def in_a_fork(function: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    can_use_threads = pause_pools()  # other tests of this process may have used the pools
    child = os.fork()
    if child == 0:
        try:
            if not can_use_threads:
                torch.set_num_threads(1)
            os.write(writing, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    assert answer, "the child failed; its traceback is in the output"
    return pickle.loads(answer)


@pytest.mark.parametrize(("change", "names"), CHANGED)
def test_a_forked_worker_finds_its_changes(change: Callable[[Net], None], names: set[str]) -> None:
    net = Net()
    originals = Originals.of_this_process()
    assert originals is not None

    def work() -> set[str]:
        originals.remember({0: net})
        change(net)
        return sent(net, originals)

    assert in_a_fork(work) == names
    os.close(originals.fd)


@pytest.mark.parametrize(("change", "names"), CHANGED)
def test_a_fresh_worker_finds_its_changes(change: Callable[[Net], None], names: set[str]) -> None:
    fd = create_memory_file("test")
    payload.dump(("something before", Net()), fd)
    (_, net), address = payload.load_mapped_with_address(fd)
    originals = Originals(fd, address)
    originals.remember({0: net})
    change(net)
    assert sent(net, originals) == names
    os.close(fd)


def test_unreadable_originals_count_as_changed() -> None:
    net = Net()
    originals = Originals.of_this_process()
    assert originals is not None
    originals.remember({0: net})
    assert sent(net, originals) == set()
    os.close(originals.fd)
    assert sent(net, originals) == {"weight", "tied", "grid", "odd", "count"}
    # nothing was recorded
    assert sent(net, Originals(originals.fd)) == {"weight", "tied", "grid", "odd", "count"}


def test_indirect_tensors_count_as_changed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(2)
            self.register_buffer("sparse", torch.eye(3).to_sparse())
            self.register_buffer("conjugated", torch.ones(3, dtype=torch.cfloat).conj())
            self.register_buffer("shape_only", torch.ones(3, device="meta"))
            self.register_buffer("plain", torch.ones(3))

    originals = Originals(-1)
    odd = Odd()
    originals.remember({0: odd})
    assert len(originals.equality_tests(0, odd.state_dict())) == 1
    assert originals.equality_tests(1, odd.state_dict()) == {}

"""Values in a memory file: read unchanged, with each tensor written once, and without remains of a failed value."""

from __future__ import annotations

import os
import pickle
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nblaunch.events import StateSent
from nblaunch.wire import outbox
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.pickling import payload

MB = 1 << 20


@pytest.fixture
def file() -> Iterator[int]:
    fd = create_memory_file("test")
    yield fd
    os.close(fd)


def there_and_back(value: Any) -> Any:
    fd = create_memory_file("test")
    try:
        payload.dump(value, fd)
        return payload.load_mapped(fd)
    finally:
        os.close(fd)


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
shapes = st.lists(st.integers(0, 40), max_size=3)


@given(shapes, dtypes, st.data())
def test_any_view_of_any_tensor(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    if shape:
        tensor = tensor.transpose(0, data.draw(st.integers(0, len(shape) - 1)))[
            :: data.draw(st.integers(1, 3))
        ]
    other = there_and_back([tensor])[0]
    assert torch.equal(other, tensor)
    assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)


def test_tied_tensors_stay_tied_and_copies_stay_separate() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    base = torch.zeros(10)
    other, one, two = there_and_back((model, base[:5], base[:5]))
    assert other[1].weight is other[0].weight
    one += 1
    assert (one.sum(), two.sum()) in ((5, 0), (5, 5))
    # A state dict has separate tensor objects on the same memory for tied weights; the memory is written once.
    fd = create_memory_file("test")
    state = {name: torch.zeros(MB) for name in "ab"} | {
        "tied": (big := torch.ones(MB)),
        "again": big.detach(),
    }
    payload.dump(state, fd)
    assert os.fstat(fd).st_size < 3.1 * 4 * MB
    os.close(fd)


def test_a_tensor_in_two_values_of_a_file_is_written_once(file: int) -> None:
    big = torch.arange(MB)
    writer = payload.PayloadWriter(file)
    places = [writer.append({"step": step, "big": big}) for step in range(3)]
    assert os.fstat(file).st_size < 8 * MB + 10_000
    for step, place in enumerate(places):
        loaded = payload.load_mapped(file, place)
        assert loaded["step"] == step
        assert torch.equal(loaded["big"], big)


def test_lazy_views_are_not_confused_with_their_base() -> None:
    """They differ from it only by a flag of the tensor; memory, shape and strides are the same."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    value = (base, base.conj(), base.imag, base.conj().imag)
    assert (value[1].is_conj(), value[3].is_neg()) == (True, True)
    assert [other.tolist() for other in there_and_back(value)] == [
        [1 + 2j, 3 - 4j],
        [1 - 2j, 3 + 4j],
        [2, -4],
        [-2, 4],
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_which_has_no_shape() -> None:
    nested = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)])
    assert [part.tolist() for part in there_and_back(nested).unbind()] == [[0, 1], [0, 1, 2]]


def test_a_failed_value_does_not_harm_the_next(file: int) -> None:
    writer = payload.PayloadWriter(file)
    first = writer.append("first")
    with pytest.raises(TypeError, match="lock"):
        writer.append({"big": torch.ones(MB), "lock": threading.Lock()})
    second = writer.append([torch.full((MB,), 2.0), np.arange(5000)])
    assert payload.load_mapped(file, first) == "first"
    tensor, array = payload.load_mapped(file, second)
    assert tensor.sum() == 2 * MB
    assert array.sum() == np.arange(5000).sum()


def test_temporary_tensors_are_not_confused(file: int) -> None:
    """Tensors that pickling creates are freed at once, and later ones may get the same memory and id."""

    class Lazy:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            return list, ([torch.full((2000,), float(self.number))],)

    writer = payload.PayloadWriter(file)
    place = writer.append([Lazy(number) for number in range(50)])
    other = writer.append([Lazy(number) for number in range(50, 60)])
    assert [item[0][0].item() for item in payload.load_mapped(file, place)] == list(range(50))
    assert [item[0][0].item() for item in payload.load_mapped(file, other)] == list(range(50, 60))


def test_loaded_values_outlive_the_file_and_are_writable() -> None:
    tensor, array = there_and_back((torch.zeros(5000), np.zeros(5000)))
    tensor += 1
    array += 1
    assert (tensor.sum(), array.sum()) == (5000, 5000)


def test_copied_values_keep_no_reference_to_the_file(file: int) -> None:
    """A loss that a caller keeps must not keep the weights next to it, nor a descriptor."""
    small, array, large = torch.ones(3), np.arange(5000), torch.arange(MB)
    at = payload.PayloadWriter(file).append(
        {"small": small, "array": array, "large": large, "tied": large[:]}
    )
    before = set(os.listdir("/proc/self/fd"))
    taken = payload.load_copied(file, at)
    assert set(os.listdir("/proc/self/fd")) == before
    assert (
        os.readlink(f"/proc/self/fd/{file}").removesuffix(" (deleted)")
        not in Path("/proc/self/maps").read_text()
    )
    os.ftruncate(file, 0)
    assert torch.equal(taken["small"], small)
    assert np.array_equal(taken["array"], array)
    assert torch.equal(taken["large"], large)
    taken["array"] += 1
    taken["large"] += 1
    assert torch.equal(taken["tied"], large + 1)


@pytest.mark.parametrize("load", [payload.load_mapped, payload.load_copied])
def test_views_share_memory_again(load: Any, file: int) -> None:
    numbers, array = torch.arange(1000.0), np.arange(1000)
    matrix, raw = torch.arange(12.0).reshape(3, 4), torch.zeros(64, dtype=torch.uint8)
    value = {
        "view first": (numbers[10:20], numbers),
        "strides": (matrix.t(), matrix[:, 1]),
        "array": (array[::-2], array),
        "tensor and array": ((both := torch.zeros(50)), both.numpy()[5:]),
        "element sizes": (raw[3:], raw[8:40].view(torch.float32)),
    }
    payload.dump(value, file)
    read = load(file)
    for name, (first, second) in value.items():
        for one, other in zip((first, second), read[name], strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other)), name
        assert np.shares_memory(np.asarray(read[name][0]), np.asarray(read[name][1])), name
    view, base = read["view first"]
    view[0] = -1
    assert base[10] == -1
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert read["strides"][0].stride() == (1, 4)


def test_a_view_is_sent_without_the_rest_of_its_memory(file: int) -> None:
    matrix = torch.zeros(1000, 1000)
    payload.dump((matrix[5, 10:20], matrix[:, 3], matrix[:, 7], np.zeros(10**6)[::1000]), file)
    assert os.fstat(file).st_size < 20_000
    assert [tuple(part.shape) for part in payload.load_mapped(file)] == [(10,), (1000,), (1000,), (1000,)]


def test_arrays_of_every_kind(file: int) -> None:
    record = np.zeros(5, dtype=[("a", "i4"), ("b", "f8")])
    value = [
        np.array(5), np.zeros((0, 3)), np.array(["a", "bb"]), np.array([None, 1], dtype=object),
        np.broadcast_to(3, (4,)), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(["2020-01-01"], "M8[D]"),
        record, record["b"],
    ]  # fmt: skip
    payload.dump(value, file)
    read = payload.load_copied(file)
    for one, other in zip(value, read, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
    assert np.shares_memory(read[-1], read[-2])


def test_copied_tensors_are_not_shared_with_children() -> None:
    """They behave like other tensors of the kernel: a worker that is forked later has its own copy."""
    fd = create_memory_file("test")
    payload.dump(torch.zeros(MB), fd)
    tensor = payload.load_copied(fd)
    os.close(fd)
    child = os.fork()
    if child == 0:
        tensor[0] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert tensor[0] == 0


def test_functions_and_classes_of_a_notebook_go_by_value() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "factor = 3\nclass Net:\n    size = factor\ndef train(x):\n    return Net.size * x * factor",
        namespace,
    )
    assert there_and_back(namespace["train"])(2) == 18


def test_the_memory_of_tensors_is_sent() -> None:
    tensor = torch.tensor([1.5, 2.5])
    same, memory, empty = there_and_back((tensor, tensor.untyped_storage(), torch.UntypedStorage(0)))
    assert torch.tensor([]).set_(memory).tolist() == [1.5, 2.5]
    assert (memory.nbytes(), empty.nbytes()) == (8, 0)
    same[0] = 3
    assert torch.tensor([]).set_(memory).tolist() == [3, 2.5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_sent_in_its_own_format() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    traced = torch.jit.trace(Net(), torch.ones(2))
    function = torch.jit.trace(lambda x: x + 1, torch.ones(2))
    sent, sent_function = there_and_back((traced, function))
    assert sent(torch.full((2,), 3.0)).tolist() == [3, 3]
    assert [name for name, _ in sent.named_parameters()] == ["weight"]
    assert sent_function(torch.ones(2)).tolist() == [2, 2]


def test_functions_may_use_modules_with_a_class_of_their_own() -> None:
    scope: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec("def f():\n    return torch.backends.cudnn, torch.backends", scope)
    assert type(torch.backends.cudnn) is not type(torch)
    copy = pickle.loads(payload.to_bytes(scope["f"], main_by_reference=False))
    assert copy() == (torch.backends.cudnn, torch.backends)


def test_an_outbox_keeps_the_picklable_parts(file: int) -> None:
    class Unreadable:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    weights = {
        0: {"w": torch.ones(3)},
        2: {"w": torch.zeros(2), "extra": threading.Lock()},
        3: {"x": Unreadable()},
    }
    box = outbox.Outbox(file)
    location = box.put_value({"fine": 1, "bad": [threading.Lock()]})
    assert location.unpicklable[0].startswith("result['bad'][0] (TypeError: ")
    sent = {}
    for place, state in weights.items():
        at, end, lost = box.put_state(place, state, {})
        sent[place] = StateSent(0, 1.0, path=place, at=at, end=end, lost=lost)
    assert sent[2].lost.startswith("args[2].state_dict()['extra'] (TypeError: ")
    sent[4] = StateSent(0, 1.0, path=4, error="MemoryError: ")
    result = outbox.read(file, location, sent)
    assert result.value["fine"] == 1
    assert result.value["bad"][0].why.startswith("TypeError")
    assert result.states[0]["w"].sum() == 3
    assert list(result.states[2]) == ["w"]
    assert "not a number" in result.state_errors[3]
    assert result.states.keys() == {0, 2}
    unreadable = outbox.read(file, outbox.Outbox(file).put_value(Unreadable()), {})
    assert (unreadable.value, "ValueError" in unreadable.value_error) == (None, True)


def test_a_full_disk_leaves_earlier_values_intact(file: int) -> None:
    """The written part of the weights does not stay in memory, either."""
    box = outbox.Outbox(file)
    location = box.put_value({"loss": torch.ones(1000)})
    size = os.fstat(file).st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MB, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            box.put_state(0, {"small": torch.ones(MB // 8), "large": torch.ones(MB)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.fstat(file).st_size < size + 100
    at, end, _ = box.put_state(0, {"small": torch.full((MB // 8,), 3.0)}, {})
    result = outbox.read(file, location, {0: StateSent(0, 1.0, at=at, end=end)})
    assert result.value["loss"].sum() == 1000
    assert result.states[0]["small"].unique().tolist() == [3.0]


def test_unfinished_outbox_data_is_freed(file: int) -> None:
    """The worker died while writing, perhaps because memory had run out."""
    box = outbox.Outbox(file)
    location = box.put_value("value")
    at, end, _ = box.put_state(0, {"w": torch.full((MB,), 2.0)}, {})
    box.put_state(1, {"w": torch.ones(4 * MB)}, {})
    result = outbox.read(file, location, {0: StateSent(0, 1.0, path=0, at=at, end=end)})
    assert os.fstat(file).st_size == end
    assert (result.value, result.states[0]["w"].unique().tolist()) == ("value", [2.0])
    assert outbox.read(file, location, {}).value == "value"
    assert os.fstat(file).st_size == location.end

"""Containers in batches: every mapping, sequence and dataclass keeps its class, keys and attributes."""

from __future__ import annotations

import dataclasses
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
    namedtuple,
)
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from nblaunch import Accelerator
from nblaunch.training.collectives import nested
from tests.training import ranks


class _Sized(dict[str, Any]):
    """A dict whose constructor does not take contents."""

    def __init__(self, size: int = 0, *, name: str) -> None:
        super().__init__()
        self.size, self.name = size, name


class _Silent(dict[str, Any]):
    """A dict whose constructor ignores contents."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()


class _Named(list[Any]):
    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.name = name


class _Pair(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> _Pair:
        return tuple.__new__(cls, (first, second))


class _Edge(namedtuple("_Edge", "x weight")):
    def __new__(cls, x: Any) -> _Edge:
        return super().__new__(cls, x, 0.5)


class _Point(NamedTuple):
    x: Any
    y: int = 3


class _Store(MutableMapping[str, Any]):
    def __init__(self, label: str) -> None:
        self.label, self._items = label, dict[str, Any]()

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class _Rows(_Store):
    """Iterates over rows and has no truth value, like tensordict's ``TensorDict``."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items["x"])

    def __len__(self) -> int:
        return len(self._items["x"])

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    def keys(self) -> Any:
        return self._items.keys()

    def values(self) -> Any:
        return self._items.values()


class _Fixed(Sequence[Any]):
    def __init__(self, items: Any) -> None:
        self.items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class _Shared(MutableSequence[Any]):
    """A mapping whose copies share their contents."""

    __slots__ = ("items",)

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.items[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def insert(self, index: int, value: Any) -> None:
        self.items.insert(index, value)


@dataclasses.dataclass(frozen=True)
class _Frozen:
    x: Any
    note: str = dataclasses.field(init=False, default="kept")
    seed: dataclasses.InitVar[int] = 1


@dataclasses.dataclass(slots=True)
class _Slotted:
    x: Any
    count: int


@attrs.frozen
class _Attrs:
    x: Any
    name: str


def _with(container: Any, tensor: torch.Tensor) -> Any:
    container["x"] = tensor
    return container


def _named(tensor: torch.Tensor) -> _Named:
    made = _Named("boxes", 1)
    made.append(tensor)
    return made


# Kind of container -> how to create one around a tensor, and the other properties to keep.
KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "defaultdict": (lambda x: defaultdict(list, x=x), lambda made: (made.default_factory, made["new"])),
    "OrderedDict": (lambda x: OrderedDict(b=1, x=x), list),
    "Counter": (lambda x: Counter(x=x), lambda made: made["missing"]),
    "UserDict": (lambda x: UserDict(x=x, text="a"), lambda made: made["text"]),
    "UserList": (lambda x: UserList([x, "a"]), lambda made: made[1]),
    "deque": (lambda x: deque([x], maxlen=3), lambda made: made.maxlen),
    "dict with another constructor": (
        lambda x: _with(_Sized(4, name="n"), x),
        lambda made: (made.size, made.name),
    ),
    "dict that ignores contents": (lambda x: _with(_Silent(), x), len),
    "list with another constructor": (_named, lambda made: made.name),
    "tuple with another constructor": (lambda x: _Pair(x, 2), lambda made: made[1]),
    "named tuple with another constructor": (_Edge, lambda made: made.weight),
    "NamedTuple": (_Point, lambda made: made.y),
    "torch.return_types": (lambda x: torch.max(x.reshape(1, -1), 0), lambda made: made.indices.tolist()),
    "read-only mapping": (lambda x: MappingProxyType({"x": x}), list),
    "ChainMap": (lambda x: ChainMap({"x": x}, {"below": 1}), lambda made: made["below"]),
    "mapping of one's own": (lambda x: _with(_Store("s"), x), lambda made: made.label),
    "mapping that iterates over rows": (lambda x: _with(_Rows("r"), x), lambda made: (len(made), made.label)),
    "sequence of one's own": (lambda x: _Fixed([x, 1]), lambda made: made[1]),
    "frozen dataclass": (_Frozen, lambda made: made.note),
    "dataclass with slots": (lambda x: _Slotted(x, 2), lambda made: made.count),
    "attrs": (lambda x: _Attrs(x, "n"), lambda made: made.name),
    "transformers' output": (
        lambda x: SequenceClassifierOutput(logits=x),
        lambda made: (list(made), made.logits is made["logits"], made.loss),
    ),
    "transformers' batch": (lambda x: BatchEncoding({"x": x}, n_sequences=2), lambda made: made.n_sequences),
    "shape": (lambda x: {"shape": torch.Size([2]), "x": x}, lambda made: made["shape"]),
}


def _tensors(data: Any) -> list[torch.Tensor]:
    return [leaf for leaf in nested.leaves(data) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_containers_keep_class_and_contents(kind: str) -> None:
    make, rest_of = KINDS[kind]
    half = torch.ones(2, dtype=torch.float16)
    given = make(half)
    made = nested.convert_to_fp32(given)
    assert type(made) is type(given)
    assert [one.dtype for one in _tensors(made) if one.is_floating_point()] == [torch.float32]
    assert [one.dtype for one in _tensors(given) if one.is_floating_point()] == [torch.float16], (
        "left as it is"
    )
    assert rest_of(made) == rest_of(given)
    assert nested.count_rows(given) == 2
    moved = nested.send_to_device(make(half), "meta")
    assert type(moved) is type(given)
    assert all(one.is_meta for one in _tensors(moved))
    joined = nested.concatenate([make(half), make(half)]) if _is_of_tensors(given) else None
    assert joined is None or [len(one) for one in _tensors(joined)] == [
        2 * len(one) for one in _tensors(given)
    ]


def _is_of_tensors(data: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in nested.leaves(data))


def _gathered() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = torch.tensor([float(accelerator.process_index)])
    made: dict[str, Any] = {}
    for kind in ("defaultdict", "deque", "dict with another constructor", "read-only mapping"):
        container = accelerator.gather(KINDS[kind][0](rank))
        made[kind] = type(container).__name__, [one.tolist() for one in _tensors(container)]
    return made


def test_ranks_gather_containers() -> None:
    names = ["defaultdict", "deque", "_Sized", "mappingproxy"]
    for made in ranks.run(_gathered, 2):
        assert list(made.values()) == [(name, [[0.0, 1.0]]) for name in names]


def test_uncopyable_containers_raise() -> None:
    tensor = torch.ones(2, dtype=torch.float16)
    given = _Shared([tensor])
    with pytest.raises(
        TypeError, match=r"can't create a _Shared with other tensors in it \(copy.copy returns a copy that"
    ):
        nested.convert_to_fp32(given)
    assert given[0] is tensor

    class Odd(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return {"x": tensor}[key]

        def __iter__(self) -> Iterator[str]:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(TypeError, match="can't create an Odd with other tensors in it"):
        nested.convert_to_fp32(Odd())
    assert nested.convert_to_fp32(unchanged := _Fixed(["a"])) is unchanged


def test_a_packed_sequence_is_neither_joined_nor_cut() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    for operation, call in {
        "concatenate": lambda: nested.concatenate([[packed], [packed]]),
        "slice_tensors": lambda: nested.slice_tensors({"x": packed}, slice(1)),
    }.items():
        with pytest.raises(
            TypeError, match=f"{operation} can't join or cut a PackedSequence.*pad_packed_sequence"
        ):
            call()


def test_str_subclasses_are_leaves() -> None:
    """Iterating over a UserString yields UserStrings without end."""
    text = UserString("hi")
    assert list(nested.leaves([text, 1])) == [text, 1]

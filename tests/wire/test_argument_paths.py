"""Paths of modules in the arguments of a call are the same in the kernel and in a worker."""

from __future__ import annotations

import argparse
import enum
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch
from torch import nn

from nblaunch.wire.argument_paths import modules_at, modules_in, optimizers_at, optimizers_in, path_name


class Kind(enum.Enum):
    TEACHER = 1


@dataclass
class Setup:
    model: Any
    rate: float = 0.1
    others: list[Any] = field(default_factory=list)


Pair = namedtuple("Pair", "left right")


def net() -> nn.Module:
    return nn.Linear(2, 2)


def paths(*args: Any) -> list[Any]:
    return list(modules_in(args))


def test_arguments_are_named_by_their_positions() -> None:
    first, second = net(), net()
    assert modules_in((1, first, "x", second)) == {1: first, 3: second}
    assert modules_in((1, None)) == {}


def test_containers_are_looked_through() -> None:
    assert paths([1, net()], (net(),)) == ["args[0][1]", "args[1][0]"]
    assert paths({"generator": net(), "rate": 0.1, 3: [net()]}) == ["args[0]['generator']", "args[0][3][0]"]
    assert paths(Setup(net(), others=[net()])) == ["args[0].model", "args[0].others[0]"]
    assert paths(SimpleNamespace(a=net()), argparse.Namespace(b=net())) == ["args[0].a", "args[1].b"]
    assert paths(Pair(net(), 1), OrderedDict(x=net())) == ["args[0].left", "args[1]['x']"]
    assert paths({Kind.TEACHER: net(), object(): net()}) == ["args[0][<Kind.TEACHER: 1>]", "args[0][key 1]"]


def test_attributes_that_a_dataclass_does_not_declare_are_found() -> None:
    """As in TabNet's estimators, whose ``fit`` creates the network."""
    setup = Setup(1)
    setup.network = net()  # type: ignore[attr-defined]
    assert paths(setup) == ["args[0].network"]


def test_each_module_is_listed_once() -> None:
    model = net()
    assert paths(model, model, [model]) == [0]
    assert paths([model, model], {"again": model}) == ["args[0][0]"]


def test_a_module_inside_another_is_not_listed() -> None:
    encoder = net()
    whole = nn.Sequential(encoder, net())
    assert paths(encoder, whole) == [1]
    assert paths({"whole": whole, "encoder": encoder}) == ["args[0]['whole']"]
    assert paths([encoder], [whole, encoder]) == ["args[1][0]"]


def test_cycles_and_deep_nesting_end() -> None:
    circle: list[Any] = [net()]
    circle.append(circle)
    assert paths(circle) == ["args[0][0]"]
    assert paths([[[[net()]]]]) == ["args[0][0][0][0][0]"]
    assert paths([[[[[net()]]]]]) == []


def test_plain_data_is_not_searched() -> None:
    class Looked(list[int]):
        """A container that counts how often it is searched."""

        num_looks = 0

        def __iter__(self) -> Iterator[int]:
            Looked.num_looks += 1
            return super().__iter__()

    row = Looked(range(1000))
    assert paths([row] * 1001, {str(i): row for i in range(1001)}) == []
    assert Looked.num_looks == 0
    assert paths([row]) == []
    assert Looked.num_looks == 1


class Learner:
    """A user's class with the objects that it trains."""

    def __init__(self) -> None:
        self.parts = {"generator": net()}
        self.model = net()
        self.owner = self


def test_modules_in_user_objects_are_found() -> None:
    assert paths(Learner()) == ["args[0].parts['generator']", "args[0].model"]
    assert paths([Learner]) == []


def test_misleading_objects_are_harmless() -> None:
    class Liar:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("no")

    assert paths([Liar()]) == []


def test_an_unset_field_is_skipped() -> None:
    setup = Setup(net())
    del setup.others
    setup.__class__ = type("Bare", (Setup,), {})
    assert paths(setup) == ["args[0].model"]


def test_places_are_the_same_in_another_process() -> None:
    shared = net()
    args = ({"a": shared, "b": [shared, net()]}, Setup(net()), net())
    sent = pickle.loads(pickle.dumps(args))
    assert list(modules_in(sent)) == list(modules_in(args))
    wanted = tuple(modules_in(args))
    assert list(modules_at(sent, wanted)) == list(wanted)
    assert modules_at(sent, wanted)["args[0]['a']"] is sent[0]["a"]
    assert modules_at(sent, (2,)) == {2: sent[2]}
    assert modules_at(sent, ()) == {}
    assert [path_name(path) for path in wanted][-1] == "args[2]"


def test_modules_lost_by_pickling_are_left_out() -> None:
    class Leaves(Learner):
        def __getstate__(self) -> dict[str, Any]:
            return {"model": self.model}

    class Replaced(nn.Linear):
        def __reduce__(self) -> Any:
            return str, ("a name",)

    args = (Leaves(), Replaced(1, 1))
    args[0].optimizer = torch.optim.SGD(args[0].model.parameters(), 0.1)  # type: ignore[attr-defined]
    sent = cloudpickle.loads(cloudpickle.dumps(args))
    assert list(modules_in(args)) == ["args[0].parts['generator']", "args[0].model", 1]
    assert list(modules_at(sent, tuple(modules_in(args)))) == ["args[0].model"]
    assert modules_at(sent, (1,)) == {}
    assert list(optimizers_in(args)) == ["args[0].optimizer"]
    assert optimizers_at(sent, tuple(optimizers_in(args))) == {}


def test_schedulers_are_found_beside_their_optimizers_only() -> None:
    optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0])
    args = (schedulers, {"of": optimizers[0]}, plateau)
    assert list(optimizers_in(args)) == ["args[0][0]", "args[1]['of']", "args[2]"]
    assert list(optimizers_at(args, ("args[2]",))) == ["args[2]"]
    assert optimizers_in(schedulers) == {}

"""Naming parts that can't be pickled."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset
from torch.utils.tensorboard import SummaryWriter

from nblaunch.wire.pickling import pickle_errors

LOCK = threading.Lock()


def named(value: Any) -> list[str]:
    return [part.name for part in pickle_errors.unpicklable_parts(value, "result")]


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_the_smallest_parts_are_named() -> None:
    assert named(LOCK) == ["result"]
    assert named({"a": 1, "b": LOCK}) == ["result['b']"]
    assert named([1, (2, {"x": Holder(inner=LOCK, fine=3)})]) == ["result[1][1]['x'].inner"]
    assert named({"fine": [1, 2]}) == []


def test_objects_of_the_standard_library_are_named_as_a_whole() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        [(name, why, _)] = pickle_errors.unpicklable_parts({"pool": pool}, "result")
    assert name == "result['pool']"
    assert "pool objects" in str(why)
    assert named([queue.Queue(), threading.Thread()]) == ["result[0]", "result[1]"]
    assert named(argparse.Namespace(lock=LOCK)) == ["result.lock"]


def test_objects_of_libraries_are_named_as_a_whole(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        [(name, why, _)] = pickle_errors.unpicklable_parts({"writer": writer}, "result")
        assert named([Holder(writer=writer)]) == ["result[0].writer"]
    assert name == "result['writer']"
    assert "SummaryWriter" in str(why)


def test_a_users_part_of_a_librarys_object_is_named() -> None:
    assert named(Subset(Holder(lock=LOCK), [0])) == ["result.dataset.lock"]  # type: ignore[arg-type]


def test_few_are_named_of_many_and_depth_ends() -> None:
    assert len(named([LOCK] * 1000)) <= 10
    nested: Any = LOCK
    for _ in range(50):
        nested = [nested]
    assert named(nested) == ["result[0][0][0][0]"]


def test_cycles_end() -> None:
    circle: dict[str, Any] = {"lock": LOCK}
    circle["self"] = [circle]
    assert "result['lock']" in named(circle)
    one, two = Holder(), Holder(lock=LOCK)
    one.other, two.other = two, one
    assert "result.other.lock" in named(one)


def test_variables_of_a_call() -> None:
    guard = threading.Lock()

    def train(model: object, config: object) -> object:
        return guard, LOCK, model, config

    names = {part.name for part in pickle_errors.unpicklable_variables(train, (1, {"lock": guard}))}
    assert names >= {"guard", "config['lock']"}


class Trainer:
    def __init__(self, lock: object) -> None:
        self.lock = lock

    def fit(self, model: object) -> None:
        """Train."""

    __call__ = fit


def logged(function: Callable[..., Any], lock: object) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: object) -> object:
        return lock, function(*args)

    return wrapper


def fit(model: object, extra: object, *, lr: object = 1) -> None:
    """Train."""


CALLS: list[tuple[Any, tuple[Any, ...], str]] = [
    (Trainer(LOCK).fit, (1,), "self.lock"),
    (Trainer(LOCK), (1,), "self.lock"),
    (functools.partial(fit, lr=LOCK), (1, 2), "lr"),
    (functools.partial(fit, 1, LOCK), (), "extra"),
    (functools.partial(fit, 1), (LOCK,), "extra"),
    (functools.partial(Trainer(LOCK).fit, 1), (), "self.lock"),
    (lambda model, guard=LOCK: model, (1,), "guard"),
    (logged(fit, LOCK), (1, 2), "lock"),
    (logged(functools.partial(fit, lr=LOCK), 1), (1, 2), "lr"),
]


@pytest.mark.parametrize(("function", "args", "name"), CALLS)
def test_variables_of_other_callables(function: Any, args: tuple[Any, ...], name: str) -> None:
    assert [part.name for part in pickle_errors.unpicklable_variables(function, args)] == [name]


def test_pruning_keeps_the_rest_and_never_raises() -> None:
    class Nasty:
        def __reduce__(self) -> Any:
            raise RuntimeError("no")

        def __repr__(self) -> str:
            raise ValueError("not even this")

    pruned = pickle_errors.without_unpicklable({"a": [1, LOCK, (2, Nasty())], "b": {3}})
    assert pruned["b"] == {3}
    assert pruned["a"][0] == 1
    assert pruned["a"][1].why.startswith("TypeError: cannot pickle")
    assert pruned["a"][2][0] == 2
    assert "Nasty" in pruned["a"][2][1].description

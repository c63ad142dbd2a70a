"""Sending exceptions: type, message, attributes, notes, causes; and exceptions that can't be sent."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import pytest
import torch

from nblaunch.errors import WorkerDied
from nblaunch.wire import exceptions
from tests.odd_exceptions import Frozen, Mute


class Custom(Exception):
    pass


class Required(Exception):
    def __init__(self, status: int, *, reason: str) -> None:
        super().__init__(f"status {status}: {reason}")
        self.status = status
        self.reason = reason


class Outer:
    class Inner(Exception):
        pass


class Once(Exception):
    made = False

    def __new__(cls, *args: Any) -> Once:
        if cls.made:
            raise RuntimeError("only one of these may exist")
        cls.made = True
        return super().__new__(cls, *args)


class Liar(Exception):
    def __reduce__(self) -> Any:
        return (ValueError, ("something else",))


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU, and can be read without one."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(2)


def there_and_back(error: BaseException) -> BaseException:
    body = exceptions.dump(error)
    assert body is not None
    return exceptions.load(body)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the loss is nan"),
        KeyError("lr"),
        KeyboardInterrupt("by hand"),
        SystemExit(3),
        FileNotFoundError(2, "No such file", "data.csv"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StopIteration(5),
        Custom("mine", 3),
        Outer.Inner("mine"),
        WorkerDied("rank 1 died", rank=1, exitcode=-9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_arguments_and_text_arrive(error: BaseException) -> None:
    arrived = there_and_back(error)
    assert type(arrived) is type(error)
    assert (arrived.args, str(arrived)) == (error.args, str(error))
    assert vars(arrived) == vars(error)


def test_required_constructor_arguments() -> None:
    arrived = there_and_back(Required(503, reason="busy"))
    assert isinstance(arrived, Required)
    assert (str(arrived), arrived.status, arrived.reason) == ("status 503: busy", 503, "busy")


def test_an_exception_whose_str_raises_arrives() -> None:
    arrived = there_and_back(Mute(3))
    assert type(arrived) is Mute
    assert arrived.args == (3,)


def test_a_class_that_forbids_attributes_keeps_its_chain() -> None:
    error = Frozen(5)
    try:
        raise error from Frozen(4)
    except Frozen:
        arrived = there_and_back(error)
    assert arrived == Frozen(5)
    assert arrived.__cause__ == Frozen(4)
    exceptions.set_attribute(arrived, "__notes__", ["a note"])
    assert arrived.__notes__ == ["a note"]  # type: ignore[attr-defined]


def test_the_whole_chain_arrives() -> None:
    try:
        try:
            try:
                raise KeyError("lr")
            except KeyError as missing:
                raise Required(1, reason="config") from missing
        except Required:
            raise ValueError("while handling", threading.Lock())  # noqa: B904 - a context is wanted
    except ValueError as error:
        arrived = there_and_back(error)
    assert arrived.args[0] == "while handling"
    assert isinstance(arrived.__context__, Required)
    assert isinstance(arrived.__context__.__cause__, KeyError)
    assert not arrived.__suppress_context__


def test_a_suppressed_context_stays_suppressed() -> None:
    try:
        try:
            raise KeyError("lr")
        except KeyError:
            raise ValueError("clean") from None
    except ValueError as error:
        arrived = there_and_back(error)
    assert arrived.__suppress_context__
    assert arrived.__cause__ is None


def test_an_endless_chain_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert str(there_and_back(first)) == "first"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups and notes are of Python 3.11")
def test_groups_and_notes() -> None:
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("inner", [TypeError("b")])])  # noqa: F821  # novm
    group.add_note("by the user")
    arrived: Any = there_and_back(group)
    assert [str(e) for e in arrived.exceptions] == ["a", "inner (1 sub-exception)"]
    assert arrived.subgroup(TypeError) is not None
    assert arrived.__notes__ == ["by the user"]


def test_unpicklable_parts_are_left_out() -> None:
    error = Custom("kept", threading.Lock())
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.step = 3  # type: ignore[attr-defined]
    arrived = there_and_back(error)
    assert arrived.args[0] == "kept"
    assert "lock" in arrived.args[1]
    assert vars(arrived) == {"step": 3}


@pytest.mark.parametrize("make", [lambda: Once(3), lambda: Liar("x")], ids=["Once", "Liar"])
def test_unpicklable_exceptions_are_sent_as_text_or_parts(make: Any) -> None:
    error = make()
    body = exceptions.dump(error)
    assert body is None or type(exceptions.load(body)) is type(error)


def test_a_tensor_on_a_device_arrives_on_the_cpu() -> None:
    """Otherwise the kernel would open the device to show the error, and could no longer be forked."""
    tensor: Any = torch.zeros(2).as_subclass(OnDevice).requires_grad_()
    tensor.label = "loss"
    arrived = there_and_back(AssertionError(tensor)).args[0]
    assert type(arrived) is torch.Tensor
    assert (arrived.tolist(), arrived.requires_grad, arrived.label) == ([1, 1], True, "loss")


def test_huge_messages_are_sent_as_text() -> None:
    assert exceptions.dump(ValueError("x" * (65 << 20))) is None


@pytest.mark.parametrize(
    "error", [ValueError("long", 3), Required(4, reason="config"), OSError(2, "gone", "a.txt"), Frozen(5)]
)
def test_the_text_can_be_replaced(error: BaseException) -> None:
    exceptions.set_attribute(error, "__cause__", KeyError("lr"))
    changed = exceptions.with_text(error, "short")
    assert str(changed) == "short"
    assert isinstance(changed, type(error).__mro__[1])
    assert type(changed).__name__ == type(error).__name__
    assert changed.args == error.args
    assert isinstance(changed.__cause__, KeyError)
    if isinstance(error, OSError):
        assert isinstance(changed, OSError)
        assert (changed.errno, changed.filename) == (2, "a.txt")


def test_an_exception_with_a_changed_text_is_pickled_unchanged() -> None:
    changed = exceptions.with_text(ValueError("long"), "short")
    again = pickle.loads(pickle.dumps(changed))
    assert type(again) is ValueError
    assert str(again) == "long"


@pytest.mark.parametrize("outcome", [pytest.skip, pytest.fail, pytest.xfail, pytest.exit])
def test_outcomes_of_pytest_keep_their_type(outcome: Any) -> None:
    with pytest.raises(outcome.Exception) as raised:
        outcome("why")
    body = exceptions.dump(raised.value)
    assert body is not None
    arrived = exceptions.load(body)
    assert type(arrived) is outcome.Exception
    assert str(arrived) == "why"
    assert vars(arrived) == vars(raised.value)

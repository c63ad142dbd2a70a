"""A worker's exception as raised in the kernel, with a traceback rebuilt from the sent frames."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path

import pytest

from nblaunch.diagnosis.exceptions import make_traceback, rebuild
from nblaunch.errors import WorkerFailed
from nblaunch.events import Failed, FrameInfo
from nblaunch.worker.failure import describe_failure
from tests.odd_exceptions import Frozen, Mute


def failure(error: BaseException, cause: BaseException | None = None) -> Failed:
    """Return the event that a worker would send for ``error``, raised in a function of this file."""

    def train() -> None:
        if cause is None:
            raise error
        raise error from cause

    try:
        train()
    except BaseException as raised:
        return describe_failure(1, raised)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4242"), True),
        (ConnectionRefusedError(111, "Connection refused"), False),
        (OSError("<urlopen error [Errno 32] Broken pipe>"), False),
        (RuntimeError("Broken pipe"), True),
    ],
)
def test_only_collective_errors_are_consequences(error: Exception, is_consequence: bool) -> None:
    """An upload at the end of the function fails by itself, even though other ranks have returned before."""
    import torch.distributed  # noqa: F401  as in every worker that trains

    assert failure(error).is_consequence == is_consequence
    assert failure(ValueError("upload failed"), cause=error).is_consequence == is_consequence


def test_upload_errors_are_not_consequences() -> None:
    import torch.distributed  # noqa: F401

    refused = ConnectionRefusedError(111, "Connection refused")
    error = RuntimeError(f"upload failed: {refused}")
    assert not failure(error, cause=refused).is_consequence
    between = ValueError(f"no answer: {refused}")
    between.__context__ = refused
    assert not failure(error, cause=between).is_consequence
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4242")
    assert failure(lost, cause=FileNotFoundError("last.pt")).is_consequence


def frame(name: str, lineno: int = 1, *, is_user: bool = True, filename: str = "train.py") -> FrameInfo:
    return FrameInfo(filename, lineno, name, "", is_user)


def names_in(error: BaseException | None) -> list[str]:
    assert error is not None
    return [entry.name for entry in traceback.extract_tb(error.__traceback__)]


def test_the_original_arrives_with_its_workers_frames() -> None:
    rebuilt = rebuild(failure(ValueError("the loss is nan")))
    assert type(rebuilt) is ValueError
    assert rebuilt.args == ("the loss is nan",)
    assert rebuilt.__cause__ is None
    assert names_in(rebuilt) == ["failure", "train"]


def test_causes_are_kept() -> None:
    rebuilt = rebuild(failure(RuntimeError("no learning rate"), KeyError("lr")))
    assert isinstance(rebuilt.__cause__, KeyError)
    assert rebuilt.__cause__.__traceback__ is None  # this one was never raised


def test_causes_and_contexts_have_their_own_frames() -> None:
    def load() -> None:
        try:
            look_up()
        except KeyError:
            raise ValueError("no rate")  # noqa: B904 - a context is wanted

    def look_up() -> None:
        raise KeyError("lr")

    try:
        load()
    except ValueError as raised:
        rebuilt = rebuild(describe_failure(1, raised))
    assert isinstance(rebuilt.__context__, KeyError)
    assert names_in(rebuilt.__context__) == ["load", "look_up"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has exception groups from 3.11 on")
def test_members_of_a_group_have_their_own_frames() -> None:
    def read(path: str) -> None:
        raise OSError(path)

    found: list[Exception] = []
    for path in ("a", "b"):
        try:
            read(path)
        except OSError as error:
            found.append(error)
    rebuilt = rebuild(failure(ExceptionGroup("both", found)))  # noqa: F821  # novm
    assert names_in(rebuilt) == ["failure", "train"]
    assert [names_in(part)[-1] for part in rebuilt.exceptions] == ["read", "read"]  # type: ignore[attr-defined]


def test_a_class_that_takes_no_attributes_gets_its_frames() -> None:
    rebuilt = rebuild(failure(Frozen(5)))
    assert type(rebuilt) is Frozen
    assert rebuilt.code == 5
    assert names_in(rebuilt) == ["failure", "train"]


def test_an_exception_whose_str_raises_gets_a_text() -> None:
    rebuilt = rebuild(failure(Mute(3)))
    assert isinstance(rebuilt, Mute)
    assert type(rebuilt).__name__ == "Mute"
    assert rebuilt.args == (3,)
    assert str(rebuilt) == "<its message can't be shown: str() raises RuntimeError>"


def test_unpicklable_attributes_are_reported() -> None:
    sent = dataclasses.replace(failure(ValueError("x"), KeyError("lr")), exception=None)
    rebuilt = rebuild(sent)
    assert isinstance(rebuilt, WorkerFailed)
    assert rebuilt.rank == 1
    assert str(rebuilt).startswith("rank 1 raised ValueError: x\n")
    assert names_in(rebuilt) == ["failure", "train"]
    assert (type(rebuilt.__cause__).__name__, str(rebuilt.__cause__)) == ("KeyError", "'lr'")


def test_an_unreadable_exception_says_why() -> None:
    sent = dataclasses.replace(failure(ValueError("x")), exception=b"not a pickle")
    rebuilt = rebuild(sent)
    assert isinstance(rebuilt, WorkerFailed)
    assert "can't be rebuilt in this process (" in str(rebuilt)


def test_a_rebuilt_exception_can_be_raised_caught_and_printed() -> None:
    with pytest.raises(ValueError) as caught:
        raise rebuild(failure(ValueError("the loss is nan")))
    printed = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert printed.count("in train") == 1
    assert (
        printed.index("raise rebuild")
        < printed.index("in train")
        < printed.index("ValueError: the loss is nan")
    )


def test_rebuilt_tracebacks_name_file_line_and_function(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def train():\n    prepare()\n\ndef prepare():\n    raise ValueError\n")
    frames = [frame("train", 2, filename=str(file)), frame("<lambda>", 5, filename=str(file))]
    made = traceback.extract_tb(make_traceback(frames))
    assert [(entry.filename, entry.lineno, entry.name, entry.line) for entry in made] == [
        (str(file), 2, "train", "prepare()"),
        (str(file), 5, "<lambda>", "raise ValueError"),
    ]
    assert make_traceback([]) is None


def test_errors_without_a_line_are_described() -> None:
    """An interrupt may come at an instruction without a line number."""

    def loop() -> None:
        raise KeyboardInterrupt

    # Source: CPython's Objects/locations.md, on instructions without a location.
    loop.__code__ = loop.__code__.replace(co_linetable=b"\xff" * 8)
    with pytest.raises(KeyboardInterrupt) as caught:
        loop()
    failed = describe_failure(0, caught.value)
    assert failed.info.frames[-1].lineno == loop.__code__.co_firstlineno
    assert names_in(rebuild(failed))[-1] == "loop"

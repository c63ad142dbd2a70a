"""A worker's exception as the kernel raises it, and tracebacks made of what travelled."""

from __future__ import annotations

import dataclasses
import linecache
import traceback
from pathlib import Path
from typing import Any

import pytest

from nblaunch.errors import RemoteTraceback, WorkerFailed
from nblaunch.events import ExceptionInfo, Failed, FrameInfo
from nblaunch.launch.diagnosis.rendering import make_traceback, with_sources, worth_showing
from nblaunch.launch.diagnosis.reraise import rebuild
from nblaunch.wire import exceptions
from nblaunch.worker.failure import describe_failure


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def failure(error: BaseException, cause: BaseException | None = None) -> Failed:
    """What a worker would tell of ``error``, raised in a function of this file."""

    def train() -> None:
        if cause is None:
            raise error
        raise error from cause

    try:
        train()
    except BaseException as raised:
        return describe_failure(1, raised)
    raise AssertionError("nothing was raised")


def frame(name: str, lineno: int = 1, *, is_user: bool = True, filename: str = "train.py") -> FrameInfo:
    return FrameInfo(filename, lineno, name, "", is_user)


def test_the_original_arrives_with_its_worker_as_cause() -> None:
    rebuilt = rebuild(failure(ValueError("the loss is nan")), ["rank 1 on host", "rank 0: finished"])
    assert type(rebuilt) is ValueError
    assert rebuilt.args == ("the loss is nan",)
    assert rebuilt.__notes__ == ["rank 1 on host", "rank 0: finished"]  # type: ignore[attr-defined]
    cause = rebuilt.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert str(cause).startswith("\nrank 1:\nTraceback (most recent call last)")
    assert "raise error" in str(cause)
    names = [entry.name for entry in traceback.extract_tb(cause.__traceback__)]
    assert names == ["failure", "train"]


def test_causes_stay_in_reach() -> None:
    rebuilt = rebuild(failure(RuntimeError("no learning rate"), KeyError("lr")), [])
    assert rebuilt.__cause__ is not None
    assert isinstance(rebuilt.__cause__.__cause__, KeyError)


def test_notes_of_the_user_come_first() -> None:
    error = ValueError("x")
    exceptions.set_attribute(error, "__notes__", ["by the user"])
    assert rebuild(failure(error), ["by us"]).__notes__ == ["by the user", "by us"]  # type: ignore[attr-defined]


def test_a_class_that_takes_no_attributes_gets_its_notes_and_cause() -> None:
    rebuilt = rebuild(failure(Frozen(5)), ["by us"])
    assert type(rebuilt) is Frozen
    assert rebuilt.code == 5
    assert isinstance(rebuilt.__cause__, RemoteTraceback)
    assert rebuilt.__notes__ == ["by us"]  # type: ignore[attr-defined]


def test_an_exception_without_a_text_gets_one_and_stays_what_it_is() -> None:
    rebuilt = rebuild(failure(Mute(3)), [])
    assert isinstance(rebuilt, Mute)
    assert type(rebuilt).__name__ == "Mute"
    assert rebuilt.args == (3,)
    assert str(rebuilt) == "<its message can't be shown: str() raises RuntimeError>"


def test_what_can_not_travel_is_told() -> None:
    told = dataclasses.replace(failure(ValueError("x")), exception=None)
    rebuilt = rebuild(told, [])
    assert isinstance(rebuilt, WorkerFailed)
    assert rebuilt.rank == 1
    assert str(rebuilt).startswith("rank 1 raised ValueError: x\n")
    assert isinstance(rebuilt.__cause__, RemoteTraceback)


def test_what_can_not_be_read_here_says_why() -> None:
    told = dataclasses.replace(failure(ValueError("x")), exception=b"not a pickle")
    rebuilt = rebuild(told, [])
    assert isinstance(rebuilt, WorkerFailed)
    assert "can't be rebuilt in this process (" in str(rebuilt)


def test_a_rebuilt_exception_can_be_raised_caught_and_printed() -> None:
    with pytest.raises(ValueError) as caught:
        raise rebuild(failure(ValueError("the loss is nan")), ["rank 1 on host"])
    printed = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert (
        printed.index("rank 1:")
        < printed.index("direct cause")
        < printed.rindex("ValueError: the loss is nan")
    )


def test_made_tracebacks_name_file_line_and_function(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def train():\n    prepare()\n\ndef prepare():\n    raise ValueError\n")
    frames = [frame("train", 2, filename=str(file)), frame("<lambda>", 5, filename=str(file))]
    made = traceback.extract_tb(make_traceback(frames))
    assert [(entry.filename, entry.lineno, entry.name, entry.line) for entry in made] == [
        (str(file), 2, "train", "prepare()"),
        (str(file), 5, "<lambda>", "raise ValueError"),
    ]
    assert make_traceback([]) is None


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        ([("train", True), ("backward", False), ("inner", True)], ["train", "inner"]),
        ([("train", True), ("linear", False), ("empty", False)], ["train", "empty"]),
        ([("a", True), ("b", True), ("c", True), ("d", True), ("e", True)], ["a", "d", "e"]),
        ([], []),
    ],
)
def test_frames_that_are_worth_showing(frames: list[tuple[str, bool]], shown: list[str]) -> None:
    made = [frame(name, is_user=is_user) for name, is_user in frames]
    assert [f.name for f in worth_showing(made)] == shown


CELL = "/tmp/ipykernel_1/123.py"


@pytest.fixture
def cell() -> Any:
    linecache.cache[CELL] = (20, None, ["def train():\n", "    raise ValueError\n"], CELL)
    yield
    del linecache.cache[CELL]


@pytest.mark.usefixtures("cell")
def test_sources_of_cells_are_added_where_they_are_missing() -> None:
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{CELL}", line 1, in train\n'
        '  File "/lib/x.py", line 9, in known\n'
        "    known()\n"
        f'  File "{CELL}", line 2, in train\n'
        "ValueError: x\n"
    )
    assert with_sources(text).splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{CELL}", line 1, in train',
        "    def train():",
        '  File "/lib/x.py", line 9, in known',
        "    known()",
        f'  File "{CELL}", line 2, in train',
        "    raise ValueError",
        "ValueError: x",
    ]


@pytest.mark.usefixtures("cell")
def test_sources_within_a_group_are_indented_like_it() -> None:
    text = f'  + Exception Group Traceback:\n  |   File "{CELL}", line 2, in train\n  | ExceptionGroup: two\n'
    assert "  |     raise ValueError" in with_sources(text).splitlines()


def test_a_traceback_that_has_its_sources_is_left_alone() -> None:
    text = failure(ValueError("x")).info.text
    assert with_sources(text) == text.rstrip()


def test_a_message_that_looks_like_a_frame_does_no_harm() -> None:
    info = ExceptionInfo("ValueError", "x", text='ValueError: see\n  File "/nowhere.py", line 3, in f\nend\n')
    assert with_sources(info.text) == info.text.rstrip()

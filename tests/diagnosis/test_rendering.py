"""Exceptions in IPython: notes and shown frames."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from nblaunch import diagnosis
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames, annotate, worth_showing
from nblaunch.events import ExceptionInfo, FrameInfo
from nblaunch.spec import LaunchSpec
from nblaunch.wire import exceptions
from tests.odd_exceptions import Frozen

INFO = ExceptionInfo("ValueError", "x", text="ValueError: x")


def test_notes_of_the_user_come_first() -> None:
    error = ValueError("x")
    exceptions.set_attribute(error, "__notes__", ["by the user"])
    annotate(error, INFO, ["by us"])
    assert error.__notes__ == ["by the user", "by us"]  # type: ignore[attr-defined]
    assert error._render_traceback_() == ["ValueError: x", "by the user", "by us"]  # type: ignore[attr-defined]


def test_earlier_causes_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from the process of a detached job, and the kernel adds the notes found there."""
    cause = ExceptionInfo("ValueError", "y", cause=ExceptionInfo("KeyError", "'lr'"), is_raised_from=True)
    info = ExceptionInfo("RuntimeError", "x", text="RuntimeError: x", cause=cause)
    notes: list[str] = ["by us"]
    for _ in range(2):
        error: Any = RuntimeError("x")
        annotate(error, info, notes)
        notes = error._render_traceback_.notes
    shell = Mock()
    shell.InteractiveTB.structured_traceback.return_value = ["the traceback"]
    monkeypatch.setattr(diagnosis.exceptions, "ipython_shell", lambda: shell)
    expected = ["the traceback", "ValueError was raised from KeyError: 'lr'", "by us"]
    assert error._render_traceback_() == expected


def test_a_class_that_takes_no_attributes_gets_its_notes() -> None:
    error = Frozen(5)
    annotate(error, INFO, ["by us"])
    assert error.__notes__ == ["by us"]  # type: ignore[attr-defined]


def test_the_launchers_own_mistakes_keep_its_frames() -> None:
    with pytest.raises(TypeError) as caught, HiddenLauncherFrames():
        LaunchSpec("train")  # type: ignore[arg-type]
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert "__post_init__" in names


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        ([("train", True), ("backward", False), ("inner", True)], ["train", "inner"]),
        ([("train", True), ("linear", False), ("empty", False)], ["train", "empty"]),
        ([("a", True), ("b", True), ("c", True), ("d", True), ("e", True)], ["a", "d", "e"]),
        ([], []),
    ],
)
def test_irrelevant_frames_are_hidden(frames: list[tuple[str, bool]], shown: list[str]) -> None:
    made = [FrameInfo("train.py", 1, name, "", is_user) for name, is_user in frames]
    assert [f.name for f in worth_showing(made)] == shown


@pytest.mark.parametrize(("num_frames", "is_mentioned"), [(3, False), (4, True)])
def test_hidden_frames_of_the_user_are_mentioned(
    monkeypatch: pytest.MonkeyPatch, num_frames: int, is_mentioned: bool
) -> None:
    shell = Mock()
    shell.InteractiveTB.structured_traceback.return_value = []
    monkeypatch.setattr(diagnosis.exceptions, "ipython_shell", lambda: shell)
    users = [FrameInfo("train.py", 1, f"step_{number}", "", True) for number in range(num_frames)]
    error: Any = ValueError("x")
    annotate(error, ExceptionInfo("ValueError", "x", tuple(users)), ["by us"])
    *mentions, last = error._render_traceback_()
    assert ["%debug has the others" in line for line in mentions] == [True] * is_mentioned
    assert last == "by us"


def _called_by_launcher(function: Callable[[], object]) -> None:
    """Call ``function`` from a frame of nblaunch."""
    names: dict[str, Any] = {"__name__": "nblaunch.launcher.fake"}
    exec("def call(function): function()", names)
    names["call"](function)


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (
            KeyboardInterrupt(),
            ["test_library_frames_below_the_launcher_are_hidden"],
        ),  # for example, in the lock on which the kernel waits for a job
        (
            OSError("no space"),
            [
                "test_library_frames_below_the_launcher_are_hidden",
                "__call__",
                "_mock_call",
                "_execute_mock_call",
            ],
        ),
    ],
)
def test_library_frames_below_the_launcher_are_hidden(error: BaseException, names: list[str]) -> None:
    with pytest.raises(type(error)) as caught, HiddenLauncherFrames():
        _called_by_launcher(Mock(side_effect=error))
    shown = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert [name for name in shown if name != "_called_by_launcher"] == names


def test_user_frames_below_the_launcher_are_shown() -> None:
    def function() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, HiddenLauncherFrames():
        _called_by_launcher(function)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "function"

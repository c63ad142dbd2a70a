"""The environment: read through a table, patched in a block, and restored exactly."""

from __future__ import annotations

import os

import pytest

from nblaunch import env


def test_values_are_converted_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", "7")
    assert env.read("NBLAUNCH_KEEP_JOBS") == 7
    for unset in ("", None):
        monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", unset) if unset is not None else monkeypatch.delenv(
            "NBLAUNCH_KEEP_JOBS"
        )
        assert env.read("NBLAUNCH_KEEP_JOBS") == 20
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # OpenMP allows one number per level of nesting
    assert env.read("OMP_NUM_THREADS") == 4
    # An empty value hides all GPUs, an unset variable hides none.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert env.read("CUDA_VISIBLE_DEVICES") == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert env.read("CUDA_VISIBLE_DEVICES") is None


def test_invalid_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", "a few")
    with pytest.raises(ValueError, match=r"NBLAUNCH_KEEP_JOBS='a few'"):
        env.read("NBLAUNCH_KEEP_JOBS")
    with pytest.raises(KeyError):
        env.read("HOME")


def test_all_variables_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env.check()
    monkeypatch.setenv("NBLAUNCH_KEEP_JOBS", "all")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "perhaps")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "INFO")
    with pytest.raises(ValueError) as caught:
        env.check()
    assert str(caught.value) == (
        "environment variable NBLAUNCH_KEEP_JOBS='all' must be a whole number of at least 0; "
        "environment variable ACCELERATE_USE_CPU='perhaps' must be true or false (or 1, 0, yes, no, on, off)"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NBLAUNCH_CHECK", "NBLAUNCH_CHECKS"),
        ("NBLAUNCH_LOGDIR", "NBLAUNCH_LOG_DIR"),
        ("NBLAUNCH_NUM_PROCS", "NBLAUNCH_NUM_PROCESSES"),
    ],
)
def test_misspelt_names_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    monkeypatch.setenv("NBLAUNCH_GREETING", "hello")  # the user's own
    env.check()
    monkeypatch.setenv(name, "off")
    with pytest.raises(ValueError, match=rf"{name}: did you mean {meant}\?"):
        env.check()


@pytest.mark.parametrize("text", ["-nosuch", "-same_file,-nosuch", "same_file", "off,on", "off -same_file"])
def test_unknown_checks_are_rejected_with_the_list_of_names(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("NBLAUNCH_CHECKS", "-Same_File, -replicas_differ")
    env.check()
    monkeypatch.setenv("NBLAUNCH_CHECKS", text)
    with pytest.raises(ValueError, match=f"NBLAUNCH_CHECKS='{text}'.*same_file.*zero_learning_rate"):
        env.check()
    with pytest.raises(KeyError):
        env.is_check_off("nosuch")


@pytest.mark.parametrize("text", ["-1", "-4,2", "many", ",2"])
def test_impossible_thread_counts_are_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,-2")
    env.check()  # workers use only the first number of OpenMP's list
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ValueError, match="OMP_NUM_THREADS"):
        env.check()


def test_a_patch_is_undone_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_TEST_A", "a")
    monkeypatch.setenv("NBLAUNCH_TEST_B", "b")
    monkeypatch.delenv("NBLAUNCH_TEST_C", raising=False)
    before = env.snapshot()
    inside: dict[str, str | None] = {}

    def change_and_fail() -> None:
        with env.patched({"NBLAUNCH_TEST_A": "1", "NBLAUNCH_TEST_B": None, "NBLAUNCH_TEST_C": "3"}):
            inside.update({name: os.environ.get(f"NBLAUNCH_TEST_{name}") for name in "ABC"})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_and_fail()
    assert inside == {"A": "1", "B": None, "C": "3"}
    assert env.snapshot() == before

"""``nblaunch config``: with keys in a real terminal, through a pipe, and along every path of its questions."""

from __future__ import annotations

import io
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest

from nblaunch.cli.config import QUESTIONS, Asker, Convert, Machine, ask_all, detected
from nblaunch.config import files
from nblaunch.config.launching import spec_of
from nblaunch.config.settings import resolve
from nblaunch.utils import write_basic_config
from tests.cli.conftest import PROGRAM, Ended, launch, script

Command = Callable[..., Ended]

TYPED = {
    "num_machines": "2", "machine_rank": "1", "main_process_ip": "10.0.0.1", "rdzv_endpoint": "10.0.0.1:29400",
    "fsdp_transformer_layer_cls_to_wrap": "Block,Head", "deepspeed_config_file": "zero.json",
}  # fmt: skip
"""Answers to questions without a default."""


class Walker(Asker):
    """Answers at random, preferring choices that were not taken yet."""

    def __init__(self, seed: int, taken: set[tuple[str, int]], offered: set[tuple[str, int]]) -> None:
        self._random = random.Random(seed)
        self._taken = taken
        self._offered = offered

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        choices = [(question, place) for place in range(len(labels))]
        self._offered.update(choices)
        fresh = [choice for choice in choices if choice not in self._taken]
        choice = self._random.choice(fresh or choices)
        self._taken.add(choice)
        return choice[1]

    def enter(self, question: str, default: str, convert: Convert) -> object:
        setting = next(one.setting for one in QUESTIONS if one.text == question)
        return convert(TYPED.get(setting, default))


@pytest.mark.parametrize(
    "machine",
    [
        Machine({"cpu": 4}, "cpu"),
        Machine({"cpu": 8, "cuda": 4}, "cuda"),
        Machine({"cpu": 96, "xla": 8}, "xla"),
    ],
    ids=["cpu", "cuda", "tpu"],
)
def test_every_path_gives_a_file_that_launches(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file must define a valid launch, even if this machine lacks its devices."""
    taken: set[tuple[str, int]] = set()
    offered: set[tuple[str, int]] = set()
    path = tmp_path / "config.yaml"
    monkeypatch.chdir(tmp_path)
    Path(TYPED["deepspeed_config_file"]).touch()
    for seed in itertools.count():
        values = ask_all(Walker(seed, taken, offered), machine)
        files.write(path, values)
        layer = files.read(path)
        assert dict(layer.values) == values
        spec = spec_of(resolve([layer]), print)
        assert spec.backend == values["backend"]
        if seed >= 60 and offered == taken:
            break
    asked = {question for question, _ in offered}
    assert asked == {question.text for question in QUESTIONS if question.choices is not None}


class Entering(Walker):
    """Presses Enter at every question first, then answers like :class:`Walker`."""

    def __init__(self, *args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(*args)
        self._monkeypatch = monkeypatch

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        assert len({label.split()[0] for label in labels}) == len(labels), "first words are answers"
        self._press_enter()
        assert Asker().choose(question, labels, default) == default
        return super().choose(question, labels, default)

    def enter(self, question: str, default: str, convert: Convert) -> object:
        if default:
            self._press_enter()
            assert Asker().enter(question, default, convert) == convert(default)
        return super().enter(question, default, convert)

    def _press_enter(self) -> None:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))


@pytest.mark.parametrize(
    "machine", [Machine({"cpu": 8, "cuda": 4}, "cuda"), Machine({"cpu": 96, "xla": 8}, "xla")]
)
def test_enter_accepts_every_default(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[tuple[str, int]] = set()
    offered: set[tuple[str, int]] = set()
    monkeypatch.chdir(tmp_path)
    Path(TYPED["deepspeed_config_file"]).touch()
    for seed in itertools.count():
        ask_all(Entering(seed, taken, offered, monkeypatch=monkeypatch), machine)
        if seed >= 20 and offered == taken:
            break


@pytest.mark.parametrize(("typed", "index"), [("", 2), ("2", 2), ("0", 0), ("3", 3)])
def test_a_zero_stage_is_typed_as_a_number(
    typed: str, index: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"4\n{typed}\n"))
    assert Asker().choose("Stage?", ["0 (nothing)", "1 (states)", "2 (gradients)", "3 (all)"], 2) == index
    assert "must be one of 0, 1, 2, 3" in capsys.readouterr().out


def test_only_questions_that_matter_are_asked() -> None:
    asked: list[str] = []

    class Listener(Walker):
        def choose(self, question: str, labels: Sequence[str], default: int) -> int:
            asked.append(question)
            return default

        def enter(self, question: str, default: str, convert: Convert) -> object:
            asked.append(question)
            return convert(default)

    values = ask_all(Listener(0, set(), set()), Machine({"cpu": 1}, "cpu"))
    assert len(asked) == 6, asked
    assert values == {
        "backend": "cpu",
        "num_processes": 1,
        "mixed_precision": "no",
        "gradient_accumulation_steps": 1,
        "dynamo_backend": "no",
    }


def test_an_open_number_of_machines_uses_c10d(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is not asked how machines meet."""
    answers = "several\n1:3\n2\n127.0.0.1:29400\n1\ncpu\n6\nno\nddp\n1\nno\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    assert command("config").code == 0
    values = files.read(files.default_path()).values
    assert [values[name] for name in ("num_machines", "machine_rank", "rdzv_backend")] == ["1:3", 2, "c10d"]
    assert spec_of(resolve([files.read(files.default_path())]), print).num_processes == 2


def test_piped_answers_write_a_file_that_launches(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("here\ncpu\n2\nbf16\n1\n3\nno\n"))
    ended = command("config")
    assert ended.code == 0, ended.err
    path = files.default_path()
    assert str(path) in ended.out
    plan = command("launch", "--print_plan")
    assert f"file {path}" in plan.out
    assert "2 cpu processes" in plan.out


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("", ["ended before", "Where will the script run?"]),
        ("here\ncpu\n", ["ended before", "How many processes"]),
        ("here\nabacus\n", ["Which devices should the job use?", "'abacus'", "number from 1 to 7"]),
        ("here\ncpu\nmany\n", ["'many'", "whole number"]),
        ("several\n1\n", ["'1'", "at least 2"]),
        ("several\n1:1\n", ["'1:1'", "at least 2"]),
        ("several\n1:2\n2\n", ["'2'", "less than 2"]),
        ("several\n2\n2\n", ["'2'", "less than 2"]),
        ("several\n2\n1\nstatic\n\n", ["address", "empty"]),
    ],
)
def test_a_pipe_with_a_wrong_answer_writes_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch, answers: str, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    ended = command("config")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert all(word in line for word in words), line
    assert not files.default_path().exists()


def test_a_question_is_asked_again_after_a_wrong_answer(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("here\nabacus\ncpu\nmany\n0\n2\nno\nddp\n1\nno\n"))
    ended = command("config")
    assert ended.code == 0, ended.err
    assert ended.out.count("Which devices should the job use?") == 2
    assert ended.out.count("How many processes") == 3
    assert files.read(files.default_path()).values["num_processes"] == 2


def test_the_default_file_is_written_once(command: Command) -> None:
    ended = command("config", "default")
    assert ended.code == 0, ended.err
    values = files.read(files.default_path()).values
    assert values["backend"] == Machine.here().best
    assert values["num_processes"] >= 1
    again = command("config", "default")
    assert again.code == 2
    assert "already exists" in again.err


def test_the_default_file_may_have_another_precision(command: Command) -> None:
    rejected = command("config", "default", "--mixed_precision", "fp5")
    assert (rejected.code, files.default_path().exists()) == (2, False)
    assert "--mixed_precision" in rejected.err
    assert command("config", "--mixed_precision", "bf16").code == 2
    ended = command("config", "default", "--mixed_precision", "bf16")
    assert ended.code == 0, ended.err
    assert files.read(files.default_path()).values["mixed_precision"] == "bf16"


def test_a_notebook_writes_the_default_file_as_tutorials_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "folder" / "mine.yaml"
    assert write_basic_config("bf16", path) == path
    assert files.read(path).values == {**detected(Machine.here()), "mixed_precision": "bf16"}
    text = path.read_text()
    assert write_basic_config("no", str(path)) is False
    assert path.read_text() == text
    assert "already exists" in capsys.readouterr().out
    with pytest.raises(ValueError, match="fp5"):
        write_basic_config("fp5", tmp_path / "other.yaml")
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("name", ["old.yaml", "old.json"])
def test_update_keeps_settings_of_accelerate_files(command: Command, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    old = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "enable_cpu_affinity": True,
        "fsdp_config": {"fsdp_version": 2, "fsdp_backward_prefetch_policy": "BACKWARD_PRE"},
        "mixed_precision": "bf16",
        "num_processes": 2,
    }
    path.write_text(json.dumps(old))
    before = files.read(path).values
    ended = command("config", "update", "--config_file", str(path))
    assert ended.code == 0, ended.err
    assert files.read(path) == files.Layer(f"file {path}", before)
    assert before["strategy"] == "fsdp"
    assert "distributed_type" not in path.read_text()
    if name.endswith("json"):
        assert json.loads(path.read_text())["num_processes"] == 2
    else:
        assert "# " in path.read_text()


def test_update_needs_a_file(command: Command, tmp_path: Path) -> None:
    assert command("config", "update").code == 2
    assert command("config", "update", "--config_file", str(tmp_path / "none.yaml")).code == 2
    assert not (tmp_path / "none.yaml").exists()


def test_an_empty_name_is_not_the_default_file(command: Command) -> None:
    """An unset shell variable gives an empty name."""
    ended = command("config", "default", "--config_file", "")
    assert ended.code == 2
    assert not files.default_path().exists()


def terminal(*words: str) -> pexpect.spawn[str]:
    return pexpect.spawn(PROGRAM[0], [*PROGRAM[1:], *words], encoding="utf-8", timeout=300)


def test_a_user_answers_in_a_terminal_and_the_file_launches() -> None:
    user = terminal("config")
    try:
        for question, answer in (
            ("1) here", "1"),
            ("Which devices should the job use?", "cpu"),
            ("How many processes", "two"),
            ("must be a whole number", "2"),
            ("mixed precision?", "3"),
            ("must be a number from 1 to 2", "bf16"),
            ("strategy", ""),
            ("micro-batches", ""),
            ("Compile models", ""),
        ):
            user.expect_exact(question)
            user.sendline(answer)
        user.expect_exact("written to")
        user.expect(pexpect.EOF)
    finally:
        user.close()
    assert user.exitstatus == 0
    values = files.read(files.default_path()).values
    assert values == {
        "backend": "cpu",
        "num_processes": 2,
        "mixed_precision": "bf16",
        "strategy": "ddp",
        "gradient_accumulation_steps": 1,
        "dynamo_backend": "no",
    }
    name = script(
        "from nblaunch import Accelerator; a = Accelerator(); print(a.num_processes, a.mixed_precision)"
    )
    ended = launch("--start_method", "fork", name)
    assert sorted(ended.lines) == ["[0] 2 bf16", "[1] 2 bf16"], ended.err


def test_ctrl_c_leaves_no_file() -> None:
    user = terminal("config")
    try:
        user.expect_exact("1) here")
        user.sendintr()
        user.expect(pexpect.EOF)
    finally:
        user.close(force=True)
    assert user.exitstatus == 130
    assert not files.default_path().exists()


def test_help_is_quick() -> None:
    """It does not import torch; the limit leaves room for a busy machine."""
    command = [sys.executable, "-X", "importtime", "-m", "nblaunch", "launch", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert not {"torch", "numpy", "yaml", "nblaunch.launcher.job", "nblaunch.dashboard"} & imported

"""Fixtures that run commands in this process, or as real programs if they start processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nblaunch import cli

PROGRAM = [sys.executable, "-m", "nblaunch"]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands away from this user's files; scripts are in the working folder.

    Pseudo-terminals have an ordinary type, even if the tests run without a terminal.
    """
    monkeypatch.setenv("NBLAUNCH_CONFIG_FILE", str(tmp_path / "config" / "default.yaml"))
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command that starts no process in this process."""

    def run(*words: str) -> Ended:
        code = cli.main(words)
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


def script(text: str, name: str = "train.py") -> str:
    """Write a script into the working folder and return its name."""
    Path(name).write_text(textwrap.dedent(text))
    return name


def launch(*words: str, timeout: float = 300, stdin: str | None = None) -> Ended:
    """Run ``nblaunch launch --cpu`` as a program until it ends."""
    ended = subprocess.run(
        [*PROGRAM, "launch", "--cpu", *words], capture_output=True, text=True, timeout=timeout, input=stdin
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@dataclass
class Running:
    """A running launch."""

    process: subprocess.Popen[str]
    seen: list[str] = field(default_factory=list)

    def wait_for(self, text: str, times: int) -> None:
        """Read output until this many lines contained ``text``."""
        found = 0
        while found < times:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, f"ended with {self.process.wait()} before {text!r}: {''.join(self.seen)}"
            self.seen.append(line)
            found += text in line

    def send(self, *signals: int) -> None:
        for number in signals:
            self.process.send_signal(number)

    def end(self) -> Ended:
        out, _ = self.process.communicate(timeout=300)
        return Ended(self.process.returncode, "".join(self.seen) + out, "")


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Start ``nblaunch launch --cpu``; its output and errors come through one pipe."""
    running: list[Running] = []

    def begin(*words: str) -> Running:
        process = subprocess.Popen(
            [*PROGRAM, "launch", "--cpu", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append(Running(process))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.communicate()


def labelled(lines: Sequence[str], rank: int) -> list[str]:
    """Return the lines that a rank printed."""
    label = f"[{rank}] "
    return [line.removeprefix(label) for line in lines if line.startswith(label)]

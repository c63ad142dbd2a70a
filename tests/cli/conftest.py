"""Commands in this process where nothing is started, and as real programs where something is."""

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
    """Nothing of this machine's user is read or written; scripts are in the working folder.

    Pseudo-terminals are of a usual kind, also where the tests run without a terminal.
    """
    monkeypatch.setenv("NBLAUNCH_CONFIG_FILE", str(tmp_path / "config" / "default.yaml"))
    monkeypatch.setenv("NBLAUNCH_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Ended:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command in this process: for those that start nothing."""

    def run(*words: str) -> Ended:
        code = cli.main(words)
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


def script(text: str, name: str = "train.py") -> str:
    """Write a script into the working folder and return its name."""
    Path(name).write_text(textwrap.dedent(text))
    return name


def launch(*words: str, timeout: float = 100, stdin: str | None = None) -> Ended:
    """``nblaunch launch --cpu`` as a program, to its end."""
    ended = subprocess.run(
        [*PROGRAM, "launch", "--cpu", *words], capture_output=True, text=True, timeout=timeout, input=stdin
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@dataclass
class Running:
    """A launch that still runs."""

    process: subprocess.Popen[str]
    seen: list[str] = field(default_factory=list)

    def wait_for(self, text: str, times: int) -> None:
        """Read output until ``text`` was there in so many lines."""
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
        out, _ = self.process.communicate(timeout=60)
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
    """What a rank printed."""
    label = f"[{rank}] "
    return [line.removeprefix(label) for line in lines if line.startswith(label)]

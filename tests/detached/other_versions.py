"""Detached jobs of an nblaunch that is installed in a separate folder: another version, or one that is replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import nblaunch

PACKAGE = Path(nblaunch.__file__).parent

PROGRAM = """
import os, sys, time
from nblaunch import notebook_launcher

def begin(gate):
    from nblaunch import Accelerator
    import nblaunch.utils    # a module without a file
    accelerator = Accelerator()
    print("begun", flush=True)
    while not os.path.exists(gate + os.environ["TORCHELASTIC_RESTART_COUNT"]):    # the test lets this attempt go on
        time.sleep(0.01)
    return accelerator

def train(gate):
    accelerator = begin(gate)
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(os.path.dirname(gate) + "/checkpoint")
    return "trained"

def fail(gate):
    begin(gate)
    raise ValueError("batch 7 is broken")

def disagree(gate):
    import torch
    accelerator = begin(gate)
    torch.distributed.all_reduce(torch.zeros(2 + accelerator.process_index))

def wait_for_stop(gate):
    accelerator = begin(gate)
    while not accelerator.should_stop:
        time.sleep(0.01)
    return "stopped"

settings = dict(num_processes=2, backend="cpu", background=True, detach=True, dashboard="none")
job = notebook_launcher(globals()[sys.argv[1]], (sys.argv[2],), **settings, **eval(sys.argv[3]))
print(job.id)
os._exit(0)
"""


class Installation:
    """A copy of this nblaunch, with folders for its jobs.

    Args:
        folder: its folder; files named ``gate`` and the number of an attempt let the ranks of that attempt continue.
        changes: path in the package -> text -> its replacement in the copy.
    """

    def __init__(self, folder: Path, changes: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.site = folder / "site"
        self.package = self.site / "nblaunch"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        for path, replaced in (changes or {}).items():
            text = (self.package / path).read_text()
            for before, after in replaced.items():
                assert before in text, (path, before)
                text = text.replace(before, after)
            (self.package / path).write_text(text)
        self.jobs = folder / "jobs"
        self.jobs.mkdir(mode=0o700)
        self._folder = folder
        self._gate = folder / "gate"

    def launch(self, function: str, settings: str = "{}") -> str:
        """Launch a function of :data:`PROGRAM` with this version; return the job's id when both ranks have begun."""
        done = self._run([sys.executable, "-c", PROGRAM, function, str(self._gate), settings], self.site)
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.strip()
        deadline_s = time.monotonic() + 180
        while self._num_begun() < 2:
            assert time.monotonic() < deadline_s, "the ranks have not begun"
            time.sleep(0.05)
        return job_id

    def release(self, attempt: int = 0) -> None:
        """Let the ranks of an attempt continue."""
        Path(f"{self._gate}{attempt}").touch()

    def replace(self) -> None:
        """Replace all files, as an update does, by an incompatible version's files."""
        for path in self.package.rglob("*.py"):
            version = '__version__ = "9.9.9"\n' if path == self.package / "__init__.py" else ""
            aside = path.with_suffix(".new")
            aside.write_text(f"{version}raise RuntimeError('a module of the new version was imported')\n")
            aside.replace(path)
        for folder in self.package.rglob("__pycache__"):
            shutil.rmtree(folder)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the tested version of ``nblaunch`` in a shell."""
        return self._run([sys.executable, "-m", "nblaunch", *arguments], PACKAGE.parent)

    def run(self, program: str) -> str:
        """Run a program with the tested version; return its output."""
        done = self._run([sys.executable, "-c", program], PACKAGE.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _num_begun(self) -> int:
        logs = (self.jobs / "detached").glob("*/**/*.log")
        return sum("begun" in log.read_text() for log in logs if log.name != "job.log")

    def _run(self, command: list[str], path: Path) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "NBLAUNCH_LOG_DIR": str(self.jobs), "PYTHONPATH": str(path)}
        return subprocess.run(command, env=env, cwd=self._folder, capture_output=True, text=True, timeout=300)

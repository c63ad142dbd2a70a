"""Exit statuses of workers in a kernel that ignores SIGCHLD, or whose code collects them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel

SETUP = """
import os, signal, nblaunch

def is_ignored():
    mask = next(line for line in open("/proc/self/status") if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> signal.SIGCHLD - 1 & 1)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wait_and_die(path):
    os.close(os.open(path, os.O_RDONLY))
    die()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_exit_statuses_are_known_despite_ignored_sigchld(kernel: Kernel, method: str) -> None:
    kernel.run(SETUP)
    cell = kernel.run(
        f"nblaunch.notebook_launcher(die, num_processes=2, start_method={method!r})", raises="WorkerDied"
    )
    assert "was killed by SIGKILL" in cell.raised.text
    assert "sys.exit" not in cell.raised.text
    assert kernel.run("signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN and is_ignored()").value is True
    value = kernel.run(
        f"nblaunch.notebook_launcher(is_ignored, num_processes=2, start_method={method!r}, dashboard='none')"
    ).value
    assert value is False


def test_a_later_sigchld_disposition_is_kept(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(SETUP)
    kernel.run(
        f"gate = {str(tmp_path / 'gate')!r}\n"
        "def train(): os.close(os.open(gate, os.O_RDONLY))\n"
        "os.mkfifo(gate)\n"
        "job = nblaunch.notebook_launcher(train, num_processes=1, background=True)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)\n"
        "os.close(os.open(gate, os.O_WRONLY))\n"
        "job.result()\n"
        "assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL\n"
        "assert not is_ignored()"
    )


def test_a_lost_exit_status_is_reported(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(SETUP)
    kernel.run(
        f"gate = {str(tmp_path / 'gate')!r}\n"
        "os.mkfifo(gate)\n"
        "job = nblaunch.notebook_launcher(wait_and_die, (gate,), num_processes=1, background=True)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.close(os.open(gate, os.O_WRONLY))"
    )
    cell = kernel.run("job.result()", raises="WorkerDied")
    assert "rank 0 (pid" in cell.raised.text
    assert "ended with an unknown exit status before the function returned" in cell.raised.text
    assert "sys.exit" not in cell.raised.text

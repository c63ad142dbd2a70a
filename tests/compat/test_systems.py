"""Systems other than Linux, simulated by a Linux that lacks what they lack."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Parts of Python that Linux has and Windows lacks, and that the package or its imports could use.
WINDOWS = """
import os, select, signal, socket, sys
for name in ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "curses", "_curses", "readline"):
    sys.modules[name] = None
for module, names in {
    os: "fork register_at_fork setsid setpgid killpg getpgid memfd_create pidfd_open waitid WNOHANG O_CLOEXEC "
        "sched_getaffinity getuid geteuid statvfs sysconf openpty forkpty",
    signal: "SIGKILL SIGHUP SIGQUIT SIGCHLD SIGUSR1 SIGUSR2 SIGRTMIN pthread_sigmask siginterrupt setitimer",
    select: "poll epoll PIPE_BUF", socket: "AF_UNIX",
}.items():
    for name in names.split():
        delattr(module, name)
sys.platform = "win32"
"""
USES = """
import nblaunch
from nblaunch import errors
from nblaunch.errors import LaunchError

def import_name():
    from nblaunch import Accelerator, notebook_launcher

def import_utils():
    import nblaunch.utils

def main():
    from nblaunch.cli import main

for use in (import_name, lambda: nblaunch.DistributedType, import_utils, main):
    try:
        use()
    except LaunchError as error:
        print(error)
"""


def test_windows_gets_an_explanation() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WINDOWS + USES], capture_output=True, text=True, timeout=300
    )
    lines = ended.stdout.splitlines()
    assert (len(lines), len(set(lines)), ended.returncode) == (4, 1, 0), ended.stdout + ended.stderr
    assert "WSL" in lines[0]


@pytest.mark.parametrize("platform", ["emscripten", "aix"])
def test_unsupported_systems_get_an_explanation(platform: str) -> None:
    program = f"import os, sys\ndel os.fork\nsys.platform = {platform!r}\n{USES}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("WSL") == 4

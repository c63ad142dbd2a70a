"""Started processes must end with the test process, even if that is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import watchman

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Starts the program {0} in a separate POSIX session, like a server, and prints its process id.
STARTER = """
import os, signal, subprocess, sys
from tests import watchman
watchman.begin()
watchman.begin()
child = subprocess.Popen([sys.executable, "-c", {0!r}], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
{1}
"""
WAITS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
WAIT = "signal.pause()"
LAB = """
import signal, sys
from pathlib import Path
from tests.browser.lab import Lab
lab = Lab(Path(sys.argv[1]))
print(lab._process.pid, flush=True)
signal.pause()
"""


def has_ended(pidfd: int, timeout_s: float = 20.0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def start(program: str, *args: str) -> tuple[subprocess.Popen[str], int]:
    """Run a program that prints the id of a process it has started; return both, the latter as a pidfd."""
    starter = subprocess.Popen(
        [sys.executable, "-c", program, *args], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert starter.stdout is not None
    line = starter.stdout.readline()
    if not line:  # it has failed, and its error is on the standard error
        with starter:
            pytest.fail("the program ended before it had started anything")
    return starter, os.pidfd_open(int(line))


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit"])
def test_child_ends_with_its_starter(end: str) -> None:
    starter, pidfd = start(STARTER.format(WAITS, WAIT if end != "exit" else "os._exit(0)"))
    with starter:
        if end != "exit":
            assert not has_ended(pidfd, 0)
            starter.send_signal(getattr(signal, end))
        assert has_ended(pidfd)
    os.close(pidfd)


def test_a_lab_ends_with_its_starter(tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="the extra 'browser' is not installed")
    starter, pidfd = start(LAB, str(tmp_path))
    with starter:
        starter.kill()
        assert has_ended(pidfd)
    os.close(pidfd)


def test_these_tests_are_watched() -> None:
    assert os.environ[watchman.VARIABLE].startswith(f"{os.getpid()}-")


def test_watchmen_do_not_end_each_other() -> None:
    """For example, tests run tests: the inner watchman is needed just when the outer one acts."""
    starter, pidfd = start(STARTER.format(WAITS, WAIT))
    with starter:
        carriers = watchman._carriers(os.environ[watchman.VARIABLE])
        commands = [(Path("/proc") / str(pid) / "cmdline").read_bytes() for pid in carriers]
        assert starter.pid in carriers
        assert not any(b"watchman.py" in command for command in commands)
        starter.kill()
        assert has_ended(pidfd)
    os.close(pidfd)

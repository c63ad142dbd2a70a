"""Launches in odd environments, and on machines that stop, sleep or have too few cores.

    python -m tests.failures.surroundings [NAME ...] [--launches 300] [--pairs 50] [--ranks 64]

Each name is a method of :class:`Surroundings`, which raises an error if something is lost. The user without a name and
the read-only home folder need root on Linux.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.kernels import Kernel

CELL = """
import ctypes, json, mmap, os, resource, shutil, subprocess, sys, tempfile, threading, time
import psutil
import torch
import torch.distributed as dist
import nblaunch
from nblaunch import Accelerator, Session, notebook_launcher

def rank():
    return int(os.environ["RANK"])

def train(model, steps, step_s):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(steps):
        accelerator.backward(-sum(parameter.sum() for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(step_s)
        if step == 0:
            print("training", flush=True)
    return steps

def trained():
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model

def sums(rounds):
    if not dist.is_initialized():    # it is, in a session
        dist.init_process_group("gloo")
    total = torch.ones(1)
    for _ in range(rounds):
        dist.all_reduce(total)
    return rank()

def check_all():
    # A launch, a session and a detached job, with their values, weights and logs.
    model = trained()
    assert notebook_launcher(train, (model, 3, 0.0), 2) == 3
    assert all(parameter.eq(3).all() for parameter in model.parameters()), model.state_dict()
    assert "training" in nblaunch.last_job().logs(1)
    with Session(2) as session:
        assert session.run(sums, (1,), return_all=True) == [0, 1]
    job = notebook_launcher(train, (model, 3, 0.0), 2, background=True, detach=True)
    assert [listed.id for listed in nblaunch.jobs()][-1:] == [job.id]
    assert nblaunch.attach(job.id).result(200) == 3
    job.load_weights(model)
    assert "training" in job.logs(1)
    folder = str(job.log_dir)
    paths = [folder] + [os.path.join(place, name) for place, *names in os.walk(folder) for name in names[0] + names[1]]
    modes = {os.stat(path).st_mode & 0o777 for path in paths if os.path.isfile(path) or os.path.isdir(path)}
    shutil.rmtree(folder)
    return folder, sorted(map(oct, modes))

def problem(call, *args, **settings):
    try:
        return call(*args, **settings)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
"""

AFTER = "tempfile.tempdir = None"

NEW_MOUNTS = """
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())    # CLONE_NEWNS; other processes see no change
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
"""

CLOCK = """
clock = mmap.mmap(-1, 8)                 # shared with forked workers
real_time = time.time
time.time = lambda: real_time() + int.from_bytes(clock[:8], "little", signed=True)
def set_clock(ahead_s):
    clock[:8] = int(ahead_s).to_bytes(8, "little", signed=True)
"""
"""A wall clock that jumps while the monotonic clock continues, as after a suspension, in this kernel and its
workers.
"""

PAIR = """
import sys
sys.path.insert(0, {folder!r})
{cell}
for number in range({launches}):
    print("ready", flush=True)
    sys.stdin.readline()
    assert notebook_launcher(sums, (3,), 2, return_all=True, start_method="fork", dashboard="none") == [0, 1]
print("done", flush=True)
"""


class Surroundings:
    """Each public method raises an error if something is lost, and returns noteworthy facts."""

    def __init__(self, launches: int, pairs: int, ranks: int) -> None:
        self._launches, self._pairs, self._ranks = launches, pairs, ranks

    # --- files and users -----------------------------------------------------------------------------------------

    def umask_000(self) -> str:
        with _kernel() as kernel:
            folder, modes = kernel.run("os.umask(0o000)\ncheck_all()", timeout_s=LIMIT_S).value
            assert not [mode for mode in modes if int(mode, 8) & 0o077], f"others may use {modes}"
            return folder

    def umask_077(self) -> str:
        with _kernel() as kernel:
            return str(kernel.run("os.umask(0o077)\ncheck_all()", timeout_s=LIMIT_S).value)

    def umask_777(self) -> str:
        """Use a umask with which the user may not even read their own files."""
        with _kernel() as kernel:
            return kernel.run("os.umask(0o777)\nproblem(check_all)", timeout_s=LIMIT_S).value

    def user_without_a_name(self) -> str:
        with _kernel() as kernel:
            kernel.run(
                NEW_MOUNTS + "subprocess.run(['mount', '--bind', '/dev/null', '/etc/passwd'], check=True)"
            )
            kernel.run("import pwd; pwd.getpwuid(os.getuid())", raises="KeyError")
            return kernel.run("check_all()", timeout_s=LIMIT_S).value

    def user_without_a_name_and_home(self) -> str:
        with _kernel() as kernel:
            kernel.run(
                NEW_MOUNTS + "subprocess.run(['mount', '--bind', '/dev/null', '/etc/passwd'], check=True)"
            )
            return kernel.run("os.environ.pop('HOME', None)\ncheck_all()", timeout_s=LIMIT_S).value

    def home_unset(self) -> str:
        with _kernel() as kernel:
            return kernel.run("os.environ.pop('HOME', None)\ncheck_all()", timeout_s=LIMIT_S).value

    def home_that_is_missing(self) -> str:
        with _kernel() as kernel:
            return kernel.run("os.environ['HOME'] = '/proc/none'\ncheck_all()", timeout_s=LIMIT_S).value

    def home_read_only(self) -> str:
        with tempfile.TemporaryDirectory() as home, _kernel() as kernel:
            kernel.run(NEW_MOUNTS + f"os.environ['HOME'] = home = {home!r}")
            kernel.run("subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'tmpfs', home], check=True)")
            cell = kernel.run("check_all()", timeout_s=LIMIT_S)
            assert "not writable" in cell.stderr + cell.stdout, cell.describe()
            return cell.value

    def tmpdir_with_spaces(self) -> str:
        return self._tmpdir("a b  'c' $d")

    def tmpdir_of_100_characters(self) -> str:
        return self._tmpdir("t" * 100)

    def tmpdir_of_250_characters(self) -> str:
        return self._tmpdir("t" * 250)

    def tmpdir_that_is_missing(self) -> str:
        with _kernel() as kernel:
            return kernel.run(
                f"os.environ['TMPDIR'] = '/none'\n{AFTER}\ncheck_all()", timeout_s=LIMIT_S
            ).value

    def _tmpdir(self, name: str) -> str:
        with tempfile.TemporaryDirectory() as parent, _kernel() as kernel:
            folder = Path(parent, name)
            folder.mkdir()
            where = f"os.environ['TMPDIR'] = {str(folder)!r}\nos.environ.pop('HOME', None)\n{AFTER}\n"
            return kernel.run(
                f"{where}os.environ['XDG_STATE_HOME'] = {str(folder)!r}\ncheck_all()", timeout_s=LIMIT_S
            ).value

    # --- processes that stop -------------------------------------------------------------------------------------

    def stopped_rank(self) -> str:
        """Stop a rank for longer than the hang timeout, then continue it."""
        with _kernel() as kernel:
            kernel.run("model = trained()")
            cell = kernel.submit("notebook_launcher(train, (model, 40, 0.05), 2, hang_timeout_s=2.0)")
            cell.wait_for_text("training", LIMIT_S)
            stopped = _workers(kernel)[-1]
            stopped.suspend()
            cell.wait_for(lambda cell: "hang" in _shown(cell), what="the hang to be shown")
            shown = _shown(cell)
            stopped.resume()
            cell.wait(LIMIT_S)
            assert cell.error is None, cell.describe()
            assert kernel.run("model.weight.unique().tolist()").value == [40.0]
            assert "stopped" in shown, shown
            return next(line for line in shown.splitlines() if "stopped" in line).strip()

    def stopped_kernel(self) -> str:
        """Stop the kernel while its workers train and return."""
        with _kernel() as kernel:
            return self._stopped(kernel, lambda: [psutil.Process(kernel.pid)])

    def stopped_machine(self) -> str:
        """Stop the kernel and all of its processes, as in a paused container."""
        with _kernel() as kernel:
            return self._stopped(kernel, lambda: [psutil.Process(kernel.pid), *kernel.processes()])

    def _stopped(self, kernel: Kernel, find: Callable[[], list[psutil.Process]]) -> str:
        kernel.run("model = trained()")
        cell = kernel.submit("notebook_launcher(train, (model, 40, 0.05), 2, hang_timeout_s=2.0)")
        cell.wait_for_text("training", LIMIT_S)
        stopped = find()
        for process in stopped:
            process.suspend()
        time.sleep(6.0)
        for process in reversed(stopped):
            process.resume()
        cell.wait(LIMIT_S)
        assert cell.error is None, cell.describe()
        assert kernel.run("model.weight.unique().tolist()").value == [40.0]
        assert "hang" not in _shown(cell), _shown(cell)
        return f"{len(stopped)} processes"

    def stopped_job_process(self) -> str:
        with _kernel() as kernel:
            launch = "notebook_launcher(train, (model, 20, 0.05), 2, background=True, detach=True, dashboard='none')"
            kernel.run(f"model = trained()\njob = {launch}")
            (process,) = [
                p for p in kernel.processes() if "job_process" in " ".join(p.cmdline()) and p.ppid() == 1
            ]
            process.suspend()
            assert kernel.run("[listed.status for listed in nblaunch.jobs()]").value[-1] == "running"
            assert kernel.run("problem(job.result, 3)").value.startswith("TimeoutError")
            process.resume()
            return str(kernel.run("job.result(200)").value)

    # --- clocks --------------------------------------------------------------------------------------------------

    def clock_an_hour_ahead(self) -> str:
        return self._jump(3600)

    def clock_an_hour_back(self) -> str:
        return self._jump(-3600)

    def _jump(self, ahead_s: int) -> str:
        with _kernel() as kernel:
            kernel.run(CLOCK + "model = trained()")
            cell = kernel.submit(
                f"threading.Timer(1.0, set_clock, ({ahead_s},)).start()\n"
                "notebook_launcher(train, (model, 60, 0.05), 2, hang_timeout_s=30.0)"
            )
            cell.wait(LIMIT_S)
            assert cell.error is None, cell.describe()
            assert kernel.run("model.weight.unique().tolist()").value == [60.0]
            shown = _shown(cell)
            assert not any(word in shown for word in ("hang", "slower", "no progress", "stalled")), shown
            job = "notebook_launcher(train, (model, 40, 0.05), 2, background=True, dashboard='none')"
            kernel.run(f"set_clock(0)\njob = {job}\nset_clock({ahead_s})")
            assert kernel.run("job.result(200), model.weight.unique().tolist()").value == (40, [100.0])
            return shown.splitlines()[-1]

    # --- many ----------------------------------------------------------------------------------------------------

    def many_launches(self) -> str:
        """Launch many times in one kernel: nothing must accumulate."""
        with _kernel() as kernel:
            kernel.run("for _ in range(10): notebook_launcher(sums, (1,), 2, dashboard='none')")
            state = "me = psutil.Process(); len(os.listdir('/proc/self/fd')), me.num_threads(), me.memory_info().rss"
            before = kernel.run(state).value
            began_s = time.monotonic()
            kernel.run(
                f"for _ in range({self._launches}): notebook_launcher(sums, (1,), 2, dashboard='none')",
                timeout_s=900,
            )
            took_s = time.monotonic() - began_s
            after = kernel.run(state).value
            assert after[0] <= before[0] + 2, (before, after)
            assert after[1] <= before[1] + 1, (before, after)
            grown = (after[2] - before[2]) / self._launches / 1024
            assert grown < 100, f"{grown:.0f} KiB per launch"
            return f"{took_s / self._launches:.2f} s each; {before[:2]} -> {after[:2]}; {grown:.1f} KiB each"

    def many_ranks(self) -> str:
        with _kernel() as kernel:
            began_s = time.monotonic()
            cell = kernel.run(f"notebook_launcher(sums, (3,), {self._ranks}, return_all=True)", timeout_s=300)
            assert cell.value == list(range(self._ranks))
            assert "hang" not in _shown(cell), _shown(cell)
            return f"{self._ranks} ranks on {os.cpu_count()} cores in {time.monotonic() - began_s:.1f} s"

    def two_kernels(self) -> str:
        """Launch repeatedly in two processes at the same time: each must have its own ports, files and logs."""
        program = PAIR.format(folder=os.getcwd(), cell=CELL, launches=self._pairs)
        both = [
            subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for number in range(self._pairs + 1):
            lines = [process.stdout.readline().strip() for process in both if process.stdout]
            assert lines == ["ready" if number < self._pairs else "done"] * 2, (number, lines)
            for process in both:
                if process.stdin and number < self._pairs:
                    process.stdin.write("\n")
                    process.stdin.flush()
        assert [process.wait(180) for process in both] == [0, 0]
        return f"{self._pairs} pairs of launches"


LIMIT_S = 240.0
"""Seconds for a cell on an overloaded machine."""


class _kernel:
    """Start a kernel with the cells' functions, and check that nothing is left of it."""

    def __enter__(self) -> Kernel:
        self._home = tempfile.TemporaryDirectory()
        self._kernel = Kernel.start(
            env={"HOME": self._home.name, "XDG_STATE_HOME": "", "NBLAUNCH_LOG_DIR": ""}, timeout_s=LIMIT_S
        )
        self._kernel.run(CELL, timeout_s=LIMIT_S)
        return self._kernel

    def __exit__(self, cls: Any, *error: object) -> None:
        self._kernel.close(check=cls is None)
        self._home.cleanup()


def _workers(kernel: Kernel) -> list[psutil.Process]:
    """Return the forked workers, in the order of their ranks."""
    children = [process for process in kernel.processes() if process.ppid() == kernel.pid]
    return [process for process in children if "nblaunch-guardian" not in process.cmdline()]


def _shown(cell: Any) -> str:
    return "\n".join(
        [cell.stdout, cell.stderr, *(str(one.data.get("text/plain", "")) for one in cell.displays)]
    )


def main() -> None:
    """Try each name; print its outcome."""
    parser = argparse.ArgumentParser()
    every = [name for name in vars(Surroundings) if not name.startswith("_")]
    parser.add_argument("names", nargs="*", choices=[*every, []], default=every)
    parser.add_argument("--launches", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    surroundings = Surroundings(options.launches, options.pairs, options.ranks)
    bad = 0
    for name in options.names or every:
        try:
            print(f"{name}: held ({getattr(surroundings, name)()})", flush=True)
        except Exception:
            bad += 1
            print(f"{name}: NOT HELD\n{traceback.format_exc()}", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()

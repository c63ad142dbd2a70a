"""The machine lacks a resource: disk, descriptors, processes, memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.control_groups import control_group
from tests.failures.conftest import START_METHODS, assert_as_before, start_kernel, value_of
from tests.kernels import Kernel
from tests.thorough import thorough


@contextmanager
def mounted(folder: Path, option: str) -> Iterator[Path]:
    """Mount a file system in memory, limited by an option of tmpfs(5)."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 256 kB."""
    with mounted(tmp_path / "disk", "size=256k") as folder:
        yield folder


@pytest.fixture
def disk_without_inodes(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with ten numbered files and no room for another."""
    with mounted(tmp_path / "disk", "nr_inodes=11") as folder:
        for number in range(10):
            (folder / str(number)).touch()
        yield folder


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_a_full_disk_loses_only_output(shared: Kernel, method: str, small_disk: Path) -> None:
    cell = shared.run(
        f"""
def train():
    dist.init_process_group()
    fill_disk()
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()
notebook_launcher(train, num_processes=2, start_method={method!r}, log_dir={str(small_disk)!r}, return_all=True)
"""
    )
    assert cell.result == "[2.0, 2.0]"
    assert "bytes of output" in cell.shown, cell.describe()
    assert_as_before(shared)


@pytest.mark.parametrize(
    ("end", "error", "shown"),
    [
        ("raise ValueError('the loss is nan')", "ValueError", "the loss is nan"),
        ("os._exit(3)", "WorkerDied", "may be missing: the disk at {disk} is full"),
    ],
)
def test_a_failure_is_reported_on_a_full_disk(
    shared: Kernel, small_disk: Path, end: str, error: str, shown: str
) -> None:
    cell = shared.run(
        f"""
def train():
    fill_disk()
    {end}
notebook_launcher(train, num_processes=2, log_dir={str(small_disk)!r})
""",
        raises=error,
    )
    assert shown.format(disk=small_disk) in cell.raised.value
    assert_as_before(shared)


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_a_full_log_disk_prevents_the_launch(shared: Kernel, method: str, small_disk: Path) -> None:
    (small_disk / "full").write_bytes(b"x" * (1 << 18))
    cell = shared.run(
        f"print(notebook_launcher(add_up, num_processes=2, start_method={method!r}, log_dir={str(small_disk)!r}))"
    )
    assert cell.stdout.splitlines()[-1] == "3.0"
    assert_as_before(shared)


def test_a_hang_on_a_full_disk_names_the_disk(shared: Kernel, small_disk: Path) -> None:
    """Stacks can't be written then; the ranks were once reported as stopped or blocked."""
    cell = shared.run(
        f"""
def train():
    dist.init_process_group()
    fill_disk()
    dist.barrier()
    threading.Event().wait() if rank() else dist.barrier()
notebook_launcher(train, num_processes=2, hang_timeout_s=1.5, on_hang="stop", log_dir={str(small_disk)!r})
""",
        raises="JobHung",
    )
    assert f"its stack can't be written: the disk at {small_disk} is full" in cell.raised.value
    assert "blocked" not in cell.raised.value
    assert_as_before(shared)


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_a_disk_without_inodes_prevents_the_launch(
    shared: Kernel, method: str, disk_without_inodes: Path
) -> None:
    """Each launch has room for one more file, so every file is once the first without room."""
    log_dir = str(disk_without_inodes)
    launch = f"notebook_launcher(add_up, num_processes=2, start_method={method!r}, log_dir={log_dir!r})"
    for num_free in range(7):
        cell = shared.run(launch, raises="LaunchError")
        assert f"no inodes are left on {disk_without_inodes}" in cell.raised.value
        assert "NBLAUNCH_LOG_DIR" in cell.raised.value
        for name in os.listdir(disk_without_inodes):
            if name.isdigit():
                continue
            shutil.rmtree(disk_without_inodes / name)
        (disk_without_inodes / str(num_free)).unlink()
    assert shared.run(launch).result is not None
    assert_as_before(shared)


SWEEP = """
import collections
outcomes = collections.Counter()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
used = max(map(int, os.listdir("/proc/self/fd")))
for room in range({first}, {last}, {step}):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
    try:
        outcomes[str(relaunch({method!r}))] += 1
    except Exception as error:
        outcomes[type(error).__name__] += 1
        message = str(error)
        last_error = message if "Too many open files" in message else last_error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(child.pid for child in psutil.Process().children(recursive=True)) == before["children"]
sorted(outcomes)
"""


@pytest.mark.parametrize("method", ["fork", *map(thorough, ("forkserver", "spawn"))])
def test_a_lack_of_descriptors_fails_the_whole_launch(shared: Kernel, method: str) -> None:
    first, last, step = (0, 36, 1) if method == "fork" else (4, 36, 8)
    shared.run("last_error = ''")
    shared.run("del sys.last_value") if value_of(shared, "hasattr(sys, 'last_value')") else None
    cell = shared.run(SWEEP.format(method=method, first=first, last=last, step=step))
    assert shared.processes() == []
    outcomes = set(cell.value)
    # The process that fails may be a worker: its error is then an OSError of that rank.
    assert "LaunchError" in outcomes
    assert outcomes <= {"LaunchError", "OSError", "RuntimeError", "DistStoreError", "[3.0, 3.0]"}, outcomes
    assert "ulimit -n" in value_of(shared, "last_error")
    assert_as_before(shared)


def test_a_failed_fork_ends_the_other_workers(shared: Kernel) -> None:
    """Other start methods fork in another process; :func:`test_a_limit_on_processes_is_named` covers them."""
    cell = shared.run(
        """
import errno, posix
real_fork, forks = posix.fork, []
def fork():
    if len(forks) == 2:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    pid = real_fork()
    forks.append(pid)
    return pid
posix.fork = fork
try:
    notebook_launcher(add_up, num_processes=4, start_method="fork")
finally:
    posix.fork = real_fork
""",
        raises="LaunchError",
    )
    problem, others = "Resource temporarily unavailable", "the workers that were running (2) were stopped"
    for text in ("worker 2 of 4", problem, others, "ulimit -u"):
        assert text in cell.raised.value
    assert len(cell.raised.lines) <= 25
    assert shared.processes() == []
    assert_as_before(shared)


@pytest.mark.parametrize("method", START_METHODS)
def test_unwatchable_workers_are_ended(shared: Kernel, method: str) -> None:
    shared.run(
        f"""
import errno
import nblaunch.launcher.attempt as attempt
real = attempt.Guardian.start
def reject(guardian):
    raise OSError(errno.EMFILE, "Too many open files")
attempt.Guardian.start = reject
try:
    notebook_launcher(time.sleep, (3600,), 2, start_method={method!r})
finally:
    attempt.Guardian.start = real
    children = psutil.Process().children(recursive=True)
""",
        raises="LaunchError",
    )
    assert value_of(shared, "children") == []
    assert_as_before(shared)


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_a_limit_on_processes_is_named(nothing_left_behind: None, tmp_path: Path, method: str) -> None:
    with control_group("pids") as group, start_kernel(tmp_path / "logs") as kernel:
        group.add(kernel.pid)
        try:
            tasks = int((group.folder / "pids.current").read_text())
            group.limit.write_text(str(tasks + 3))
            cell = kernel.run(
                f"notebook_launcher(add_up, num_processes=8, start_method={method!r}, threads_per_process=1)",
                raises="LaunchError",
            )
            text = cell.raised.value
            assert "the system could not start" in text or "could not be started" in text
            assert "ulimit -u" in text
            # A process or the thread of the rendezvous store fails to start, whichever comes first.
            assert re.search("Resource temporarily unavailable|can't start new thread", text)
            assert len(cell.raised.lines) <= 25, cell.describe()
            kernel.wait_for_no_processes()
        finally:
            group.limit.write_text("max")
        assert_as_before(kernel)

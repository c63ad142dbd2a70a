"""The machine refuses something: disk, descriptors, processes, memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failures.conftest import assert_as_before, start_kernel, value_of
from tests.kernels import Kernel

CGROUP = Path("/sys/fs/cgroup")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.timeout(60)
def test_a_full_disk_costs_output_and_nothing_else(shared: Kernel, method: str, small_disk: Path) -> None:
    cell = shared.run(
        f"""
def train():
    dist.init_process_group()
    for i in range(4000):
        print("x" * 100)
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()
notebook_launcher(train, num_processes=2, start_method={method!r}, log_dir={str(small_disk)!r}, return_all=True)
"""
    )
    assert cell.result == "[2.0, 2.0]"
    shown = cell.stdout + "".join(str(display.data.get("text/plain")) for display in cell.displays)
    assert "bytes of output are lost: there was no room for" in shown, cell.describe()
    assert_as_before(shared)


@pytest.mark.timeout(60)
def test_a_failure_is_told_whole_on_a_full_disk(shared: Kernel, method: str, small_disk: Path) -> None:
    cell = shared.run(
        f"""
def train():
    for i in range(4000):
        print("x" * 100)
    raise ValueError("the loss is nan")
notebook_launcher(train, num_processes=2, start_method={method!r}, log_dir={str(small_disk)!r})
""",
        raises="ValueError",
    )
    assert cell.error is not None
    assert cell.error.value == "the loss is nan"
    assert_as_before(shared)


@pytest.mark.timeout(60)
def test_no_room_for_logs_from_the_start(shared: Kernel, method: str, small_disk: Path) -> None:
    (small_disk / "full").write_bytes(b"x" * (1 << 18))
    cell = shared.run(
        f"print(notebook_launcher(add_up, num_processes=2, start_method={method!r}, log_dir={str(small_disk)!r}))"
    )
    assert cell.stdout.splitlines()[-1] == "3.0"
    assert_as_before(shared)


SWEEP = """
import collections, gc
outcomes = collections.Counter()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
used = max(map(int, os.listdir("/proc/self/fd")))
for room in range({first}, {last}, {step}):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
    try:
        outcomes[str(relaunch({method!r}))] += 1
    except Exception as error:
        outcomes[type(error).__name__] += 1
        told = str(error)
        last_refusal = told if "Too many open files" in told else last_refusal
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not multiprocessing.active_children()
sorted(outcomes)
"""


@pytest.mark.timeout(90)
def test_whichever_descriptor_is_refused_the_launch_fails_as_a_whole(shared: Kernel, method: str) -> None:
    first, last, step = (0, 36, 1) if method == "fork" else (4, 36, 8)
    shared.run("import multiprocessing; last_refusal = ''")
    shared.run("del sys.last_value") if value_of(shared, "hasattr(sys, 'last_value')") else None
    cell = shared.run(SWEEP.format(method=method, first=first, last=last, step=step), timeout_s=60)
    assert shared.processes() == []
    outcomes = set(cell.value)
    # A worker may be the one that is refused: then it is an OSError of that rank, as any of a function is.
    assert "LaunchError" in outcomes
    assert outcomes <= {"LaunchError", "OSError", "RuntimeError", "DistStoreError", "[3.0, 3.0]"}, outcomes
    assert "ulimit -n" in value_of(shared, "last_refusal")
    assert_as_before(shared)


@pytest.mark.timeout(60)
def test_a_refused_fork_takes_the_others_back(shared: Kernel, method: str) -> None:
    if method != "fork":
        pytest.skip("the fork that is refused happens in another process; see the test with a control group")
    cell = shared.run(
        """
import errno
real_fork, forks = os.fork, []
def fork():
    if len(forks) == 2:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    pid = real_fork()
    forks.append(pid)
    return pid
os.fork = fork
try:
    notebook_launcher(add_up, num_processes=4, start_method="fork")
finally:
    os.fork = real_fork
""",
        raises="LaunchError",
    )
    assert cell.error is not None
    for text in (
        "worker 2 of 4",
        "Resource temporarily unavailable",
        "the 2 workers that had started were ended",
    ):
        assert text in cell.error.value
    assert "ulimit -u" in cell.error.value
    assert len(cell.error.lines) <= 25
    assert shared.processes() == []
    assert_as_before(shared)


@pytest.fixture
def pids_group() -> Iterator[Path]:
    """A control group that limits processes."""
    for folder in (CGROUP / "pids" / f"nblaunch-test-{os.getpid()}", CGROUP / f"nblaunch-test-{os.getpid()}"):
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / "pids.max").exists():
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group with a limit on processes can be made here")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_limit_on_processes_is_named(pids_group: Path, tmp_path: Path, method: str) -> None:
    with start_kernel(tmp_path / "logs") as kernel:
        (pids_group / "cgroup.procs").write_text(str(kernel.pid))
        try:
            tasks = int((pids_group / "pids.current").read_text())
            (pids_group / "pids.max").write_text(str(tasks + 3))
            cell = kernel.run(
                f"notebook_launcher(add_up, num_processes=8, start_method={method!r}, threads_per_process=1)",
                raises="LaunchError",
            )
            assert cell.error is not None
            assert "the system refused" in cell.error.value or "could not be started" in cell.error.value
            assert "ulimit -u" in cell.error.value
            # A process is refused, or the thread of the rendezvous store, whichever comes first.
            assert re.search("Resource temporarily unavailable|can't start new thread", cell.error.value)
            assert len(cell.error.lines) <= 25, cell.describe()
            kernel.wait_for_no_processes(3.0)
            (pids_group / "pids.max").write_text("max")
            assert_as_before(kernel)
        finally:
            (pids_group / "pids.max").write_text("max")
            kernel.close()
            kernel.process.wait(5)

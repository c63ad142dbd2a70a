"""Jobs that outlive their kernel, in real kernels."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.kernels import Kernel
from tests.profiles import python_of
from tests.thorough import thorough

PREAMBLE = """
import os, time, torch, nblaunch
from nblaunch import Accelerator, notebook_launcher

class Unstable(Exception):
    pass

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)

def train(model, gate=""):
    accelerator = Accelerator()
    rank = accelerator.process_index
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(20):
        loss = model(torch.randn(4, 8)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
        print(f"step {step} of rank {rank}")
        if step == 9 and gate:
            open(f"{gate}{rank}").close()    # waits for the test
    return {"rank": rank, "loss": loss.item()}

def wait_for_stop():
    accelerator = Accelerator()
    print("waiting")
    while not accelerator.should_stop:
        time.sleep(0.01)
    return "stopped"

def fail(gate):
    print("before the failure")
    open(f"{gate}{Accelerator().process_index}").close()
    raise Unstable("loss is nan")    # the line of the cell
"""

LAUNCH = (
    "job = notebook_launcher({}, num_processes=2, background=True, detach=True, dashboard='text')\njob.id"
)
LINES = [f"step {step} of rank {{}}" for step in range(20)]


class Desk:
    """Starts kernels of one user with one jobs folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.env = {"NBLAUNCH_LOG_DIR": str(folder)}
        self.gate = str(folder / "gate")
        for rank in range(2):
            os.mkfifo(f"{self.gate}{rank}")
        self._stack = stack

    def kernel(self, profile: str = "newest") -> Kernel:
        """Start a kernel with the functions of these tests."""
        kernel = self._stack.enter_context(Kernel.start(python=python_of(profile), env=self.env))
        kernel.run(PREAMBLE)
        return kernel

    def release(self) -> None:
        """Let the ranks that wait at the gate continue."""
        for rank in range(2):
            open(f"{self.gate}{rank}", "w").close()

    def start_command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start nblaunch in a shell."""
        command, env = [sys.executable, "-m", "nblaunch", *arguments], {**os.environ, **self.env}
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run nblaunch in a shell until it ends."""
        with self.start_command(*arguments) as process:
            stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def _last_update(kernel: Kernel) -> str:
    """Return the output of the attached job, whichever cell the update came in."""
    updates = [one["content"] for one in kernel.messages if one["msg_type"] == "update_display_data"]
    return str(updates[-1]["data"]["text/plain"]) if updates else ""


@pytest.fixture
def desk(tmp_path: Path, nothing_left_behind: None) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(tmp_path, stack)


@pytest.mark.parametrize("profile", ["newest", thorough("colab")])
def test_a_job_survives_its_kernel(desk: Desk, profile: str) -> None:
    first = desk.kernel(profile)
    job_id = first.run(LAUNCH.format(f"train, (model, {desk.gate!r})")).value
    first.kill()

    second = desk.kernel(profile)
    shown = second.run(f"job = nblaunch.attach({job_id!r})\nother = nblaunch.attach()\njob.status")
    assert shown.value == "running"
    stacks = second.run("print(job.stacks())").stdout
    assert "open(f" in stacks or "train" in stacks, stacks
    desk.release()
    assert second.run("job.result(200)['rank'], other.result(180) == job.result()").value == (
        0,
        True,
    )
    second.wait_until(lambda: "done" in _last_update(second), 180, "the final table")
    for rank in range(2):
        lines = second.run(f"job.logs({rank}).splitlines()").value
        assert lines == [line.format(rank) for line in LINES]
        assert LINES[-1].format(rank) in _last_update(second)
    assert second.run("[row['step'] for row in job.metrics]").value == list(range(20))
    # the job was not disturbed
    second.run("notebook_launcher(train, (model,), num_processes=2, dashboard='none')")
    second.run("trained = torch.nn.Linear(8, 4)\njob.load_weights(trained)")
    equal = "all(torch.equal(one, two) for one, two in zip(trained.parameters(), model.parameters()))"
    assert second.run(equal).value is True
    assert second.run("[one.status for one in nblaunch.jobs()]").value == ["done"]


def test_a_job_survives_a_kernel_killed_at_its_start(desk: Desk) -> None:
    first = desk.kernel()
    first.submit(LAUNCH.format(f"train, (model, {desk.gate!r})"))
    first.wait_until(lambda: any(desk.folder.glob("detached/*/record.json")), 180, "the job's record")
    first.kill()
    second = desk.kernel()
    second.run("job = nblaunch.attach()")
    desk.release()
    assert second.run("job.result(200)['rank']").value == 0
    assert second.run("job.logs(1).splitlines()").value == [line.format(1) for line in LINES]


def test_sigterm_to_the_job_process_lets_the_loops_end(desk: Desk) -> None:
    kernel = desk.kernel()
    kernel.run(LAUNCH.format("wait_for_stop"))
    logs = "[job.logs(rank) for rank in range(2)]"
    kernel.wait_until(lambda: all("waiting" in log for log in kernel.run(logs).value), 180, "both loops")
    job_process = psutil.Process(kernel.run("job.pids[0]").value).parent()
    assert job_process is not None
    job_process.terminate()
    assert kernel.run("job.result(200)").value == "stopped"
    kernel.wait_for_no_processes()


ATTACH_WITH_SIGNAL_TO_A_THREAD = """
import re, signal, sys, threading, time, traceback
from nblaunch.cli import main

def interrupt():
    stack = ""
    while not re.search('follower.py", line [0-9]+, in ends_within', stack):
        time.sleep(0.01)
        stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

main_thread = threading.get_ident()
threading.Thread(target=interrupt).start()
sys.exit(main(["attach"]))
"""


def test_the_shell_lists_stops_and_shows_a_job(desk: Desk) -> None:
    kernel = desk.kernel()
    job_id = kernel.run(LAUNCH.format("wait_for_stop")).value
    listed = desk.command("jobs")
    assert job_id in listed.stdout
    assert "running" in listed.stdout
    follower = desk.start_command("attach", job_id)
    with follower:
        assert follower.stdout is not None
        while "waiting" not in follower.stdout.readline():
            continue
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=300)
    assert f"{job_id} is still running" in errors
    program = subprocess.run(
        [sys.executable, "-c", ATTACH_WITH_SIGNAL_TO_A_THREAD],
        env={**os.environ, **desk.env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert program.returncode == 130, program.stderr
    assert "is still running" in program.stderr
    assert "running" in desk.command("jobs").stdout
    with desk.start_command("logs", "--follow", job_id, "--rank", "1") as log:
        assert log.stdout is not None
        assert log.stdout.readline() == "waiting\n"
        assert desk.command("stop", job_id[:-3]).returncode == 0
        rest, errors = log.communicate(timeout=300)
    assert (rest, log.returncode) == ("", 0), errors
    followed = desk.command("attach", job_id)
    assert followed.returncode == 0, followed.stderr
    assert "[1] waiting" in followed.stdout
    assert desk.command("logs", job_id, "--rank", "1").stdout == "waiting\n"
    assert desk.command("logs", job_id, "--rank", "1", "-f").stdout == "waiting\n"
    ended = desk.command("stop", job_id)
    assert ended.returncode == 2
    assert "its status is done" in ended.stderr
    assert kernel.run("job.result(200)").value == "stopped"


OTHER_VERSIONS = {
    "events with other fields": {"version": "9.1.0", "layout": "other"},
    "a record with other fields": {"version": "9.1.0", "format": 1 << 10, "num_ranks": 2},
    "a record without a version": {"version": None, "format": 1},
}


@pytest.mark.parametrize("what", ["events with other fields", *map(thorough, list(OTHER_VERSIONS)[1:])])
@pytest.mark.thorough
def test_jobs_of_other_versions_can_be_read_and_stopped(desk: Desk, what: str) -> None:
    kernel = desk.kernel()
    job_id = kernel.run(LAUNCH.format("wait_for_stop")).value
    waiting = "all('waiting' in job.logs(rank) for rank in range(2))"
    kernel.wait_until(lambda: kernel.run(waiting).value, 180, "the ranks to wait")
    path = desk.folder / "detached" / job_id / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **OTHER_VERSIONS[what]}))
    launcher = "nblaunch 9.1.0" if OTHER_VERSIONS[what]["version"] else "another version of nblaunch"

    listed = desk.command("jobs").stdout
    assert re.search(rf"^{job_id} +running ", listed, re.MULTILINE), listed
    assert f"{job_id}: launched by {launcher}, which can attach" in listed
    rejected = desk.command("attach", job_id)
    assert rejected.returncode == 2
    assert f"launched by {launcher}" in rejected.stderr
    assert f"nblaunch stop {job_id}" in rejected.stderr
    assert desk.command("logs", job_id, "--rank", "1").stdout == "waiting\n"

    assert desk.command("stop", job_id).returncode == 0
    assert kernel.run("job.result(200)").value == "stopped"  # this kernel attached before
    ended = "done" if what == "events with other fields" else "other version"
    assert re.search(rf"^{job_id} +{ended} ", desk.command("jobs").stdout, re.MULTILINE)
    assert desk.command("attach", job_id).returncode == 2
    assert desk.command("stop", job_id).returncode == 2  # the job has ended
    assert desk.command("logs", job_id).stdout == "waiting\n"


@pytest.mark.thorough
def test_another_kernel_shows_a_failures_line(desk: Desk) -> None:
    first = desk.kernel()
    first.run(LAUNCH.format(f"fail, ({desk.gate!r},)"))
    first.kill()
    second = desk.kernel()
    second.run("job = nblaunch.attach()")
    desk.release()
    error = second.run("job.result(200)", raises="Unstable").error
    assert error is not None
    assert "raise Unstable(" in error.text
    assert "# the line of the cell" in error.text
    assert "complete log" in error.text
    assert second.run("job.logs(0)").value == "before the failure\n"
    assert second.run("isinstance(job.exception(), Unstable)").value is True
    second.run("job.load_weights(model)", raises="RuntimeError")


def test_killing_the_job_process_loses_the_job(desk: Desk) -> None:
    kernel = desk.kernel()
    job_id = kernel.run(LAUNCH.format(f"train, (model, {desk.gate!r})")).value
    workers = [psutil.Process(pid) for pid in kernel.run("list(job.pids.values())").value]
    job_process = workers[0].parent()
    assert job_process is not None
    job_process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, 30)
    assert not alive
    error = kernel.run("job.result(200)", raises="JobLost").error
    assert error is not None
    assert str(desk.folder) in error.value
    assert kernel.run("job.status, [one.status for one in nblaunch.jobs()]").value == ("lost", ["lost"])
    assert desk.command("jobs").stdout.endswith(f"{job_id}: its process was killed\n")
    log = desk.command("logs", job_id)
    assert log.returncode == 0
    assert log.stdout == kernel.run("job.logs(0)").value
    assert desk.command("attach", job_id).returncode == 1


REMOVALS = {
    "folder": "import shutil; shutil.rmtree(job.log_dir.rename(f'{job.log_dir}-removed'))",
    "jobs": "import shutil; shutil.rmtree(job.log_dir.parent.rename(f'{job.log_dir.parent}-removed'))",
    "old files": "for path in job.log_dir.iterdir():\n    path.is_file() and path.name != 'snapshot' and path.unlink()",
}


@pytest.mark.parametrize("what", ["folder", thorough("jobs"), thorough("old files")])
@pytest.mark.thorough
def test_running_job_restores_removed_files(desk: Desk, what: str) -> None:
    kernel = desk.kernel()
    job_id = kernel.run(LAUNCH.format(f"train, (model, {desk.gate!r})")).value
    lines = "job.logs(0).splitlines()[-1:], job.logs(1).splitlines()[-1:]"
    at_gate = (["step 9 of rank 0"], ["step 9 of rank 1"])
    kernel.wait_until(lambda: kernel.run(lines).value == at_gate, 180, "both ranks at the gate")
    kernel.run(REMOVALS[what])
    listed = kernel.run("[(one.id, one.status, one.problem) for one in nblaunch.jobs()]").value
    assert listed == [(job_id, "running", "")]
    shell = desk.command("jobs")
    assert (shell.returncode, shell.stdout.count(job_id) > 0) == (0, True)
    second = desk.kernel()
    second.run("again = nblaunch.attach()")
    assert "train" in second.run("again.stacks()").value
    desk.release()
    for one, name in ((kernel, "job"), (second, "again")):
        assert one.run(f"{name}.result(180)['rank']").value == 0
        assert one.run(f"[row['step'] for row in {name}.metrics]").value == list(range(20))
        for rank in range(2):
            shown = one.run(f"{name}.logs({rank}).splitlines()").value
            assert shown == [line.format(rank) for line in LINES]
    assert second.run("sorted(again.weights())").value == [0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip(f"can't mount: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(path: Path) -> None:
    with path.open("wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))


RETURN_MUCH = """
def return_much(model, gate):
    open(gate + "0").close()
    with torch.no_grad():
        model.weight.fill_(2.0)
    return torch.ones(1 << 19)    # 2 MB

model = torch.nn.Linear(1 << 10, 1 << 8)    # 1 MB
job = notebook_launcher(
    return_much, (model, {gate!r}), num_processes=1, background=True, detach=True, dashboard="text"
)
"""


def test_a_job_without_disk_space_is_rejected(small_disk: Path, desk: Desk) -> None:
    desk.env["NBLAUNCH_LOG_DIR"] = str(small_disk)
    kernel = desk.kernel()
    kernel.run("import nblaunch")
    kernel.run("nblaunch.notebook_launcher(int, background=True, detach=True).result(180)")
    _fill(small_disk / "filler")
    cell = kernel.run("nblaunch.notebook_launcher(int, background=True, detach=True)", raises="LaunchError")
    assert cell.error is not None
    assert f"the disk at {small_disk} is full" in cell.error.value
    assert kernel.run("[job.status for job in nblaunch.jobs()]").value == ["done"]


@pytest.mark.parametrize("ending", ["room", thorough("stop")])
def test_full_disk_result_waits_for_space_or_is_dropped(small_disk: Path, desk: Desk, ending: str) -> None:
    desk.env["NBLAUNCH_LOG_DIR"] = str(small_disk)
    kernel = desk.kernel()
    kernel.run(RETURN_MUCH.format(gate=desk.gate))
    filler = small_disk / "filler"
    _fill(filler)
    open(f"{desk.gate}0", "w").close()
    listed = "[(one.status, one.problem) for one in nblaunch.jobs()]"
    kernel.wait_until(lambda: kernel.run(listed).value[0][0] == "waiting", 180, "the job waiting for room")
    _, problem = kernel.run(listed).value[0]
    assert "waits for 2.10 MB of space in" in problem
    assert "the disk at" in problem
    kernel.wait_until(lambda: "waits for 2.10 MB" in _last_update(kernel), 180, "the note in the cell")
    assert problem in desk.command("jobs").stdout
    assert kernel.run("job.status").value == "waiting"
    if ending == "room":
        filler.unlink()
        assert kernel.run("job.result(200).sum().item()").value == 1 << 19
        assert kernel.run("job.weights()[0]['weight'].mean().item()").value == 2.0
        assert desk.command("attach").returncode == 0
    else:
        assert desk.command("stop").returncode == 0
        error = kernel.run("job.result(200)", raises="ResultError").error
        assert error is not None
        assert "the result could not be written: the disk at" in error.value
        assert "dropped on request" in error.value
        kernel.run("job.weights()", raises="ResultError")
        assert kernel.run(listed).value == [("done", "")]
        filler.unlink()
    kernel.wait_for_no_processes()


@pytest.mark.thorough
def test_reattaching_reuses_and_detaching_frees_resources(desk: Desk) -> None:
    kernel = desk.kernel()
    kernel.run(LAUNCH.format(f"train, (model, {desk.gate!r})"))
    kernel.wait_until(lambda: len(kernel.run("job.metrics").value) == 10, 180, "both ranks at the gate")
    # A follower briefly opens the job's folder several times a second.
    taken = (
        "import threading\n"
        "counts = [len(os.listdir('/proc/self/fd')) for _ in range(100)]\n"
        "threading.active_count(), min(counts)"
    )
    before = kernel.run(taken).value
    kernel.run("jobs = [nblaunch.attach(dashboard='text') for _ in range(10)]")
    assert kernel.run("all(one is job for one in jobs)").value is True
    threads, fds = kernel.run(taken).value
    assert threads == before[0]
    assert fds <= before[1] + 1, "a folder that is open for a moment"
    kernel.wait_until(lambda: "step 9 of rank 1" in _last_update(kernel), 180, "the lines in the last cell")
    kernel.run("job.detach()")
    kernel.wait_until(lambda: "no longer followed" in _last_update(kernel), 180, "the end of the display")
    assert "still running" in _last_update(kernel)
    threads, fds = kernel.run(taken).value
    assert threads == before[0] - 1
    assert fds < before[1]
    kernel.run("job.result(1)", raises="RuntimeError")
    assert kernel.run("[one.status for one in nblaunch.jobs()]").value == ["running"]
    kernel.run("new = nblaunch.attach(dashboard='text')")
    assert kernel.run("new is job").value is False
    desk.release()
    assert kernel.run("new.result(180)['rank']").value == 0
    assert kernel.run("[row['step'] for row in new.metrics]").value == list(range(20))


def test_an_interrupt_ends_a_detached_job(desk: Desk) -> None:
    kernel = desk.kernel()
    kernel.run(LAUNCH.format("wait_for_stop"))
    kernel.run("job.interrupt()\njob.result(180)", raises="KeyboardInterrupt")
    assert kernel.run("job.status").value == "interrupted"
    kernel.wait_for_no_processes()


def test_a_follower_sees_all_attempts(desk: Desk) -> None:
    kernel = desk.kernel()
    kernel.run(
        "import sys\n"
        "def flaky():\n"
        "    attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    print('attempt', attempt)\n"
        "    assert attempt, 'the first fails'\n"
        "    return attempt, sys.argv"
    )
    kernel.run(LAUNCH.format("flaky, max_restarts=1"))
    cell = kernel.run("again = nblaunch.attach(dashboard='text')\nagain.result(180)")
    assert cell.value == (1, kernel.run("sys.argv").value)
    assert kernel.run("again.attempt, again.logs(1, attempt=0), again.logs(1)").value == (
        1,
        kernel.run("job.logs(1, attempt=0)").value,
        "attempt 1\n",
    )


IN_A_THREAD = """
from concurrent.futures import ThreadPoolExecutor
def launch(function, **settings):
    with ThreadPoolExecutor(1) as pool:
        wanted = {"num_processes": 2, "start_method": "fork", "dashboard": "none", **settings}
        return pool.submit(notebook_launcher, function, **wanted).result()
"""


LIBRARY_WITH_THREADS = """
import os, pathlib, sys
folder = pathlib.Path({!r}, "modules", "numba", "np", "ufunc")
folder.mkdir(parents=True)
(folder.parents[1] / "__init__.py").write_text("import numba.np.ufunc.parallel")
(folder / "parallel.py").write_text("_is_initialized = True")    # the threads that a fork would not copy
sys.path.insert(0, str(folder.parents[2]))
import numba

def use(model):
    return numba.__name__
"""


@pytest.mark.thorough
def test_followed_job_has_the_job_process_plan(desk: Desk) -> None:
    kernel = desk.kernel()
    kernel.run(LIBRARY_WITH_THREADS.format(str(desk.folder)))
    launch = "notebook_launcher(use, (model,), 2, background=True, detach=True, threads_per_process=3)"
    kernel.run(f"job = {launch}; job.wait(180)")
    start_method, fallback, others = kernel.run(
        "plan = job.plan; plan.start_method, plan.fallback, (plan.num_processes, plan.num_threads, plan.modules)"
    ).value
    assert start_method == "forkserver"
    assert "numba" in fallback
    assert others == (2, 3, {})


def test_detached_workers_are_forked_from_the_job_process(desk: Desk) -> None:
    """Another process also restarts them, so no fork happens while other code of the kernel runs."""
    kernel = desk.kernel()
    kernel.run(IN_A_THREAD + "def parent():\n    return os.getppid()")
    kernel.run("launch(parent)", raises="LaunchError")
    kernel.run("job = launch(parent, max_restarts=1, background=True, detach=True)")
    assert kernel.run("job.result(200)").value != kernel.pid


OF_ANOTHER_VERSION = """
import os
os.environ["NBLAUNCH_LOG_DIR"] = {!r}
import nblaunch
from nblaunch.detached.folder import open_home
path = open_home().path / "train-3f9a2c"
path.mkdir(mode=0o700)
(path / "record.json").write_text('{{"format": 99}}')
"""


def test_a_rejected_attach_is_displayed(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(OF_ANOTHER_VERSION.format(str(tmp_path)))
    cell = kernel.run("nblaunch.attach()", raises="LookupError")
    assert "another version" in str(cell.displays[0].data)

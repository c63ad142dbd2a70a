"""A job with ``post_mortem=True`` in a real kernel: its kept workers, inspected and released."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.kernels import Kernel
from tests.profiles import python_of
from tests.thorough import thorough

PREAMBLE = """
import torch, nblaunch
from nblaunch import Accelerator, notebook_launcher

def train(bad_rank=1, bad_step=3):
    accelerator = Accelerator()
    rank = accelerator.process_index
    for step in range(10):
        batch = torch.ones(8 - (rank == bad_rank), 16)
        if step == bad_step and rank == bad_rank:
            raise ValueError("boom")
        accelerator.reduce(batch.sum())
"""
LAUNCH = "notebook_launcher(train, num_processes={}, post_mortem=True)"


@pytest.fixture(scope="module", params=["newest", thorough("colab")])
def of_a_profile(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Start a kernel of each kind, in which several tests run failing jobs one after the other."""
    with Kernel.start(python=python_of(request.param)) as kernel:
        kernel.run(PREAMBLE)
        yield kernel
        _fail(kernel)  # closing fails if kept workers outlive the kernel


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """Start a kernel for tests that need only one kind, and leave no worker behind."""
    with Kernel.start() as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.fixture
def failed(of_a_profile: Kernel, nothing_left_behind: None) -> Iterator[Kernel]:
    """Run a job of three ranks, of which rank 1 fails while the others wait in a collective."""
    _fail(of_a_profile)
    yield of_a_profile
    of_a_profile.run("nblaunch.last_job().release()")
    of_a_profile.wait_for_no_processes()


def _fail(kernel: Kernel) -> None:
    cell = kernel.run(LAUNCH.format(3), raises="ValueError")
    assert cell.error is not None
    assert 'raise ValueError("boom")' in cell.error.text


def test_every_rank_can_be_inspected_even_in_a_collective(failed: Kernel) -> None:
    shapes = "{rank: tuple(shape) for rank, shape in nblaunch.last_job().inspect('batch.shape').items()}"
    assert failed.run(shapes).value == {0: (8, 16), 1: (7, 16), 2: (8, 16)}
    assert failed.run("nblaunch.last_job().inspect('step + 1')").result == "[0-2] 4"
    names = "{type(value).__name__ for value in nblaunch.last_job().inspect('absent').values()}"
    assert failed.run(names).value == {"NameError"}
    assert failed.run("sum(nblaunch.last_job().inspect('sum(n for n in range(step))').values())").value == 9


def test_collectives_wait_for_the_debugger_unless_their_group_has_a_limit(shared: Kernel) -> None:
    shared.run("""
def days(group):
    return group._get_backend(torch.device("cpu")).options._timeout.days
def groups():
    import datetime, torch.distributed as dist
    dist.init_process_group("gloo")
    limit = datetime.timedelta(days=3)
    return days(dist.group.WORLD), days(dist.new_group()), days(dist.new_group(timeout=limit))
""")
    assert shared.run("notebook_launcher(groups, num_processes=2, post_mortem=True)").value == (1, 1, 3)
    assert shared.run("notebook_launcher(groups, num_processes=2)").value == (0, 0, 3)


def test_compare_names_the_differing_rank(failed: Kernel) -> None:
    failed.run("comparison = nblaunch.last_job().compare()")
    assert failed.run("next(iter(comparison.differing.items()))").value == (
        "batch.shape",
        {0: "(8, 16)", 1: "(7, 16)", 2: "(8, 16)"},
    )
    assert failed.run("comparison.equal['step'], comparison.differing['rank']").value == (
        "3",
        {0: "0", 1: "1", 2: "2"},
    )
    text = failed.run("comparison").result or ""
    assert "batch.shape is (7, 16) on rank 1, (8, 16) on ranks 0 and 2" in text


def test_compare_uses_the_innermost_common_function(shared: Kernel) -> None:
    shared.run(
        """
def helper(batch, rank):
    if rank == 1:
        raise ValueError("boom")
def steps():
    rank = Accelerator().process_index
    for step in range(10):
        batch = torch.ones(8 - (rank == 1 and step == 3), 16)
        if step == 3:
            helper(batch, rank)
        Accelerator().reduce(batch.sum())
"""
    )
    shared.run("notebook_launcher(steps, num_processes=2, post_mortem=True)", raises="ValueError")
    differing = shared.run("nblaunch.last_job().compare().differing").value
    assert differing == {"batch.shape": {0: "(8, 16)", 1: "(7, 16)"}, "rank": {0: "0", 1: "1"}}
    cell = shared.submit("nblaunch.debug(0)", is_typed_into=True)
    cell.type("w")
    cell.type("q")
    assert "steps()" in cell.wait().stdout
    assert "ipykernel" not in cell.stdout.replace("/tmp/ipykernel_", "")
    shared.run("nblaunch.last_job().release()")
    shared.wait_for_no_processes()


def test_pdb_opens_at_the_failure_or_on_another_rank(failed: Kernel) -> None:
    cell = failed.submit("nblaunch.debug()", is_typed_into=True)
    for line in ("p step, bad_rank", "!print('from', rank)", "nonsense)", "p 'q' + 'uit'"):
        cell.type(line)
    cell.type("q")
    cell.wait()
    assert cell.status == "ok"
    for text in ('-> raise ValueError("boom")', "(3, 1)", "from 1", "SyntaxError", "'quit'"):
        assert text in cell.stdout, cell.describe()
    cell = failed.submit("nblaunch.debug(2)", is_typed_into=True)
    for line in ("batch.shape", "c"):
        cell.type(line)
    cell.wait()
    assert "-> accelerator.reduce(batch.sum())" in cell.stdout
    assert "torch.Size([8, 16])" in cell.stdout
    with pytest.raises(AssertionError, match="without asking"):
        failed.submit("nblaunch.debug(7)", is_typed_into=True).wait_for_input()


def test_sigchld_handlers_do_not_end_a_waiting_rank(shared: Kernel) -> None:
    shared.run(
        """
import os, signal
def on_child(signum, frame): raise RuntimeError("raised by the handler")
def set_and_fail():
    signal.signal(signal.SIGCHLD, on_child)
    raise ValueError("boom")
"""
    )
    shared.run("notebook_launcher(set_and_fail, num_processes=2, post_mortem=True)", raises="ValueError")
    shared.run("nblaunch.last_job().inspect('os.kill(os.getpid(), signal.SIGCHLD)')")
    assert shared.run("nblaunch.last_job().inspect('1 + 1')").result == "[0-1] 2"
    shared.run("nblaunch.last_job().release()")
    shared.wait_for_no_processes()


def test_release_drops_the_arguments(shared: Kernel) -> None:
    shared.run(
        """
import gc, weakref
def fail(model): raise ValueError("boom")
model = torch.nn.Linear(2, 2)
seen = weakref.ref(model)
"""
    )
    shared.run("notebook_launcher(fail, (model,), num_processes=2, post_mortem=True)", raises="ValueError")
    shared.run("nblaunch.last_job().release()\ndel model\n_ = gc.collect()")
    assert shared.run("seen() is None").value is True


def test_the_workers_end_with_release_and_with_the_next_launch(failed: Kernel) -> None:
    assert failed.processes()
    failed.run("nblaunch.last_job().release()")
    failed.wait_for_no_processes()
    failed.run("nblaunch.last_job().inspect('step')", raises="RuntimeError")
    failed.run(LAUNCH.format(2), raises="ValueError")
    failed.run("first = nblaunch.last_job(); pids = set(first.pids.values())")
    failed.run("notebook_launcher(train, (5, 0), num_processes=2, start_method='fork')")
    assert failed.run("nblaunch.last_job().plan.start_method").value == "fork"
    failed.wait_for_no_processes()


@pytest.mark.parametrize(
    ("launch", "error"),
    [
        ("notebook_launcher(train, num_processes=2, mixed_precision='fp8')", "ValueError"),
        ("notebook_launcher(train, num_processes=2, dashboard='?')", "ValueError"),
        (
            "notebook_launcher(train, num_processes=2, background=True, max_restarts=1, start_method='fork')",
            "ValueError",
        ),
        (
            "notebook_launcher(train, (__import__('threading').Lock(),), 2, background=True, detach=True)",
            "PayloadError",
        ),
        ("nblaunch.Session(2, mixed_precision='fp8')", "ValueError"),
    ],
)
def test_a_rejected_launch_keeps_the_workers(shared: Kernel, launch: str, error: str) -> None:
    shared.run(LAUNCH.format(2), raises="ValueError")
    shared.run(launch, raises=error)
    assert shared.run("nblaunch.last_job().inspect('step')").result == "[0-1] 3"
    assert shared.run("nblaunch.Session(2, start_method='fork').close()").stdout == ""
    shared.wait_for_no_processes()


def test_kept_workers_end_after_a_time(kernel: Kernel) -> None:
    kernel.run(PREAMBLE + "from nblaunch.launcher import runner\nrunner._KEPT_S = 5.0")
    kernel.run(LAUNCH.format(2), raises="ValueError")
    assert kernel.run("nblaunch.last_job().find_debugger()[1]").value == 1
    kernel.wait_for_no_processes()
    kernel.run("nblaunch.debug()", raises="RuntimeError")


def test_ended_jobs_close_their_connections(shared: Kernel) -> None:
    shared.run("""
import os
from contextlib import suppress
jobs = []
def end_well_and_badly():
    for bad_rank in (5, 1):
        with suppress(ValueError):
            notebook_launcher(train, (bad_rank,), num_processes=2, post_mortem=True)
        jobs.append(nblaunch.last_job())
        jobs[-1].release()
def num_sockets():
    return sum("socket:" in os.path.realpath(file.path) for file in os.scandir("/proc/self/fd"))
""")
    shared.run("end_well_and_badly(); before = num_sockets(); end_well_and_badly()")
    assert shared.run("num_sockets() - before").value == 0
    shared.wait_for_no_processes()


def test_exit_handlers_of_the_failed_rank_run_when_it_is_released(shared: Kernel) -> None:
    shared.run("""
def fails():
    import atexit
    atexit.register(print, "handler ran", flush=True)
    raise ValueError("boom")
""")
    shared.run(
        "notebook_launcher(fails, num_processes=1, start_method='fork', post_mortem=True)",
        raises="ValueError",
    )
    assert "handler ran" not in (shared.run("nblaunch.last_job().logs(0)").result or "")
    shared.run("nblaunch.last_job().release()")
    assert "handler ran" in (shared.run("nblaunch.last_job().logs(0)").result or "")
    shared.wait_for_no_processes()


@pytest.mark.parametrize(
    ("death", "error"), [("pass", "KeyboardInterrupt"), ("os.kill(os.getpid(), 9)", "WorkerDied")]
)
def test_exit_handlers_run_if_no_worker_is_kept(shared: Kernel, death: str, error: str) -> None:
    """An interrupt ends the job, and so does a rank that a signal kills."""
    shared.run(f"""
def waits():
    import atexit, os, time
    atexit.register(print, "handler ran", flush=True)
    print("waits", flush=True)
    if Accelerator().process_index == 1:
        {death}
    time.sleep(3600)
""")
    cell = shared.submit("notebook_launcher(waits, num_processes=2, start_method='fork', post_mortem=True)")
    if error == "KeyboardInterrupt":
        for rank in (0, 1):
            cell.wait_for_text(f"[{rank}] waits")
        shared.interrupt()
    cell.wait()
    assert cell.error is not None
    assert cell.error.name == error, cell.describe()
    assert "handler ran" in shared.run("nblaunch.last_job().logs(0)").value
    shared.wait_for_no_processes()


@pytest.mark.parametrize("profile", ["newest", thorough("colab")])
def test_nothing_outlives_a_killed_kernel(profile: str) -> None:
    with Kernel.start(python=python_of(profile)) as kernel:
        kernel.run(PREAMBLE)
        _fail(kernel)
        os.kill(kernel.pid, signal.SIGKILL)
        kernel.wait_for_exit()
        kernel.wait_for_no_processes()


def test_breakpoints_do_not_wait_without_a_user(failed: Kernel) -> None:
    failed.run("nblaunch.debug()", raises="RuntimeError")
    failed.run("def stops():\n    breakpoint()\n    return 5")
    cell = failed.run("notebook_launcher(stops, num_processes=2)")
    assert cell.result == "5"
    assert "there is no interactive input" in cell.stdout


def test_a_background_job_can_be_inspected(shared: Kernel) -> None:
    shared.run("""
import os
reading, writing = os.pipe()
def waits():
    accelerator = Accelerator()
    token = 40 + accelerator.process_index
    os.read(reading, 1)
    raise ValueError("boom")
job = notebook_launcher(waits, num_processes=2, background=True, post_mortem=True)
""")
    shared.run(
        "import time\nwhile not {40, 41} <= set(map(str, job.inspect('token').values())) | set(job.inspect("
        "'token').values()): time.sleep(0.01)"
    )
    shared.run("os.write(writing, b'..'); job.wait()")
    assert shared.run("dict(job.inspect('token'))").value == {0: 40, 1: 41}
    shared.run("job.release()")
    shared.wait_for_no_processes()


def test_several_machines_are_rejected(shared: Kernel) -> None:
    shared.run("notebook_launcher(train, num_nodes=2, post_mortem=True)", raises="ValueError")

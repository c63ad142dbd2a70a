"""Jobs in the background, as futures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel

# A worker waits at a named pipe until the test opens the other side.
GATE = """
import tempfile
folder = tempfile.mkdtemp()
def gate(name):
    path = os.path.join(folder, name)
    os.path.exists(path) or os.mkfifo(path)
    return path
def train(path, value):
    print("waits")
    with open(path) as file:
        file.read()
    print("goes on")
    return value
def let_go(path):
    with open(path, "w"):
        pass
"""


def test_a_background_job_leaves_the_kernel_free(shared: Kernel) -> None:
    shared.run(GATE)
    cell = shared.run(
        "path = gate('one'); job = notebook_launcher(train, (path, 5), 1, background=True); job"
    )
    assert "train on 1 cpu worker, running" in (cell.result or "")
    assert shared.run("model = nn.Linear(3, 3); model(torch.ones(3)).shape[0]").result == "3"
    timed_out = shared.run("job.wait(0.05)", raises="TimeoutError")
    assert "0.05" in timed_out.raised.value
    cell = shared.run("job.status, job.is_running, nblaunch.last_job() is job, job.logs(0)")
    assert cell.result is not None
    status, is_running, is_last, logs = cell.value
    assert (status, is_running, is_last) == ("running", True, True)
    assert logs in ("", "waits\n")  # the job may have just started
    cell = shared.run(
        "let_go(path); job.result(200), job.results(), job.exception(), job.status, job.logs(0)"
    )
    assert cell.value == (5, [5], None, "done", "waits\ngoes on\n")
    assert shared.processes() == []
    bad = shared.run("job.logs(1)", raises="ValueError")
    assert "rank=1" in bad.raised.value


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_job_outlives_the_thread_that_launched_it(
    shared: Kernel, start_method: str, tmp_path: Path
) -> None:
    cell = shared.run(
        f"""
import threading
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.002)
    return "unharmed"
jobs = []
def launch():
    jobs.append(notebook_launcher(wait, ({str(tmp_path / "go")!r},), 2, background=True, start_method={start_method!r}))
thread = threading.Thread(target=launch)
thread.start()
thread.join()
while os.path.exists(f"/proc/self/task/{{thread.native_id}}"):    # it ends a moment after join() returns
    pass
open({str(tmp_path / "go")!r}, "w").close()
jobs[0].result(180)
""",
    )
    assert cell.value == "unharmed"


def test_background_jobs_run_beside_a_blocking_one(shared: Kernel) -> None:
    shared.run(GATE)
    cell = shared.run(
        """
def reduce(path):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    train(path, None)
    dist.barrier()
    return total.item()
# Each rank has its own gate, so that no opening of one is met by the wrong side.
def on_gates(name):
    return reduce(os.path.join(folder, name + os.environ["RANK"]))
for name in ("a0", "a1", "b0", "b1"):
    gate(name)
first = notebook_launcher(on_gates, ("a",), 2, background=True)
second = notebook_launcher(on_gates, ("b",), 2, background=True)
between = notebook_launcher(lambda: "between", num_processes=2)
states = first.status, second.status
for name in ("b0", "b1"):
    let_go(gate(name))
second_value = second.result(180)
first_still = first.is_running
for name in ("a0", "a1"):
    let_go(gate(name))
states, between, second_value, first_still, first.result(180), nblaunch.last_job() is second
"""
    )
    assert cell.value == (("running", "running"), "between", 2.0, True, 2.0, False)
    assert shared.processes() == []


def test_a_job_is_interrupted_or_cancelled(shared: Kernel) -> None:
    shared.run(GATE)
    cell = shared.run(
        """
def wait(path):
    try:
        train(path, None)
    finally:
        print("cleaned up")
ended = {}
for how in ("interrupt", "cancel"):
    job = notebook_launcher(wait, (gate(how),), 1, background=True)
    while "waits" not in job.logs(0):
        time.sleep(0.01)
    getattr(job, how)()
    try:
        job.result(200)
    except BaseException as error:
        ended[how] = type(error).__name__, type(job.exception()).__name__, job.status, "cleaned up" in job.logs(0)
    getattr(job, how)()     # of a job that has ended: nothing
ended
"""
    )
    assert cell.value == {
        "interrupt": ("KeyboardInterrupt", "KeyboardInterrupt", "interrupted", True),
        "cancel": ("JobCancelled", "JobCancelled", "cancelled", False),
    }
    assert shared.processes() == []


def test_the_interrupt_button_stops_a_blocking_job_only(shared: Kernel) -> None:
    shared.run(GATE)
    shared.run("behind = notebook_launcher(train, (gate('behind'), 'unharmed'), 1, background=True)")
    cell = shared.submit(
        """
def wait(path):
    try:
        train(path, None)
    finally:
        print("cleaned up")
notebook_launcher(wait, (gate("front"),), 1)
"""
    )
    cell.wait_for_text("waits")
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert "cleaned up" in cell.stdout
    assert "/nblaunch/" not in cell.raised.text
    assert shared.run("let_go(gate('behind')); behind.result(180)").result == "'unharmed'"


def test_a_background_job_that_cannot_start_raises_in_the_call(shared: Kernel) -> None:
    shared.run(
        """
import threading
lock = threading.Lock()
raised = []
def launch():
    notebook_launcher(lambda: lock, num_processes=2, background=True, start_method="forkserver")
def launch_in_a_thread():
    try:
        launch()
    except Exception as error:
        raised.append(type(error).__name__)
thread = threading.Thread(target=launch_in_a_thread)
thread.start()
thread.join()
"""
    )
    assert shared.run("raised").value == ["PayloadError"]
    for _ in range(3):  # this once depended on timing
        assert "lock" in shared.run("launch()", raises="PayloadError").raised.value
    cell = shared.run(
        """
job = notebook_launcher(lambda: 1 / 0, num_processes=2, background=True)
type(job.exception(20)).__name__, job.status
"""
    )
    assert cell.result == "('ZeroDivisionError', 'failed')"
    for _ in range(2):
        shared.run("job.result()", raises="ZeroDivisionError")


def test_an_interrupt_at_the_very_end_stops_the_cell_and_loses_no_result(shared: Kernel) -> None:
    """The workers are done, and the launcher is reading their results, so no rank is left to be interrupted."""
    shared.run(
        """
import signal
from nblaunch.launcher import weights

load_back = weights.load_back

def load_back_during_an_interrupt(*args):
    os.kill(os.getpid(), signal.SIGINT)
    return load_back(*args)

weights.load_back = load_back_during_an_interrupt
was_stopped = True
"""
    )
    shared.run(
        """
notebook_launcher(lambda: 7, num_processes=2)
was_stopped = False
""",
        raises="KeyboardInterrupt",
    )
    shared.run("weights.load_back = load_back")
    cell = shared.run("was_stopped, nblaunch.last_job().result(), nblaunch.last_job().status")
    assert cell.result == "(True, 7, 'done')"

"""Root causes, restarts, stopping on request, and the references of a stored error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failures.conftest import assert_as_before, value_of
from tests.kernels import Kernel
from tests.thorough import thorough


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_error_is_blamed_and_not_its_consequences(shared: Kernel, method: str) -> None:
    shared.run(
        """
def train():
    dist.init_process_group()
    dist.all_reduce(torch.ones(2))
    if rank() == 1:
        raise ValueError("on rank 1")
    dist.all_reduce(torch.ones(2))
"""
    )
    for _ in range(5 if method == "fork" else 1):
        cell = shared.run(
            f"""
try:
    notebook_launcher(train, num_processes=4, start_method={method!r})
except ValueError as error:
    print("caught", error)
"""
        )
        assert cell.stdout.splitlines()[-1] == "caught on rank 1"
    assert_as_before(shared)


def test_the_earliest_error_is_the_cause(shared: Kernel, tmp_path: Path) -> None:
    # Long enough for the others to raise, too, on busy cores.
    shared.run(
        "from nblaunch.launcher import escalation\nusual_s, escalation.COLLECT_S = escalation.COLLECT_S, 180.0"
    )
    cell = shared.run(
        f"""
import psutil
def train(folder):
    open(folder + f"/here{{rank()}}", "w").close()
    while not all(os.path.exists(folder + f"/here{{other}}") for other in range(3)):
        time.sleep(0.001)
    if rank() == 2:
        with open(folder + "/pid.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, folder + "/pid")
        raise LookupError("the first")
    while not os.path.exists(folder + "/pid"):
        time.sleep(0.001)
    with open(folder + "/pid") as file:
        pid = int(file.read())
    while psutil.pid_exists(pid):                             # until it has ended
        time.sleep(0.001)
    raise ValueError(f"{{rank()}} is later")
notebook_launcher(train, ({str(tmp_path)!r},), 3)
""",
        raises="LookupError",
    )
    shared.run("escalation.COLLECT_S = usual_s")
    assert cell.raised.value == "the first"
    assert "rank 0: ValueError: 0 is later; rank 1: ValueError: 1 is later" in cell.raised.lines
    assert_as_before(shared)


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_two_failures_then_success(shared: Kernel, method: str, tmp_path: Path) -> None:
    cell = shared.run(
        f"""
def train(folder):
    dist.init_process_group()
    attempt = nblaunch.context.current().attempt
    print("attempt", attempt)
    if rank() == 0 and attempt < 2:
        raise ValueError(f"flaky {{attempt}}")
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item(), attempt
import nblaunch.context
print(notebook_launcher(train, ({str(tmp_path)!r},), 2, start_method={method!r}, max_restarts=3))
job = nblaunch.last_job()
print([job.logs(0, attempt) for attempt in range(3)], job.status)
""",
    )
    assert cell.stdout.splitlines()[-2:] == [
        "(2.0, 2)",
        "['attempt 0\\n', 'attempt 1\\n', 'attempt 2\\n'] done",
    ]
    assert "rank 0 raised ValueError: flaky 0" in cell.shown
    assert "restart 2 of at most 3" in cell.shown
    assert_as_before(shared)


def test_giving_up_names_all_failures(shared: Kernel) -> None:
    cell = shared.run(
        """
def train():
    attempt = nblaunch.context.current().attempt
    if rank() == 1:
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"flaky {attempt}")
    time.sleep(3600)
import nblaunch.context
notebook_launcher(train, num_processes=2, max_restarts=2)
""",
        raises="ValueError",
    )
    assert cell.raised.value == "flaky 2"
    assert "attempt 0: rank 1 raised ValueError: flaky 0" in cell.raised.text, cell.describe()
    assert "attempt 1: rank 1 was killed by SIGKILL" in cell.raised.text, cell.describe()
    assert len(cell.raised.lines) <= 25
    assert_as_before(shared)


STOPPABLE = """
from nblaunch import Accelerator
from nblaunch.wire import stop_agreement
import nblaunch.context

def with_accelerator():
    accelerator = Accelerator()
    step = 0
    while not accelerator.should_stop:
        dist.all_reduce(torch.ones(2))
        step += 1
        if step == 20:
            print("under way", flush=True)
    return step

def with_slot():
    dist.init_process_group()
    slot = nblaunch.context.current().slot
    step = 0
    while not stop_agreement.should_stop(slot):
        time.sleep(0.01 * (1 + rank()))          # ranks of unequal pace
        dist.all_reduce(torch.ones(2))
        step += 1
        if step == 5:
            print("under way", flush=True)
    return step

before = traces()      # the training modules set variables of torch's compiler when they are imported first
"""


@pytest.mark.parametrize(
    ("function", "method"),
    [("with_accelerator", "fork"), ("with_slot", "fork"), thorough("with_slot", "forkserver")],
)
def test_stop_ends_loops_at_the_same_step(shared: Kernel, function: str, method: str) -> None:
    shared.run(
        STOPPABLE
        + f"job = notebook_launcher({function}, (), 3, start_method={method!r}, background=True, return_all=True)"
    )
    shared.wait_until(lambda: "under way" in value_of(shared, "job.logs(2)"), 180, "the loop")
    cell = shared.run("job.stop()\njob.result(), job.status")
    assert f"{function}: stopped early on request after " in shared.run("job").shown
    steps, status = cell.value
    assert status == "done"
    assert len(set(steps)) == 1
    assert steps[0] >= 5
    assert_as_before(shared)


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_a_kept_error_does_not_keep_the_job(shared: Kernel, method: str) -> None:
    shared.run(
        f"""
import gc, weakref
from nblaunch.launcher.supervisor import Supervisor
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.store import StoreHost
from nblaunch.wire.board import Board
model = torch.nn.Linear(64, 64)
alive = weakref.ref(model)
def train(model):
    dist.init_process_group()
    raise ValueError("with the model in reach")
notebook_launcher(train, (model,), 2, start_method={method!r})
""",
        raises="ValueError",
    )
    shared.run("kept = (sys.last_value, sys.last_traceback, sys.last_value.__cause__)")
    left = value_of(
        shared,
        "(gc.collect(), [type(o).__name__ for o in gc.get_objects() "
        "if isinstance(o, (Supervisor, Attempt, StoreHost, Board))])[1]",
    )
    assert left == []
    # Once job and error are dropped, the launcher holds no reference to the model.
    shared.run(
        """
notebook_launcher(add_up, num_processes=2)
del kept, model, sys.last_value, sys.last_traceback, sys.last_type
getattr(sys, "last_exc", None) and delattr(sys, "last_exc")
get_ipython().InteractiveTB.tb = get_ipython().InteractiveTB.etype = None
"""
    )
    assert value_of(shared, "(gc.collect(), alive() is None)[1]")
    assert_as_before(shared)

"""engine="inline" runs the function in the kernel itself, as the only rank."""

from __future__ import annotations

import pytest

from nblaunch import notebook_launcher
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec
from tests.kernels import Kernel

RANK_VARIABLES = (
    "{name: os.environ.get(name) for name in ('RANK', 'WORLD_SIZE', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')}"
)


def test_inline_launches_restore_the_kernel(shared: Kernel) -> None:
    cell = shared.run(
        f"""
import nblaunch.context as context, signal, torch.distributed as dist
before = {RANK_VARIABLES}, context.take(), signal.getsignal(signal.SIGINT)
def train(scale):
    accelerator = nblaunch.Accelerator()
    model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=scale))
    accelerator.backward(model(torch.ones(4, 2)).square().mean())
    optimizer.step()
    dist.is_initialized() or dist.init_process_group("gloo")
    return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], context.is_worker(), dist.get_world_size()
value = notebook_launcher(train, (0.1,), engine="inline")
after = {RANK_VARIABLES}, context.take(), signal.getsignal(signal.SIGINT)
value, before == after, dist.is_initialized(), context.is_worker()
"""
    )
    expected = ((shared.pid, "0", "1", True, 1), True, False, False)
    assert cell.value == expected


def test_errors_show_the_functions_line(shared: Kernel) -> None:
    cell = shared.run(
        """
def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    values = []
    return values[3]
notebook_launcher(train, engine="inline")
""",
        raises="IndexError",
    )
    assert "return values[3]" in cell.raised.text
    assert "/nblaunch/" not in cell.raised.text
    assert "failed in rank 0" in cell.displays[-1].data["text/plain"], cell.describe()
    cell = shared.run(
        f"""
import traceback, nblaunch.context as context, torch.distributed as dist
job = nblaunch.last_job()
depths = []
for _ in range(2):
    try:
        job.result()
    except IndexError as error:
        depths.append(len(traceback.extract_tb(error.__traceback__)))
{RANK_VARIABLES}, context.is_worker(), dist.is_initialized(), job.status, depths[0] == depths[1]
"""
    )
    variables, is_worker, is_joined, status, is_stable = cell.value
    assert set(variables.values()) == {None}
    assert (is_worker, is_joined, status, is_stable) == (False, False, "failed", True)


def test_an_exit_code_is_a_failure_of_the_function(shared: Kernel) -> None:
    cell = shared.run(
        """
import sys
from nblaunch import notebook_launcher
def train():
    sys.exit(3)
try:
    notebook_launcher(train, engine="inline")
except SystemExit as error:
    print("code", error.code)
"""
    )
    assert "code 3" in cell.stdout, cell.describe()
    assert "failed in rank 0" in cell.displays[-1].data["text/plain"], cell.describe()


def test_an_exit_without_a_code_counts_as_return(shared: Kernel) -> None:
    cell = shared.run(
        """
import sys
from nblaunch import notebook_launcher
def train():
    sys.exit()
value = notebook_launcher(train, engine="inline")
value, nblaunch.last_job().status
"""
    )
    assert cell.value == (None, "done")


def test_an_interrupt_reaches_the_function_where_it_is(shared: Kernel) -> None:
    cell = shared.submit(
        """
def train():
    import threading
    try:
        print("waiting", flush=True)
        threading.Event().wait(50)
    finally:
        print("cleaned up")
notebook_launcher(train, engine="inline")
"""
    )
    cell.wait_for_text("waiting")
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert "cleaned up" in cell.stdout
    assert shared.run("nblaunch.last_job().status, nblaunch.context.is_worker()").value == (
        "interrupted",
        False,
    )


def test_a_failed_job_keeps_no_variables_of_the_function(shared: Kernel) -> None:
    """A caught error keeps nothing; IPython keeps an uncaught error until a cell raises another one."""
    shared.run(
        """
import gc, weakref
class Big: pass
def fail(big, kind):
    local = Big()
    kept[:] = [weakref.ref(big), weakref.ref(local)]
    try:
        raise KeyError("first")
    except KeyError as cause:
        raise kind("a") from cause
kept = []
"""
    )
    caught = """
alive = []
for kind in (ValueError, KeyboardInterrupt, SystemExit):
    gc.disable()
    try:
        notebook_launcher(fail, (Big(), kind), engine="inline")
    except BaseException:
        pass
    alive.append([each() for each in kept])
    gc.enable()
alive, nblaunch.last_job().status
"""
    assert shared.run(caught).value == ([[None, None]] * 3, "failed")
    launch = "notebook_launcher(fail, (Big(), ValueError), engine='inline')"
    assert 'raise kind("a") from cause' in shared.run(launch, raises="ValueError").raised.text
    again = shared.run("nblaunch.last_job().result()", raises="ValueError")
    assert 'raise kind("a") from cause' in again.raised.text
    assert "KeyError: 'first'" in again.raised.text
    shared.run("1 / 0", raises="ZeroDivisionError")
    assert shared.run("gc.collect()\n[each() for each in kept]").value == [None, None]


def test_cached_device_memory_is_given_back(shared: Kernel) -> None:
    """A backend counts the requests; a worker's memory ends with its process."""
    cell = shared.run(
        """
from nblaunch import backends
from nblaunch.backends.cpu import CpuBackend
class Counting(CpuBackend):
    times = 0
    def empty_cache(self):
        Counting.times += 1
real = backends.discover()["cpu"]
backends._built_in()["cpu"] = Counting()
def fail():
    raise LookupError("in the function")
notebook_launcher(lambda: None, engine="inline")
try:
    notebook_launcher(fail, engine="inline")
except LookupError:
    pass
backends._built_in()["cpu"] = real
Counting.times
"""
    )
    assert cell.result == "2"


def test_inline_rejects_settings_that_need_processes() -> None:
    ran: list[int] = []
    with pytest.raises(ValueError, match="engine='inline'") as rejected:
        notebook_launcher(
            ran.append, (1,), engine="inline", background=True, start_method="spawn", max_restarts=1,
            hang_timeout_s=5.0, on_hang="stop", threads_per_process=2,
        )  # fmt: skip
    for text in (
        "background=True",
        "start_method='spawn'",
        "max_restarts=1",
        "hang_timeout_s=5.0",
        "on_hang='stop'",
        "threads_per_process=2",
    ):
        assert text in str(rejected.value)
    assert ran == []
    with pytest.raises(ValueError, match="background=True"):
        notebook_launcher(ran.append, (1,), engine="inline", background=True)
    assert ran == []
    assert (
        plan_launch(LaunchSpec(ran.append, (1,), engine="inline", hang_timeout_s=None)).start_method
        == "inline"
    )

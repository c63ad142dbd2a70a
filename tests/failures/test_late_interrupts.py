"""Interrupts after the function has returned: value and weights arrive, whatever user's code runs then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failures.conftest import assert_as_before
from tests.kernels import Kernel
from tests.thorough import thorough

DEFINITIONS = """
import logging
KERNEL, folder = os.getpid(), {folder!r}

def mark(name):
    open(os.path.join(folder, name), "w").close()

def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.001)

def goes_on():
    # A session sends the interrupt to the rank, which must not mind. A launch sends none, and says that it waits.
    if moment.startswith("session"):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        os.read(reading, 1)
        signal.set_wakeup_fd(-1)
    else:
        wait_for("waits")

def be_interrupted(number):
    # Rank 1 has returned, too.
    wait_for("returned")
    if number == 0:
        mark("sending")
    goes_on()

class Net(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        if "RANK" in os.environ and moment.endswith("a state_dict"):
            be_interrupted(rank())
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        if os.getpid() == KERNEL and moment.endswith("load_state_dict"):
            signal.raise_signal(signal.SIGINT)  # kill() may leave it to another thread, which is late
        return super().load_state_dict(*args, **kwargs)

class Value:
    def __init__(self, number):
        self.number = number

    def __getstate__(self):
        if self.number == 1:
            mark("returned")
        if moment.endswith("all __getstate__") or (moment.endswith("a __getstate__") and self.number == 0):
            be_interrupted(self.number)
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__.update(state)
        if moment.endswith("__setstate__") and self.number == 0:
            signal.raise_signal(signal.SIGINT)  # kill() may leave it to another thread, which is late

def fill(model):
    torch.nn.init.constant_(model.weight, 7.0)
    return Value(rank())

def numbers(values):
    return [value.number for value in values]

class Waits(logging.Handler):
    def emit(self, record):
        if "still on their way" in record.getMessage():
            mark("waits")

waits = Waits()
logging.getLogger("nblaunch.notes").addHandler(waits)
"""

LAUNCH = "fill, (model,), num_processes=2, return_all=True, interrupt_grace_s=0.1"
IN_RANKS = ("a state_dict", "a __getstate__", "all __getstate__")
IN_KERNEL = ("__setstate__", "load_state_dict")


@pytest.fixture
def prepared(shared: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    shared.run(DEFINITIONS.format(folder=str(tmp_path)))
    shared.run("model = Net(1, 1); moment = ''")
    yield shared
    shared.run("logging.getLogger('nblaunch.notes').removeHandler(waits)")
    assert_as_before(shared)


@pytest.mark.parametrize("where", IN_RANKS + IN_KERNEL)
def test_a_session_loses_nothing(prepared: Kernel, tmp_path: Path, where: str) -> None:
    prepared.run(f"moment = {'session: ' + where!r}; session = nblaunch.Session(2, threads_per_process=1)")
    cell = prepared.submit("session.run(fill, (model,), return_all=True)")
    interrupt_where_ranks_send(prepared, tmp_path, where)
    assert cell.wait().raised.name == "KeyboardInterrupt", cell.describe()
    assert "session.result()" in cell.raised.value
    assert prepared.run("numbers(session.result()), model.weight.item()").value == ([0, 1], 7.0)
    assert prepared.run("session.execute('1')").result == "[0-1] 1"
    prepared.run("session.close()")


@pytest.mark.parametrize("where", IN_RANKS + IN_KERNEL)
def test_a_launch_loses_nothing(prepared: Kernel, tmp_path: Path, where: str) -> None:
    prepared.run(f"moment = {where!r}")
    cell = prepared.submit(f"notebook_launcher({LAUNCH})")
    interrupt_where_ranks_send(prepared, tmp_path, where)
    assert cell.wait().raised.name == "KeyboardInterrupt", cell.describe()
    assert "last_job().result()" in cell.raised.value
    assert prepared.run("numbers(nblaunch.last_job().result()), model.weight.item()").value == ([0, 1], 7.0)


@pytest.mark.parametrize("where", IN_RANKS)
def test_a_background_job_loses_nothing(prepared: Kernel, where: str) -> None:
    prepared.run(f"moment = {where!r}\njob = notebook_launcher({LAUNCH}, background=True)")
    prepared.run("wait_for('sending'); job.interrupt(); job.wait(180)")
    assert prepared.run("numbers(job.result()), model.weight.item()").value == ([0, 1], 7.0)


@pytest.mark.parametrize("where", [IN_RANKS[0], *map(thorough, IN_RANKS[1:])])
def test_a_detached_job_loses_nothing(prepared: Kernel, where: str) -> None:
    prepared.run(f"moment = {where!r}\njob = notebook_launcher({LAUNCH}, background=True, detach=True)")
    prepared.run("wait_for('sending'); job.interrupt(); job.wait(180)")
    assert prepared.run("numbers(job.result())").value == [0, 1]
    assert prepared.run("job.load_weights(model); model.weight.item()").value == 7.0
    prepared.run("job.release(); del job; gc.collect()")


def test_a_second_interrupt_ends_the_wait_and_keeps_the_value(prepared: Kernel, tmp_path: Path) -> None:
    prepared.run("moment = 'a state_dict'\ngoes_on = lambda: time.sleep(3600)")
    cell = prepared.submit(f"notebook_launcher({LAUNCH})")
    interrupt_where_ranks_send(prepared, tmp_path, "a state_dict")
    prepared.wait_until((tmp_path / "waits").exists, 180, "the launcher to wait")
    prepared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt", cell.describe()
    assert prepared.run("numbers(nblaunch.last_job().result())").value == [0, 1]
    assert "could not be copied back: rank 0" in cell.stdout + cell.stderr


def test_ranks_with_nothing_to_send_are_not_awaited(prepared: Kernel, tmp_path: Path) -> None:
    """Rank 1 has returned, its value is not requested, and its last report takes long; rank 0 is still working."""
    prepared.run("""
def uneven():
    if rank() == 0:
        time.sleep(3600)
    def report():
        mark("finishing")
        time.sleep(3600)
    nblaunch.context.current().flush_losses = report
""")
    cell = prepared.submit("notebook_launcher(uneven, num_processes=2, interrupt_grace_s=0.1)")
    prepared.wait_until((tmp_path / "finishing").exists, 180, "rank 1 to report")
    prepared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt", cell.describe()


HALF = """
def half(stubborn=True):
    if rank() == 0:
        return {"loss": 0.25}
    while True:
        try:
            mark("stubborn")
            time.sleep(3600)
        except KeyboardInterrupt:
            mark("not yet")
"""


@pytest.mark.parametrize("kind", ["launch", "background", "detached", "cancelled"])
def test_values_returned_before_a_kill_are_kept(prepared: Kernel, tmp_path: Path, kind: str) -> None:
    prepared.run(HALF)
    settings = "num_processes=2, interrupt_grace_s=3600"
    settings += ", background=True" * (kind != "launch") + ", detach=True" * (kind == "detached")
    cell = prepared.submit(f"job = notebook_launcher(half, {settings})")
    prepared.wait_until((tmp_path / "stubborn").exists, 180, "rank 1 to wait")
    raised = "JobCancelled" if kind == "cancelled" else "KeyboardInterrupt"
    if kind == "launch":
        prepared.interrupt()
        prepared.wait_until((tmp_path / "not yet").exists, 180, "rank 1 to go on")
        prepared.interrupt()
        assert cell.wait().raised.name == raised, cell.describe()
        prepared.run("job = nblaunch.last_job()")
    elif kind == "cancelled":
        prepared.run("job.cancel()")
    else:
        prepared.run("job.interrupt()")
        prepared.wait_until((tmp_path / "not yet").exists, 180, "rank 1 to go on")
        prepared.run("job.interrupt()")
    prepared.run("job.result(200)", raises=raised)
    assert prepared.run("job.exception().partial").value == {0: {"loss": 0.25}}
    prepared.run("job.release(); del job; gc.collect()")


def interrupt_where_ranks_send(kernel: Kernel, folder: Path, where: str) -> None:
    """Interrupt the kernel once rank 0 sends and the other rank has returned; other tests leave this to the kernel."""
    if where in IN_RANKS:
        kernel.wait_until((folder / "sending").exists, 180, "rank 0 to send")
        kernel.interrupt()

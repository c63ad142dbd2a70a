"""The interrupt button, whatever workers are doing."""

from __future__ import annotations

import re
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.failures.conftest import START_METHODS, across_methods, assert_as_before, value_of
from tests.kernels import Cell, Kernel
from tests.thorough import thorough

GRACE_S = 1.0
TERM_GRACE_S = 1.0
LONG_S = 3600.0
"""A grace period that no test reaches: workers that end in time do so without it."""


@dataclass(frozen=True)
class State:
    """The activity of workers when the interrupt comes.

    Args:
        name: name of the activity.
        body: code of rank 1, or of every rank; calls ``ready`` when the interrupt may come.
        grace_s: seconds between the steps of the escalation.
        at_least_s: minimum seconds until the kernel is idle again, because it honours the grace period.
        leaves_word: whether its ``finally`` runs and writes a file.
        end_s: seconds that processes forked by workers may take to end after they are killed.
    """

    name: str
    body: str
    grace_s: float
    at_least_s: float
    leaves_word: bool
    end_s: float = 0.0


STATES = (
    State("Python loop", "ready()\nwhile True: sum(range(100))", LONG_S, 0.0, True),
    State("C sleep", "ready(); time.sleep(3600)", LONG_S, 0.0, True),
    State(
        "C code that never looks up",
        # os.write instead of print, because Python would handle the interrupt inside print.
        "from collections import deque; from itertools import chain, repeat\n"
        "deque(chain(map(os.write, [1], [b'ready\\n']), repeat(None)), maxlen=0)",
        GRACE_S,
        GRACE_S,
        False,
    ),
    State(
        "all_reduce with one rank missing",
        "ready(); time.sleep(3600) if rank() == 1 else dist.all_reduce(torch.ones(2))",
        GRACE_S,
        0.0,
        True,
    ),
    State(
        "ignoring SIGINT and SIGTERM",
        "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ready(); time.sleep(3600)",
        GRACE_S,
        GRACE_S + TERM_GRACE_S,
        False,
    ),
    State("a finally that never ends", "stay()", GRACE_S, GRACE_S, False),
    State(
        "data loaders",
        # Not earlier: Python swallows a KeyboardInterrupt that is raised in the hooks of a fork.
        "for number, _ in enumerate(torch.utils.data.DataLoader(Endless(), num_workers=2)): number or ready()",
        GRACE_S,
        0.0,
        True,
        end_s=2.0,
    ),
)

TRAINING = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            yield 1

def ready():
    print("rea" + "dy")

def stay():
    try:
        ready()
        time.sleep(3600)
    finally:
        print("in finally")
        while True:
            time.sleep(1)

def train(folder):
    dist.init_process_group()
    dist.barrier()
    try:
        {body}
    finally:
        with open(f"{{folder}}/{{rank()}}", "w") as file:
            file.write("cleaned up")
"""

LAUNCH = """
notebook_launcher(train, ({folder!r},), num_processes=2, start_method={method!r}, interrupt_grace_s={grace_s})
"""


def train_with(body: str) -> str:
    """Return the definition of ``train(folder)``, whose ``finally`` writes a file."""
    return TRAINING.format(body=textwrap.indent(body, " " * 8).lstrip())


def wait_for_ranks(cell: Cell, word: str) -> None:
    """Wait until both ranks have printed the text."""
    for rank in (0, 1):
        cell.wait_for_text(f"[{rank}] {word}")


@across_methods("state", STATES, forkserver=["Python loop", "a finally that never ends"], spawn=["C sleep"])
def test_an_interrupt_ends_every_worker(shared: Kernel, method: str, state: State, tmp_path: Path) -> None:
    cell = shared.submit(
        train_with(state.body) + LAUNCH.format(folder=str(tmp_path), method=method, grace_s=state.grace_s)
    )
    wait_for_ranks(cell, "ready")
    begun_s = time.monotonic()
    shared.interrupt()
    cell.wait()
    elapsed_s = time.monotonic() - begun_s
    shared.wait_for_no_processes(state.end_s)
    assert cell.raised.name == "KeyboardInterrupt", cell.describe()
    assert len(cell.raised.lines) <= 25, cell.describe()
    assert elapsed_s >= state.at_least_s, cell.describe()
    words = sorted(file.name for file in tmp_path.iterdir())
    if state.leaves_word:
        assert "1" in words
        assert (tmp_path / "1").read_text() == "cleaned up"
    else:
        assert "1" not in words
    shared.run("job = nblaunch.last_job()")
    assert value_of(shared, "(job.status, [job.logs(r).splitlines()[0] for r in (0, 1)])") == (
        "interrupted",
        ["ready", "ready"],
    )
    assert_as_before(shared)


@pytest.mark.parametrize(
    "join",
    ["dist.init_process_group()", "nblaunch.Accelerator()", thorough("dist.init_device_mesh('cpu', (2,))")],
)
def test_an_interrupt_reaches_ranks_that_wait_for_others_to_join(shared: Kernel, join: str) -> None:
    cell = shared.submit(
        f"""
def train():
    print("rea" + "dy")
    try:
        time.sleep(3600) if rank() == 1 else {join}
    finally:
        print("cleaned up")
notebook_launcher(train, num_processes=2, interrupt_grace_s={LONG_S})
"""
    )
    wait_for_ranks(cell, "ready")
    shared.interrupt()
    cell.wait()
    assert cell.raised.name == "KeyboardInterrupt", cell.describe()
    wait_for_ranks(cell, "cleaned up")
    assert_as_before(shared)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_second_interrupt_kills_at_once(shared: Kernel, method: str, tmp_path: Path) -> None:
    cell = shared.submit(
        train_with("stay()") + LAUNCH.format(folder=str(tmp_path), method=method, grace_s=LONG_S)
    )
    wait_for_ranks(cell, "ready")
    shared.interrupt()
    wait_for_ranks(cell, "in finally")
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert shared.processes() == []
    assert_as_before(shared)


def test_simultaneous_requests_count_separately(shared: Kernel, tmp_path: Path) -> None:
    shared.run(
        train_with("stay()")
        + f"""
job = notebook_launcher(
    train, ({str(tmp_path)!r},), 2, interrupt_grace_s={LONG_S}, background=True
)
"""
    )
    shared.wait_until(lambda: "ready" in value_of(shared, "job.logs(1)"), 180, "the worker to be ready")
    shared.run("job.interrupt(); job.interrupt(); job.wait(180)")
    assert value_of(shared, "job.status") == "interrupted"
    assert_as_before(shared)


COSTS_NOTHING = {
    "exit handlers run": (
        "uploading",
        """
import atexit

def upload():
    print("uplo" + "ading")
    time.sleep(3600)

def train(model):
    atexit.register(upload)
    with torch.no_grad():
        model.weight.fill_(7.0)
    return rank() + 10
""",
    ),
    "the function handles it and returns": (
        "ready",
        """
def train(model):
    try:
        print("ready", flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        with torch.no_grad():
            model.weight.fill_(7.0)
    return rank() + 10
""",
    ),
}


@pytest.mark.parametrize("moment", COSTS_NOTHING)
def test_returned_values_survive_an_interrupt(shared: Kernel, moment: str) -> None:
    word, train = COSTS_NOTHING[moment]
    launch = (
        "model = torch.nn.Linear(1, 1)\nnotebook_launcher(train, (model,), num_processes=2, return_all=True)"
    )
    cell = shared.submit(train + launch)
    wait_for_ranks(cell, word)
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt", cell.describe()
    shared.run("job = nblaunch.last_job()")
    assert value_of(shared, "(job.status, job.result(), model.weight.item())") == ("done", [10, 11], 7.0)
    assert_as_before(shared)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_an_interrupt_does_not_replace_a_failure(shared: Kernel, max_restarts: int, tmp_path: Path) -> None:
    cell = shared.submit(
        f"""
waiting = {str(tmp_path / "waiting")!r}
def train():
    if rank() == 0:
        while not os.path.exists(waiting):
            time.sleep(0.001)
        raise ValueError("bad shape")
    try:
        open(waiting, "w").close()
        time.sleep(3600)
    finally:
        print("in fin" + "ally")
        time.sleep(3600)

notebook_launcher(train, num_processes=2, interrupt_grace_s={LONG_S}, max_restarts={max_restarts})
"""
    )
    cell.wait_for_text("[1] in finally")
    shared.interrupt()
    cell.wait()
    assert (cell.raised.name, cell.raised.value) == ("ValueError", "bad shape"), cell.describe()
    says_why = "ranks are not started again, because the job was interrupted" in cell.stdout + cell.stderr
    assert says_why == (max_restarts > 0), cell.describe()
    assert value_of(shared, "nblaunch.last_job().status") == "failed"
    assert_as_before(shared)


@pytest.mark.parametrize("method", START_METHODS)
def test_an_interrupt_while_workers_start_is_quiet(shared: Kernel, method: str, tmp_path: Path) -> None:
    cell = shared.submit(
        train_with("ready(); time.sleep(3600)")
        + LAUNCH.format(folder=str(tmp_path), method=method, grace_s=GRACE_S)
    )
    # The guardian starts last: from here on, the launcher waits for its workers.
    shared.wait_until(
        lambda: any("nblaunch-guardian" in p.cmdline() for p in shared.processes()), 180, "the workers' start"
    )
    shared.interrupt()
    cell.wait()  # imports take time and are not interrupted in the middle
    assert cell.raised.name == "KeyboardInterrupt"
    assert "Traceback" not in cell.stderr + cell.stdout, cell.describe()
    assert shared.processes() == []
    assert_as_before(shared)


STARTING = """
class Traveller:
    def __init__(self, moment):
        self.moment, self.kernel = moment, os.getpid()

    def __reduce__(self):
        if self.moment == "leaving":
            os.kill(self.kernel, signal.SIGINT)
        return arrive, (self.moment, self.kernel)

def arrive(moment, kernel):
    if moment == "arriving":
        os.kill(kernel, signal.SIGINT)

def wait(traveller):
    time.sleep(3600)

at_fork = []
os.register_at_fork(before=lambda: [call() for call in at_fork])
"""


@pytest.mark.parametrize("method", START_METHODS)
def test_a_background_job_can_be_interrupted_while_it_starts(shared: Kernel, method: str) -> None:
    """The interrupt comes before any process, or between the first process and the first ready worker."""
    shared.run(STARTING + "job = None")
    moments = {
        "fork": ["before fork 1", "before fork 2"],
        "forkserver": ["leaving", "arriving"],
        "spawn": ["leaving"],
    }
    for moment in moments[method]:
        number = moment.removeprefix("before fork ")
        interrupt = (
            f"count.append(1) or (str(len(count)) == {number!r} and os.kill(os.getpid(), signal.SIGINT))"
        )
        shared.run(f"count = []\nat_fork[:] = [lambda: {interrupt}]")
        cell = shared.run(
            f"job = notebook_launcher(wait, (Traveller({moment!r}),), 2, start_method={method!r}, background=True)",
            raises="KeyboardInterrupt",
        )
        assert "/nblaunch/" not in cell.raised.text
        shared.run("at_fork.clear()")
        assert value_of(shared, "(nblaunch.last_job().status, job)") == ("interrupted", None)
        assert_as_before(shared)


def test_an_interrupt_while_a_forkserver_loads_the_call_stops_all_ranks(
    shared: Kernel, tmp_path: Path
) -> None:
    shared.run(
        """
class Slow:
    def __reduce__(self):
        return wait, (folder,)

def wait(folder):
    import os, time
    open(os.path.join(folder, "loading"), "w").close()
    time.sleep(60)
"""
        + f"folder = {str(tmp_path)!r}"
    )
    cell = shared.submit(
        "notebook_launcher(lambda slow: None, (Slow(),), 2, start_method='forkserver', backend='cpu')"
    )
    cell.wait_for(lambda cell: (tmp_path / "loading").exists(), 180, "the call to be loaded")
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    table = cell.displays[-1].data["text/plain"]
    assert re.findall(r"^ +(\d) +(\w+)", table, re.MULTILINE) == [("0", "stopped"), ("1", "stopped")], table
    assert "exit code" not in table
    assert_as_before(shared)

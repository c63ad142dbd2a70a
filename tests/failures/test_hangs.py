"""Jobs without progress: detected, distinguished, and stopped on request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.failures.conftest import across_methods, assert_as_before, value_of
from tests.kernels import Kernel

TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Shape:
    """A way to hang.

    Args:
        name: name of the hang.
        body: body of the function.
        lines: texts that the report must contain, each within one line.
        timeout_s: hang timeout; longer if ranks may reach their waits at different times.
    """

    name: str
    body: str
    lines: tuple[str, ...]
    timeout_s: float = TIMEOUT_S


SPINNING = {
    "a thread that calls sleep(0)": """
    def spin():
        while True:
            time.sleep(0)
    threading.Thread(target=spin, daemon=True).start()
""",
    "a monitor thread": """
    def monitor():
        while True:
            for _ in range(100):
                psutil.cpu_percent()
            time.sleep(0.24)
    threading.Thread(target=monitor, daemon=True).start()
""",
    "a thread that prints": """
    def talk():
        while True:
            print("still here")
            time.sleep(0.3)
    threading.Thread(target=talk, daemon=True).start()
""",
}
DIFFERENT = """
    twin = dist.new_group()
    dist.barrier(group=twin) if rank() == 1 else dist.all_reduce(torch.ones(2))
"""
C_LOOP = "    import collections, itertools; collections.deque(itertools.repeat(None), maxlen=0)"

STEP = """
    weight = torch.nn.Parameter(torch.zeros(2))
    torch.optim.SGD([weight], lr=0.1).step()
"""
IN_LOOP = ("in train: import collections, itertools; collections.deque(", "(computing)")

SHAPES = (
    Shape(
        "one rank never enters the collective",
        """
    if rank() == 1:
        while not os.path.exists("/nowhere"):
            sum(range(1000))
    dist.all_reduce(torch.ones(2))
""",
        (
            "ranks 0 and 2: waiting in all_reduce, ",
            "in train: dist.all_reduce(torch.ones(2))",
            "rank 1: cell ",
            "in train: ",
            "rank 1 has not arrived, and is at cell ",
            "ranks 0 and 2 wait in all_reduce float32[2], collective 1 (cell ",
        ),
    ),
    Shape(
        "ranks in different collectives",
        """
    twin = dist.new_group()
    if rank() == 1:
        dist.barrier(group=twin)
    else:
        dist.all_reduce(torch.ones(2))
""",
        (
            "ranks 0 and 2: waiting in all_reduce, ",
            "rank 1: waiting in barrier, ",
            "in train: dist.barrier(group=twin)",
            "rank 1 alone called barrier, collective 1 of the group of ranks 0-2 (number 2 with these ranks)",
        ),
    ),
    Shape(
        "different numbers of batches",
        """
    from nblaunch import Accelerator
    accelerator = Accelerator()
    twin = dist.new_group()
    batches = torch.utils.data.TensorDataset(torch.arange(24.0))
    loader = accelerator.prepare(torch.utils.data.DataLoader(batches, batch_size=2))
    for step, batch in enumerate(loader):
        dist.all_reduce(torch.ones(2))
        if rank() == 1 and step == 1:
            break
    dist.barrier(group=twin)
""",
        (
            "ranks 0 and 2: waiting in all_reduce, ",
            "rank 1: waiting in barrier, ",
            " after 2 batches, but ranks 0 and 2 are still in it, in batch 3",
        ),
        timeout_s=5.0,  # the function imports the Accelerator
    ),
    *(
        Shape(
            f"ranks in different collectives beside {kind}",
            body + DIFFERENT,
            ("ranks 0 and 2: waiting in all_reduce, ", "rank 1 alone called barrier"),
        )
        for kind, body in SPINNING.items()
    ),
    Shape("a C loop after the last step", STEP + C_LOOP, ("ranks 0-2: cell ", *IN_LOOP)),
    Shape(
        "a C loop that others wait for",
        STEP + "    if rank() != 1:\n        dist.all_reduce(torch.ones(2))\n" + C_LOOP,
        ("rank 1: cell ", *IN_LOOP, "rank 1 has not arrived, and is at cell "),
    ),
)


TRAIN = """
def train():
    dist.init_process_group()
    print("it begins")
{body}
    return "never"
"""

LAUNCH = """
notebook_launcher(train, num_processes=3, start_method={method!r}, interrupt_grace_s=1, hang_timeout_s={timeout_s},
                  on_hang={on_hang!r})
"""


@across_methods("shape", SHAPES, forkserver=[SHAPES[0].name], spawn=[SHAPES[0].name])
def test_a_hang_is_detected_and_stopped(shared: Kernel, method: str, shape: Shape) -> None:
    cell = shared.run(
        TRAIN.format(body=shape.body)
        # Fresh interpreters become ready at different times: others may wait for a rank that still imports torch.
        + LAUNCH.format(
            method=method, timeout_s=5.0 if method == "spawn" else shape.timeout_s, on_hang="stop"
        ),
        raises="JobHung",
    )
    for text in shape.lines:
        assert text in cell.raised.value, cell.describe()
    assert len(cell.raised.lines) <= 25, cell.describe()
    assert f"complete logs: {value_of(shared, 'str(nblaunch.last_job().log_dir)')}" in cell.raised.value
    shared.run("job = nblaunch.last_job()")
    if shape is SHAPES[0]:
        # The rank that the others waited for has failed. Only the exception has the positions of all ranks.
        table = cell.displays[0].data["text/plain"]
        states = re.findall(r"^ +(\d) +(\w+)", table, re.MULTILINE)
        assert states == [("0", "stopped"), ("1", "failed"), ("2", "stopped")], table
        assert "rank 1: has not arrived, and is at cell " in table
        assert shape.lines[0] not in table + cell.stdout
    status, log = value_of(shared, "(job.status, job.logs(2))")
    assert status == "failed"
    assert "it begins" in log
    assert_as_before(shared)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda shape: shape.name)
def test_a_hang_is_only_reported_by_default(shared: Kernel, shape: Shape) -> None:
    cell = shared.submit(
        TRAIN.format(body=shape.body)
        + LAUNCH.format(method="fork", timeout_s=shape.timeout_s, on_hang="report")
    )
    # A report while ranks still join the group only suspects a hang, and has no seconds.
    cell.wait_for(lambda cell: re.search(r"no progress for \d+ s:", cell.shown), 180, "the time")
    cell.wait_for(lambda cell: shape.lines[-1] in cell.shown, 180, "the report")
    cell.wait_for(lambda cell: "waiting in all_reduce (cell " in cell.shown, 180, "the state of a rank")
    assert cell.shown.count(shape.lines[-1]) == 1
    assert not cell.is_done
    seconds = [int(found) for found in re.findall(r"no progress for (\d+) s:", cell.shown)]
    assert seconds
    assert min(seconds) >= int(shape.timeout_s)
    for text in shape.lines:
        assert text in cell.shown, cell.describe()
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert_as_before(shared)


def test_ranks_that_wait_for_a_finished_rank_are_reported_within_seconds(shared: Kernel) -> None:
    """The default timeout of 300 s is longer than the limit of this test."""
    body = """
def train():
    from nblaunch import Accelerator
    if rank() == 0:
        sys.exit(0)
    Accelerator()
notebook_launcher(train, num_processes=3, on_hang="stop", interrupt_grace_s=1)
"""
    cell = shared.run(body, raises="JobHung")
    assert "ranks 1 and 2: waiting in init_process_group" in cell.raised.value
    assert (
        "rank 0 called sys.exit(0), so the others will wait forever. Every rank must call init_process_group"
        in cell.raised.value
    )
    assert_as_before(shared)


def test_endless_pickling_is_reported(shared: Kernel) -> None:
    cell = shared.run(
        f"""
import threading
class Stuck:
    def __reduce__(self):
        threading.Event().wait()
def train():
    return {{"model": Stuck()}}
notebook_launcher(train, (), 2, hang_timeout_s={TIMEOUT_S}, on_hang="stop", interrupt_grace_s=1)
""",
        raises="JobHung",
    )
    position = "rank 0: the function has returned, and its return value is being pickled: cell "
    assert position in cell.raised.value
    assert "in __reduce__: threading.Event().wait()" in cell.raised.value
    assert_as_before(shared)


@pytest.mark.parametrize(
    "body",
    [C_LOOP, "    while True:\n        time.sleep(0.3)\n        print('still here')"],
    ids=["a C loop", "printing"],
)
def test_work_without_steps_is_reported_but_not_stopped(shared: Kernel, body: str) -> None:
    cell = shared.submit(
        TRAIN.format(body=body) + LAUNCH.format(method="fork", timeout_s=TIMEOUT_S, on_hang="stop")
    )
    cell.wait_for(lambda cell: "ranks 0-2 have shown no step" in cell.shown, 180, "the suspicion")
    cell.wait_for(lambda cell: "ranks 0-2: cell " in cell.shown, 180, "the stacks")
    assert "no progress" not in cell.shown
    assert not cell.is_done
    shared.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert_as_before(shared)


def test_ranks_that_import_for_long_do_not_hang(shared: Kernel, tmp_path: Path) -> None:
    """Rank 0 imports a library for longer than the timeout, and rank 1 waits for it."""
    library = f"""
import time
end = time.monotonic() + {2.5 * TIMEOUT_S}
while time.monotonic() < end:
    sum(range(1000))
"""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "slow_library.py").write_text(library)
    cell = shared.run(
        f"""
def train(folder):
    import sys
    from nblaunch import PartialState
    state = PartialState()
    if state.is_main_process:
        sys.path.insert(0, folder)
        import slow_library
    state.wait_for_everyone()
notebook_launcher(train, ({str(tmp_path / "site-packages")!r},), 2, hang_timeout_s={TIMEOUT_S}, on_hang="stop")
"""
    )
    assert "may be a hang" not in cell.shown
    assert_as_before(shared)


def test_ranks_that_work_do_not_hang(shared: Kernel) -> None:
    """Slow steps, a long evaluation, a checkpoint, a bar: each part takes longer than the timeout, each step less."""
    limit_s = 3 * TIMEOUT_S  # because a busy machine delays steps
    cell = shared.run(
        f"""
def train(folder):
    import tqdm
    from nblaunch import Accelerator
    deadline = time.monotonic() + {1.2 * limit_s}
    while time.monotonic() < deadline:                      # long preparation without a step
        sum(range(1000))
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):                                      # steps of a plain optimizer
        time.sleep({0.4 * limit_s})
        optimizer.step()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(12.0)), batch_size=1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    if accelerator.is_main_process:                         # rank 0 evaluates, rank 1 waits
        for _ in batches:
            time.sleep({0.2 * limit_s})
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    for _ in tqdm.tqdm(range(3), mininterval=0):
        time.sleep({0.4 * limit_s})
    accelerator.wait_for_everyone()
    return True
import tempfile
with tempfile.TemporaryDirectory() as folder:
    done = notebook_launcher(
        train, (folder,), num_processes=2, hang_timeout_s={limit_s}, on_hang="stop")
done
"""
    )
    assert cell.result == "True"
    assert "no progress" not in cell.shown


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_stacks_do_not_wait_for_unresponsive_ranks(shared: Kernel, method: str) -> None:
    shared.run(
        f"""
import collections, itertools
def train():
    dist.init_process_group()
    dist.barrier()
    print("ready")
    if rank() == 1:
        collections.deque(itertools.repeat(None), maxlen=0)      # never lets the interpreter go
    elif rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank() == 3:
        time.sleep(3600)
    dist.all_reduce(torch.ones(2))
job = notebook_launcher(train, num_processes=5, start_method={method!r}, background=True)
"""
    )

    def are_ready() -> bool:
        logs = value_of(shared, "[job.logs(rank) for rank in range(5)]")
        return all("ready" in log for log in logs)

    shared.wait_until(are_ready, 180, "all ranks")
    expected = (
        "ranks 0 and 4: waiting in all_reduce",
        "in train: collections.deque(itertools.repeat(None), maxlen=0)",
        "rank 2: no reply: the process is stopped by a signal",
        "rank 3: cell ",
        "in train: time.sleep(3600)",
    )
    text = ""

    def are_there() -> bool:  # the ranks continue for a moment after their last print
        nonlocal text
        text = value_of(shared, "job.stacks()")
        return all(part in text for part in expected)

    shared.wait_until(are_there, 180, "the ranks to be where they wait")
    assert expected[0] in text.splitlines()[0], text
    assert "have not entered" not in text, "ranks that have worked a moment ago do not hang"
    shared.run("job.cancel(); job.result()", raises="JobCancelled")
    assert value_of(shared, "job.stacks()") == "no worker of the job is running"
    assert_as_before(shared)


def test_stack_queries_end_with_their_job(shared: Kernel, tmp_path: Path) -> None:
    """The main thread requests the ranks' positions all the time, however the job ends."""
    shared.run(
        f"""
import nblaunch.context
def work(way, gate):
    while not os.path.exists(gate):
        time.sleep(0.01)
    if rank() == 1 and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 1 and way in ("raise", "restart") and nblaunch.context.current().attempt == 0:
        raise ValueError(way)

def ask_until_the_end(way):
    gate = os.path.join({str(tmp_path)!r}, way)
    job = notebook_launcher(work, (way, gate), 2, background=True, dashboard="none", interrupt_grace_s=1,
                            max_restarts=int(way == "restart"))
    answers = [""]
    while "in work: " not in answers[-1]:
        answers.append(job.ask_stacks().result(180))
    getattr(job, way, lambda: open(gate, "w").close())()
    while job.is_running:
        answers.append(job.ask_stacks().result(180))
    return answers + [job.stacks()]

for way in ("return", "raise", "restart", "kill", "interrupt", "cancel", "terminate"):
    answers = ask_until_the_end(way)
    assert not any("ask_until_the_end" in answer for answer in answers), (way, answers)
    assert answers[-1] == "no worker of the job is running", (way, answers)
""",
    )
    assert_as_before(shared)

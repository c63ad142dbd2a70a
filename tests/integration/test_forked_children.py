"""Processes that a function starts: their output and displays arrive, and nothing else affects the rank."""

from __future__ import annotations

import pytest

from tests.integration.test_output import lines_of
from tests.kernels import Kernel
from tests.thorough import thorough

CHILDREN = """
import multiprocessing, signal, threading
from IPython.display import HTML, display
from nblaunch import context

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            sys.stdout.flush()
            os._exit(0)
        except Exception as error:
            print("child raised", repr(error))
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
def test_displays_of_data_loaders_and_their_rank_arrive_whole(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
def train():
    import torch
    from IPython.display import HTML, display
    from torch.utils.data import DataLoader, Dataset
    class Shown(Dataset):
        def __len__(self):
            return 12
        def __getitem__(self, i):
            display(HTML(f"<i>{{os.environ['RANK']}} item {{i}}" + "x" * 100_000 + "</i>"))
            return i
    seen = 0
    for batch in DataLoader(Shown(), num_workers=4, multiprocessing_context="fork"):
        display(HTML(f"<i>{{os.environ['RANK']}} batch {{batch.item()}}" + "x" * 100_000 + "</i>"))
        seen += 1
    return seen
notebook_launcher(train, num_processes=2, return_all=True, start_method={method!r})
"""
    )
    assert cell.value == [12, 12]
    shown = sorted(
        html for display in cell.displays if (html := display.data.get("text/html", ""))[:3] == "<i>"
    )
    expected = [
        f"<i>{r} {kind} {i}{'x' * 100_000}</i>"
        for r in (0, 1)
        for kind in ("batch", "item")
        for i in range(12)
    ]
    assert shown == sorted(expected)


def test_forked_children_are_not_the_rank(shared: Kernel) -> None:
    """Nor does it wait for the ranks' decision about a stop."""
    cell = shared.run(
        CHILDREN
        + """
from nblaunch.wire import stop_agreement
def train():
    slot = context.current().slot
    slot.stop_proposal = 1                   # undecided, and due at the first check
    slot.advance(70)
    slot.set_loss(0.5)
    slot.built_bytes += 1
    before = slot.read(0)

    def interfere():
        accelerator = nblaunch.Accelerator(cpu=True)
        assert context.current().slot is slot and context.is_worker()
        assert not stop_agreement.should_stop(slot)
        slot.advance(20); slot.set_loss(2.0); slot.built_bytes += 5; slot.begin_check()
        try:
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("no interrupt")
        except KeyboardInterrupt:
            pass
        with context.current().locks.lock():
            pass

    with context.current().locks.lock():     # a process that waited for the lock would wait for ever
        status = in_child(interfere)
    return status, slot.read(0) == before, slot.num_checks
notebook_launcher(train, num_processes=1)
"""
    )
    assert cell.value == (0, True, 0)


def test_forked_children_do_not_wait_for_worker_threads(shared: Kernel) -> None:
    """A fork copies locks in their present state, but not the threads that would release them."""
    cell = shared.run(
        CHILDREN
        + """
def train():
    from tqdm import tqdm
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        raw = sys.stdout.buffer.raw
        write = type(raw).write
        def slow(self, data):
            is_held.set(); is_over.wait()
            return write(self, data)
        type(raw).write = slow
        with tqdm.get_lock():
            print("held")
        type(raw).write = write

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()

    def speak():
        is_over.set()
        display(HTML("<b>shown</b>"))
        print("printed"); print("printed, too", file=sys.stderr)
        for _ in tqdm(range(2), desc="bar"):
            pass

    status = in_child(speak)
    is_over.set(); thread.join()
    return status
notebook_launcher(train, num_processes=1)
"""
    )
    assert cell.value == 0
    assert [display.data for display in cell.displays if display.data.get("text/html") == "<b>shown</b>"]
    lines = cell.stdout.splitlines()
    assert {"printed", "printed, too", "held"} <= set(lines)
    assert any(line.startswith("bar: 100%") for line in lines)


def test_unfinished_line_before_a_fork_is_printed_once(shared: Kernel) -> None:
    cell = shared.run(
        CHILDREN
        + """
def train():
    print("half a ", end="")
    in_child(lambda: print("child"))
    print("line")
notebook_launcher(train, num_processes=1)
"""
    )
    assert sorted(cell.stdout.splitlines()[-2:]) == ["child", "half a line"], cell.stdout


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_forked_process_that_leaves_the_function_is_not_the_rank(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"""
def train():
    pid = os.fork()
    if pid == 0:
        if {how!r} == "raise":
            raise ValueError("of the child")
        if {how!r} == "exit":
            sys.exit(0)
        return "of the child"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
notebook_launcher(train, num_processes=2, return_all=True)
"""
    )
    assert cell.value == ([1, 1] if how == "raise" else [0, 0])
    for rank in (0, 1):
        text = "\n".join(lines_of(cell, rank))
        assert "left the function" in text
        assert ("ValueError: of the child" in text) == (how == "raise")


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_fresh_child_processes_print_their_displays(fresh: Kernel, context: str) -> None:
    """The kernel has already used the same start method."""
    cell = fresh.run(
        f"""
import multiprocessing
from IPython.display import display
own = multiprocessing.get_context({context!r})
def once():
    child = own.Process(target=display, args=("shown by a child",))
    child.start(); child.join()
    return child.exitcode
in_cell = once()
in_cell, notebook_launcher(once, num_processes=2, return_all=True)
"""
    )
    assert cell.value == (0, [0, 0])
    for rank in (0, 1):
        assert lines_of(cell, rank) == ["shown by a child"]


def test_a_childs_crash_is_not_the_ranks(shared: Kernel) -> None:
    cell = shared.run(
        CHILDREN
        + """
def train():
    import ctypes
    status = in_child(lambda: ctypes.string_at(0))
    assert status == -signal.SIGSEGV, status
    os.kill(os.getpid(), signal.SIGKILL)
notebook_launcher(train, num_processes=1)
""",
        raises="WorkerDied",
    )
    assert "SIGKILL" in cell.raised.value
    stacks = "(nblaunch.last_job().log_dir / 'attempt_0' / 'rank_0.stacks').read_text()"
    assert shared.run(stacks).value == ""
    assert "Segmentation fault" in cell.stdout

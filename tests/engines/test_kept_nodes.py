"""Nodes that are kept between launches, on this machine; ``tests/contracts/test_engine.py`` tests all engines."""

from __future__ import annotations

import os
import signal

import pytest

from nblaunch.engines import Engine, NodeHandle, NodesWanted
from nblaunch.engines.kept_nodes import KeptEngine
from nblaunch.errors import LaunchError
from tests.engines.conftest import NEW_PROGRAMS
from tests.kernels import Kernel
from tests.signals_at_lines import with_signal_at_line


@pytest.fixture
def ready(notebook: Kernel) -> Kernel:
    """Start a kernel with a node that has run a job."""
    notebook.run(
        "nodes = nblaunch.Nodes(1, engine='processes')\nlaunch(rank, engine=nodes, num_nodes=1)",
    )
    return notebook


def test_programs_end_when_nodes_are_collected(ready: Kernel) -> None:
    assert ready.run("len(node_programs())").value == 1
    ready.run("del nodes")
    ready.wait_for_no_processes()


def test_workers_of_this_machine_leave_kept_nodes_alone(kept: Kernel) -> None:
    kept.run("""
def forget():
    import gc, __main__
    __main__.engine = None
    gc.collect()
notebook_launcher(forget, num_processes=2)
""")
    assert kept.run("launch(rank, return_all=True), are_only_programs_left()").value == (
        [0, 1, 2, 3],
        True,
    )


def test_only_one_job_uses_the_nodes(ready: Kernel) -> None:
    ready.run("""
def wait(path):
    while not os.path.exists(path): time.sleep(0.02)
    return "ended"
import tempfile
path = tempfile.mktemp()
job = launch(wait, path, engine=nodes, num_nodes=1, background=True)
""")
    error = ready.run("launch(rank, engine=nodes, num_nodes=1)", raises="LaunchError").raised
    assert "another job" in error.value
    ready.run("nodes.close()\nopen(path, 'w').close()")
    assert ready.run("job.result(200)").value == "ended"
    ready.run("os.unlink(path)")
    ready.wait_for_no_processes()


def test_an_interrupt_leaves_the_nodes_ready(kept: Kernel) -> None:
    cell = kept.submit("launch(lambda: (print('under way', flush=True), time.sleep(3600)))")
    cell.wait_for(lambda cell: "under way" in cell.stdout, what="the ranks to run")
    kept.interrupt()
    cell.wait()
    assert cell.error is not None, cell.describe()
    assert cell.error.name == "KeyboardInterrupt"
    assert kept.run("launch(rank), are_only_programs_left()").value == (0, True)


def test_a_killed_node_restarts_all_nodes(kept: Kernel) -> None:
    kept.run(
        """
def fail_once(path):
    dist.init_process_group("gloo")
    if rank() == 3 and not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
    dist.barrier()
    return os.environ["TORCHELASTIC_RESTART_COUNT"]
import tempfile
path = tempfile.mktemp()
count = launch(fail_once, path, max_restarts=1)
os.unlink(path)
""",
    )
    assert kept.run("count, launch(rank)").value == ("1", 0)
    kept.run(NEW_PROGRAMS)


ENDING = """
class Ending:
    def __reduce__(self):
        return end, (path, times)

def end(path, times):
    for number in range(times):
        with suppress(FileExistsError):
            os.close(os.open(f"{path}.{number}", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)

import tempfile
from contextlib import suppress
path = tempfile.mkdtemp() + "/ended"
before = node_programs()
"""
"""A call that kills the first programs that load it, as many as ``times`` says."""


def test_a_kept_node_lost_while_loading_restarts_all_nodes(kept: Kernel) -> None:
    kept.run(f"times = 1\n{ENDING}")
    cell = kept.run("launch(lambda ending: rank(), Ending(), return_all=True)")
    assert cell.value == [0, 1, 2, 3]
    assert "restarting the programs on all nodes, because the program on node" in cell.shown
    assert "SIGKILL" in cell.shown
    assert kept.run("set(before) & set(node_programs())").value == set()
    kept.run(NEW_PROGRAMS)


@pytest.mark.thorough
def test_nodes_that_end_again_while_loading_are_named(ready: Kernel) -> None:
    ready.run(f"times = 3\n{ENDING}")
    call = "launch(lambda ending: rank(), Ending(), engine=nodes, num_nodes=1)"
    error = ready.run(call, raises="LaunchError").raised
    assert "ended before the ranks started: its process was killed by SIGKILL" in error.value
    ready.wait_for_no_processes()
    assert ready.run("launch(rank, engine=nodes, num_nodes=1)").value == 0
    ready.run("nodes.close()")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("launch(rank, num_nodes=3, num_processes=3)", "num_nodes=3"),
        ("launch(rank, hosts=['a'])", "hosts=('a',)"),
        ("launch(rank, background=True, detach=True)", "detach=True"),
        ("nblaunch.Nodes(2, engine='local')", "engine='local'"),
        ("nblaunch.Nodes(2, engine='ssh')", "hosts"),
        ("nblaunch.Session(2, engine=engine)", "Session("),
    ],
)
def test_unsupported_uses_of_nodes_are_rejected(kept: Kernel, call: str, named: str) -> None:
    assert named in kept.run(call, raises="ValueError").raised.value


class _Handle(NodeHandle):
    is_closed = False

    def how_ended(self) -> str:
        return ""

    def kill(self) -> None:
        self.is_closed = True

    def close(self, patience_s: float) -> None:
        self.is_closed = True


class _Engine(Engine):
    num_closed = 0

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        return []

    def close(self) -> None:
        self.num_closed += 1


def test_nodes_end_if_they_are_closed_at_any_line_of_the_end_of_their_launch() -> None:
    """The launch may end in another thread."""
    for number in range(1, 100):
        started, handle = _Engine(), _Handle()
        engine = KeptEngine(started)
        engine.lend()
        engine.keep([handle])
        before = signal.signal(signal.SIGUSR1, lambda signum, frame: engine.retire())  # noqa: B023
        try:
            place, error = with_signal_at_line(number, signal.SIGUSR1, engine.close)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert error is None
        if not place:
            break
        assert (handle.is_closed, started.num_closed) == (True, 1), place
    assert number > 3, "few lines have run"


def test_nodes_are_rejected_in_a_forked_process() -> None:
    engine = KeptEngine(_Engine())
    child = os.fork()
    if not child:
        try:
            engine.lend()
        except LaunchError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    engine.lend()

"""Nodes that stay between launches, on nodes of this machine; ``tests/contracts/test_engine.py`` tests all engines."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def ready(notebook: Kernel) -> Kernel:
    """A kernel with nodes that have run a job."""
    notebook.run("nodes = nblaunch.Nodes(2, engine='processes')\nlaunch(rank, engine=nodes)", timeout_s=120)
    return notebook


def test_programs_end_with_the_last_reference_to_their_nodes(ready: Kernel) -> None:
    assert ready.run("len(node_programs())").value == 2
    ready.run("del nodes")
    ready.wait_for_no_processes()


def test_workers_of_this_machine_leave_waiting_nodes_alone(ready: Kernel) -> None:
    ready.run("""
def forget():
    import gc, __main__
    __main__.nodes = None
    gc.collect()
notebook_launcher(forget, num_processes=2)
before = node_programs()
""")
    assert ready.run("launch(rank, engine=nodes, return_all=True), node_programs() == before").value == (
        [0, 1, 2, 3],
        True,
    )
    ready.run("nodes.close()")
    ready.wait_for_no_processes()


def test_one_job_at_a_time_has_the_nodes_and_keeps_them_to_its_end(ready: Kernel) -> None:
    ready.run("""
def wait(path):
    while not os.path.exists(path): time.sleep(0.02)
    return "ended"
import tempfile
path = tempfile.mktemp()
job = launch(wait, path, engine=nodes, background=True)
""")
    error = ready.run("launch(rank, engine=nodes)", raises="LaunchError").raised
    assert "another job" in error.value
    ready.run("nodes.close()\nopen(path, 'w').close()")
    assert ready.run("job.result(60)").value == "ended"
    ready.run("os.unlink(path)")
    ready.wait_for_no_processes()


def test_an_interrupt_leaves_the_nodes_ready(ready: Kernel) -> None:
    ready.run("before = node_programs()")
    cell = ready.submit("launch(lambda: (print('under way', flush=True), time.sleep(3600)), engine=nodes)")
    cell.wait_for(lambda cell: "under way" in cell.stdout, what="the ranks to run")
    ready.interrupt()
    cell.wait(60)
    assert cell.error is not None, cell.describe()
    assert cell.error.name == "KeyboardInterrupt"
    assert ready.run("launch(rank, engine=nodes), node_programs() == before").value == (0, True)
    ready.run("nodes.close()")


def test_a_killed_node_starts_again_with_all_others(ready: Kernel) -> None:
    ready.run(
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
count = launch(fail_once, path, engine=nodes, max_restarts=1)
os.unlink(path)
""",
        timeout_s=120,
    )
    assert ready.run("count, launch(rank, engine=nodes)").value == ("1", 0)
    ready.run("nodes.close()")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("launch(rank, engine=nodes, num_nodes=3, num_processes=3)", "num_nodes=3"),
        ("launch(rank, engine=nodes, hosts=['a'])", "hosts=('a',)"),
        ("launch(rank, engine=nodes, background=True, detach=True)", "detach=True"),
        ("nblaunch.Nodes(2, engine='local')", "engine='local'"),
        ("nblaunch.Nodes(2, engine='ssh')", "hosts"),
        ("nblaunch.Session(2, engine=nodes)", "Session("),
    ],
)
def test_what_nodes_cannot_do_is_refused(notebook: Kernel, call: str, named: str) -> None:
    notebook.run("nodes = nblaunch.Nodes(2, engine='processes')")
    assert named in notebook.run(call, raises="ValueError").raised.value

"""Features that only Ray has: the user's connection, resources, and the death of a raylet."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.engines.ray_driver import DriverTask
from tests.engines.conftest import PREAMBLE
from tests.kernels import Kernel

pytest.importorskip("ray", reason="Ray has no wheels for this Python")

from tests.engines.ray_cluster import RayCluster, cluster

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def running() -> Iterator[RayCluster]:
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def address(running: RayCluster) -> str:
    return running.address


@pytest.fixture(scope="module")
def notebook(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}) as kernel:
        kernel.run(PREAMBLE)
        kernel.run(f"import nblaunch, ray\nray.init({address!r}, log_to_driver=False)")
        kernel.run(
            "def go(function, *args, **settings): return launch(function, *args, engine='ray', **settings)"
        )
        yield kernel


def test_user_actors_and_resources_are_untouched(notebook: Kernel) -> None:
    notebook.run("""
@ray.remote(num_cpus=1)
class Counter:
    def __init__(self): self.count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.remote()
ray.get(counter.add.remote())

def free():
    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}

before = free()

def train():
    dist.init_process_group("gloo")
    dist.barrier()
    return rank()
""")
    assert notebook.run("go(train, return_all=True)").value == [0, 1, 2, 3]
    assert notebook.run("ray.is_initialized(), ray.get(counter.add.remote())").value == (True, 2)
    notebook.run(
        "deadline = time.monotonic() + 120\nwhile free() != before and time.monotonic() < deadline: time.sleep(0.1)"
    )
    assert notebook.run("free() == before").value is True
    states = notebook.run("[group['state'] for group in ray.util.placement_group_table().values()]").value
    assert set(states) == {"REMOVED"}
    notebook.run("del counter")


def test_ranks_of_a_kernel_that_has_left_a_cluster_do_not_share_ids(notebook: Kernel, address: str) -> None:
    notebook.run("ray.shutdown()")
    notebook.run(f"""
def put():
    ray.init({address!r}, log_to_driver=False)
    try:
        return ray.ObjectID.from_random().hex()
    finally:
        ray.shutdown()
""")
    first, second = notebook.run(
        "nblaunch.notebook_launcher(put, num_processes=2, return_all=True, backend='cpu')"
    ).value
    assert first != second
    notebook.run(f"ray.init({address!r}, log_to_driver=False)")


def test_a_runtime_environment_has_priority(notebook: Kernel, tmp_path: Path) -> None:
    """Over variables and the folder of the notebook, which also exist on the nodes."""
    (tmp_path / "data.txt").write_text("there")
    notebook.run("""
def read():
    return open("data.txt").read(), os.environ["NCCL_DEBUG"]

os.environ["NCCL_DEBUG"] = "WARN"
""")
    environment = {"working_dir": str(tmp_path), "env_vars": {"NCCL_DEBUG": "INFO"}}
    values = notebook.run(f"go(read, runtime_env={environment!r}, return_all=True)").value
    assert values == [("there", "INFO")] * 4


@pytest.mark.thorough
def test_a_range_of_nodes_takes_what_is_free(notebook: Kernel) -> None:
    size = notebook.run("go(lambda: int(os.environ['WORLD_SIZE']), num_nodes='1:4', num_processes=8)").value
    assert size == 4, "two of at most four nodes, with two ranks each"


def test_nodes_in_use_are_waited_for_with_a_note(notebook: Kernel) -> None:
    notebook.run("""
@ray.remote(num_cpus=4)
class Busy:
    def ready(self): return True

busy = [Busy.remote()]
ray.get([one.ready.remote() for one in busy])
""")
    cell = notebook.submit("go(rank, resources_per_node={'CPU': 3}, return_all=True, dashboard='text')")
    cell.wait_for_text("waiting for nodes of the Ray cluster: 2 nodes with 3 CPU each are needed")
    notebook.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    notebook.run("del busy")


SLOW_DRIVER = """
import sys, time
from nblaunch.engines import ray_actor, ray_driver

_, task, path, folder = sys.argv
sys.path.insert(0, folder)

class SlowActor(ray_actor.NodeActor):
    def __init__(self):
        self.file = open(path, "w")
        time.sleep(3600)

ray_actor.NodeActor = SlowActor
ray_driver.main([task])
"""


SLOW_RAY = """
import sys, time
file = open(sys.argv[2], "w")
time.sleep(3600)
"""


@pytest.mark.parametrize("slow", ["import", "actor"])
def test_the_driver_and_its_actors_end_with_the_launcher(slow: str, address: str, tmp_path: Path) -> None:
    if slow == "import":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "__init__.py").write_text(SLOW_RAY)
    (life_fd, own_life_fd), (own_event_fd, event_fd) = os.pipe(), os.pipe()
    task = DriverTask(
        address=address,
        min_nodes=2,
        max_nodes=2,
        resources={"CPU": 1},
        ranks_per_node=1,
        backend="cpu",
        runtime_env={},
        variables={},
        timeout_s=600,
        waits_for_others=False,
        node_fds=(),
        event_fd=event_fd,
        life_fd=life_fd,
        log_path=str(tmp_path / "driver.log"),
    )
    (tmp_path / "task").write_bytes(pickle.dumps(task))
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "task", "rb") as file:
        driver = subprocess.Popen(
            [sys.executable, "-c", SLOW_DRIVER, str(file.fileno()), str(tmp_path / "fifo"), str(tmp_path)],
            pass_fds=[file.fileno(), event_fd, life_fd],
        )
    try:
        with open(tmp_path / "fifo") as fifo:  # once a process is slow
            os.close(own_life_fd)
            driver.wait(30)
            assert fifo.read() == "", "at the end of all slow processes"
    finally:
        driver.kill()
        for fd in (life_fd, own_event_fd, event_fd):
            os.close(fd)


KILL_AT_ACTOR = """
def kill_at_actor(pid):
    victim = psutil.Process(pid)
    while not any(map(is_actor, victim.children())): time.sleep(0.01)
    victim.kill()

def is_actor(process):
    try:
        return "NodeActor" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False
"""


@pytest.mark.leaves_behind("processes of the dead raylet end with the cluster")
@pytest.mark.parametrize("moment", ["before", "actor"])
@pytest.mark.thorough
def test_a_raylet_that_dies_before_the_ranks_run_is_named(
    moment: str, notebook: Kernel, running: RayCluster
) -> None:
    raylet = running.raylet()
    if moment == "before":
        os.kill(raylet, signal.SIGKILL)
    else:
        notebook.run(f"{KILL_AT_ACTOR}\nthreading.Thread(target=kill_at_actor, args=({raylet},)).start()")
    try:
        error = notebook.run("go(rank)", raises="LaunchError").raised
    finally:
        running.add_node()
    assert "raylet" in error.value
    assert notebook.run("go(rank, return_all=True)").value == [0, 1, 2, 3]


@pytest.mark.leaves_behind("processes of the dead raylet end with the cluster")
def test_the_death_of_a_raylet_is_reported(notebook: Kernel, running: RayCluster) -> None:
    """The last test, because the cluster has lost a node."""
    notebook.run(f"victim = {running.raylet()}")
    notebook.run(
        """
def train():
    dist.init_process_group("gloo")
    dist.barrier()
    print("under way", flush=True)
    time.sleep(3600)

job = go(train, background=True)
while not all("under way" in job.logs(r) for r in range(4)): time.sleep(0.05)
actors = [child for child in psutil.Process(victim).children() if "NodeActor" in " ".join(child.cmdline())]
os.kill(victim, signal.SIGKILL)
""",
    )
    error = notebook.run("job.result(200)", raises="NodeLost").raised
    assert "its raylet has died" in error.value
    notebook.run("""
def is_running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

deadline = time.monotonic() + 120
while any(map(is_running, actors)) and time.monotonic() < deadline: time.sleep(0.05)
""")
    assert notebook.run("len(actors), sum(map(is_running, actors))").value == (1, 0)

"""Requirements for every engine, whatever its transport: processes, ssh, Slurm's srun, Ray's actors.

``ssh``, ``srun`` and ``scontrol`` are stubs that run the command on this machine; the Ray cluster is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import PREAMBLE, path_with_ssh
from tests.engines.ray_cluster import cluster
from tests.kernels import Kernel
from tests.thorough import thorough

SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "$3" | tr , '\\n'
"""


@dataclass(frozen=True)
class Subject:
    """An engine under test.

    Args:
        settings: settings of a launch on two nodes.
        environment: variables of the kernel.
        rejected: settings of a launch that the engine can't satisfy.
        problem: text that the error must contain.
    """

    settings: dict[str, Any]
    environment: dict[str, str]
    rejected: dict[str, Any]
    problem: tuple[str, ...]


def _processes(stack: ExitStack, path: str) -> Subject:
    return Subject({"engine": "processes"}, {}, {"backend": "cuda"}, ("node ", "cuda"))


def _ssh(stack: ExitStack, path: str) -> Subject:
    rejected = {"hosts": ["one", "unreachable"]}
    return Subject(
        {"engine": "ssh", "hosts": ["one", "other"]},
        {"PATH": path},
        rejected,
        ("node 1 (host unreachable)", "Connection refused"),
    )


def _slurm(stack: ExitStack, path: str) -> Subject:
    environment = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "one,other"}
    return Subject(
        {"engine": "slurm"}, environment, {"num_nodes": 4}, ("num_nodes=4", "job 7", "has 2: one, other")
    )


def _ray(stack: ExitStack, path: str) -> Subject:
    address = stack.enter_context(cluster()).address
    return Subject(
        {"engine": "ray"},
        {"RAY_ADDRESS": address},
        {"resources_per_node": {"CPU": 64}},
        ("2 nodes with 64 CPU each are needed", "could ever provide them", "has 4 CPU (4 CPU free)"),
    )


ENGINES: dict[str, Callable[[ExitStack, str], Subject]] = {
    "processes": _processes,
    "ssh": _ssh,
    "slurm": _slurm,
    "ray": _ray,
}


# ssh and Slurm only start the node programs of the engine "processes" by another command.
on_every_engine = pytest.mark.parametrize(
    "subject", ["processes", "ray", "ssh", thorough("slurm")], indirect=True
)
on_both_kinds = pytest.mark.parametrize(
    "subject", ["processes", "ray", thorough("ssh"), thorough("slurm")], indirect=True
)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    if request.param == "ray" and find_spec("ray") is None:
        pytest.skip("Ray has no wheels for this Python")
    folder = tmp_path_factory.mktemp("bin")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with ExitStack() as stack:
        yield ENGINES[request.param](stack, path_with_ssh(folder))


@pytest.fixture
def notebook(subject: Subject, nothing_left_behind: None, tmp_path: Path) -> Iterator[Kernel]:
    """Start a kernel in a folder with a user's module, for launches on two nodes of the engine."""
    folder = tmp_path / "notebook"
    folder.mkdir()
    (folder / "helpers.py").write_text(
        "class Odd(Exception):\n    pass\n\n\ndef doubled(x):\n    return 2 * x\n\n\n"
        "def fail(text):\n    raise Odd(text)\n"
    )
    environment = {"NBLAUNCH_LOG_DIR": str(tmp_path / "logs"), **subject.environment}
    with Kernel.start(env=environment, cwd=folder) as kernel:
        kernel.run(PREAMBLE)
        kernel.run(
            f"def go(function, *args, **settings):\n"
            f"    return launch(function, *args, **{{**{subject.settings!r}, **settings}})"
        )
        yield kernel


@on_every_engine
def test_ranks_run_on_two_nodes_with_call_results_and_weights(notebook: Kernel) -> None:
    notebook.run("""
import helpers
model = nn.Linear(4, 2)
before = model.weight.detach().clone()
large = torch.arange(2_000_000, dtype=torch.float32)

def train(model, large):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    with torch.no_grad():
        model.weight += total
    print(f"rank {rank()} of {int(total)}")
    return helpers.doubled(large[rank() :: 4]), os.environ["GROUP_RANK"], os.getppid(), hash("a word")
""")
    cell = notebook.run("values = go(train, model, large, return_all=True)")
    assert notebook.run("[value[1] for value in values]").value == ["0", "0", "1", "1"]
    assert notebook.run("len({value[2] for value in values})").value == 2
    assert notebook.run("len({value[3] for value in values})").value == 1, (
        "sets have the same order everywhere"
    )
    assert notebook.run("all((v[0] == 2 * large[r::4]).all() for r, v in enumerate(values))").value is True
    assert notebook.run("bool(torch.allclose(model.weight, before + 4))").value is True
    for number in range(4):
        assert f"[{number}] rank {number} of 4" in cell.stdout
    assert notebook.run("'ray' in sys.modules").value is False
    notebook.wait_for_no_processes()


@on_every_engine
def test_unavailable_engine_resources_are_explained(notebook: Kernel, subject: Subject) -> None:
    notebook.run("""
def text_of(call):
    try:
        return str(call())
    except (RuntimeError, ValueError) as error:
        return str(error)
""")
    error = notebook.run(f"text_of(lambda: go(rank, **{subject.rejected!r}))").value
    for part in subject.problem:
        assert part in error
    notebook.wait_for_no_processes()


@on_both_kinds
def test_a_killed_node_program_ends_the_job(notebook: Kernel) -> None:
    notebook.run(
        """
def train():
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"under way below {os.getppid()}", flush=True)
    time.sleep(3600)

job = go(train, background=True)
while not all("under way" in job.logs(r) for r in range(4)): time.sleep(0.05)
os.kill(int(job.logs(2).split()[-1]), signal.SIGKILL)
""",
    )
    error = notebook.run("job.result(200)", raises="NodeLost").raised
    assert "node 1 (host " in error.value
    assert "was lost: its process was killed by SIGKILL" in error.value
    notebook.wait_for_no_processes()


@on_both_kinds
def test_nothing_outlives_a_killed_kernel(notebook: Kernel) -> None:
    notebook.run("job = go(time.sleep, 3600, num_nodes=1, num_processes=2, background=True)")
    pids = notebook.run("sorted(job.pids.values())").value
    assert pids
    notebook.kill()
    notebook.wait_for_no_processes()


@on_both_kinds
def test_nodes_are_kept_between_launches_until_they_are_closed(notebook: Kernel, subject: Subject) -> None:
    notebook.run(f"nodes = nblaunch.Nodes(2, **{subject.settings!r})")
    notebook.run("""
def train():
    dist.init_process_group("gloo")
    dist.barrier()
    number = getattr(torch, "number_of_calls", 0)
    torch.number_of_calls = number + 1
    return os.getppid(), psutil.Process(os.getppid()).ppid(), number, os.environ.get("WANTED")

import helpers

def fail():
    dist.init_process_group("gloo")
    if rank() == 3:
        helpers.fail("rank 3 can't go on")
    dist.barrier()
""")
    values = [
        notebook.run(f"{before}; go(train, engine=nodes, return_all=True)").value
        for before in ("os.environ['WANTED'] = 'a'", "del os.environ['WANTED']")
    ]
    first, second = ([value[:2] for value in found] for found in values)
    assert {forkserver for _, forkserver in first} == {forkserver for _, forkserver in second}
    assert not {node for node, _ in first} & {node for node, _ in second}
    assert {number for found in values for _, _, number, _ in found} == {0}, "launches share nothing"
    if subject.settings["engine"] == "processes":
        assert [found[0][3] for found in values] == ["a", None]
    error = notebook.run("go(fail, engine=nodes)", raises="Odd").raised
    assert error.value == "rank 3 can't go on"
    assert " on node 1 (host " in error.text
    assert notebook.run("nblaunch.last_job().status").value == "failed"
    assert notebook.run("psutil.Process().children() != []").value is True
    notebook.run(f"os.kill({first[3][1]}, signal.SIGKILL)")
    cell = notebook.run("again = go(train, engine=nodes, return_all=True)")
    assert "restarting the programs on all nodes, because the program on node 1 (host " in cell.shown
    assert "SIGKILL" in cell.shown
    assert notebook.run("again[0][1]").value not in {forkserver for _, forkserver in first}
    notebook.run("nodes.close()")
    notebook.wait_for_no_processes()
    notebook.run("go(train, engine=nodes)", raises="LaunchError")


@on_both_kinds
def test_kept_nodes_end_with_the_kernel(notebook: Kernel, subject: Subject) -> None:
    notebook.run(f"nodes = nblaunch.Nodes(1, **{subject.settings!r})")
    notebook.run("go(rank, engine=nodes, num_nodes=1, num_processes=2)")
    notebook.kill()
    notebook.wait_for_no_processes()

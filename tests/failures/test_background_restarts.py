"""Background jobs that restart workers while the kernel is busy with something else.

Workers of a later attempt must never be forked from a kernel whose main thread is inside a library: the workers could
wait forever for a lock whose holder they lack.
"""

from __future__ import annotations

from pathlib import Path

from tests.kernels import Kernel

FAIL_ONCE = """
import pathlib
import nblaunch.context

def train(folder, imports=""):
    if nblaunch.context.current().attempt == 0:
        while not pathlib.Path(folder, "busy").exists():
            time.sleep(0.002)
        raise ValueError("flaky")
    pathlib.Path(folder, "again").touch()
    exec(imports)
    return os.getppid()
"""

SLOW_MODULE = """
import pathlib, time
while not pathlib.Path({folder!r}, "again").exists():
    time.sleep(0.002)
"""

LOADS = {
    "numpy": "import numpy\na = numpy.random.rand(300, 300)\nwhile job.is_running:\n    a @ a",
    "torch": "a = torch.rand(300, 300, requires_grad=True)\nwhile job.is_running:\n    (a @ a).sum().backward()",
    # The module's body ends when a worker of the second attempt has begun; that worker then imports the module, too.
    "import": "import slow_module",
    "cuda": (
        "from nblaunch import backends\n"
        "kind = type(backends.discover()['cpu'])\n"
        "before, kind.fork_hazard = kind.fork_hazard, lambda backend: 'the device was used'\n"
        "while job.is_running:\n    time.sleep(0.002)\n"
        "kind.fork_hazard = before"
    ),
}


def test_a_restart_never_forks_the_busy_kernel(shared: Kernel, tmp_path: Path) -> None:
    shared.run(f"sys.path.insert(0, {str(tmp_path)!r})" + FAIL_ONCE)
    for load, code in LOADS.items():
        folder = tmp_path / load
        folder.mkdir()
        (tmp_path / "slow_module.py").write_text(SLOW_MODULE.format(folder=str(folder)))
        imports = "import slow_module" if load == "import" else ""
        cell = shared.run(
            f"""
args = {str(folder)!r}, {imports!r}
job = notebook_launcher(train, args, 2, background=True, max_restarts=1, return_all=True)
parents = {{psutil.Process(pid).ppid() for pid in job.pids.values()}}
pathlib.Path({str(folder)!r}, "busy").touch()
{code}
values = job.result(200)
parents == {{os.getpid()}}, [value == os.getpid() for value in values], job.attempt, job.plan.start_method
""",
        )
        assert cell.value == (True, [False, False], 1, "forkserver"), load
        assert "raised ValueError: flaky" in cell.shown
        assert "by forkserver" in cell.shown
        assert "other than the main" in cell.shown


def test_a_restart_starts_with_the_original_arguments(shared: Kernel, tmp_path: Path) -> None:
    cell = shared.run(
        f"""
import linecache, random
linecache.cache["<an earlier cell>"] = (0, None, ["at the launch"], "<an earlier cell>")
sys.argv.append("at the launch")
limit = [1]
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
def train(model, folder):
    attempt = nblaunch.context.current().attempt
    found = limit, model.weight.item(), os.environ.get("SETTING"), os.getcwd(), random.random(), torch.rand(1).item()
    found = *found, sys.argv[-1], linecache.getline("<an earlier cell>", 1)
    pathlib.Path(folder, f"found{{attempt}}").write_text(repr(found))
    while attempt == 0 and not pathlib.Path(folder, "changed").exists():
        time.sleep(0.002)
    if attempt == 0:
        raise ValueError("flaky")
import nblaunch.context, pathlib
os.environ["SETTING"] = "at the launch"
folder = pathlib.Path({str(tmp_path)!r})
job = notebook_launcher(train, (model, str(folder)), 1, background=True, max_restarts=1, sync_weights=False)
os.environ["SETTING"] = "later"
sys.argv.pop()
del linecache.cache["<an earlier cell>"]
limit.append(2)
torch.nn.init.zeros_(model.weight)
random.random(), torch.rand(5)
os.chdir("/")
(folder / "changed").touch()
job.result(200)
found = [eval((folder / f"found{{attempt}}").read_text()) for attempt in range(2)]
found[0][:3], found[0] == found[1]
"""
    )
    assert cell.value == (([1], 1.0, "at the launch"), True)


def test_impossible_later_starts_are_rejected_at_launch(shared: Kernel) -> None:
    shared.run("gate = threading.Lock()\ndef train():\n    return gate.locked()")
    cell = shared.run(
        "notebook_launcher(train, (), 2, background=True, max_restarts=1)", raises="PayloadError"
    )
    assert " gate (TypeError" in cell.raised.value
    assert "Without max_restarts, or without background=True" in cell.raised.value
    assert shared.processes() == []
    cell = shared.run(
        "notebook_launcher(train, (), 2, background=True, max_restarts=1, start_method='fork')",
        raises="ValueError",
    )
    for text in ("start_method='fork'", "background=True", "max_restarts"):
        assert text in cell.raised.value
    assert shared.run("notebook_launcher(train, (), 2, background=True).result(180)").result == "False"
    assert shared.run("notebook_launcher(train, (), 2, max_restarts=1)").result == "False"
    leaked = shared.run("[link for link in descriptors().values() if 'nblaunch-call' in link]")
    assert leaked.result == "[]"

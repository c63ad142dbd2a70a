"""Jobs in the background that start workers again while the kernel is busy with something else.

Workers of a later attempt must never be forked from a kernel whose main thread is inside a library: the kernel, or the
workers, would wait for ever for a lock whose holder is not among them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failures.conftest import assert_as_before, value_of
from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(90)

FAIL_ONCE = """
import pathlib
import nblaunch.context

def train(folder):
    if nblaunch.context.current().attempt == 0:
        while not pathlib.Path(folder, "busy").exists():
            time.sleep(0.002)
        raise ValueError("flaky")
    pathlib.Path(folder, "again").touch()
    {imports}
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
    # Its body ends when a worker of the second attempt has begun, which then imports the module, too.
    "imports": "import slow_module",
    "cuda": (
        "from nblaunch import backends\n"
        "type(backends.discover()['cpu']).fork_hazard = lambda backend: 'the device was used'\n"
        "while job.is_running:\n    time.sleep(0.002)"
    ),
}


@pytest.mark.parametrize("load", LOADS)
def test_a_restart_never_forks_the_busy_kernel(fresh: Kernel, tmp_path: Path, load: str) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE.format(folder=str(tmp_path)))
    imports = "import slow_module" if load == "imports" else ""
    fresh.run(f"sys.path.insert(0, {str(tmp_path)!r})" + FAIL_ONCE.format(imports=imports))
    cell = fresh.run(
        f"""
job = notebook_launcher(train, ({str(tmp_path)!r},), 2, background=True, max_restarts=1, return_all=True)
first = list(job.pids.values())
parents = {{psutil.Process(pid).ppid() for pid in first}}
pathlib.Path({str(tmp_path)!r}, "busy").touch()
{LOADS[load]}
values = job.result(30)
parents == {{os.getpid()}}, [value == os.getpid() for value in values], job.attempt, job.plan.start_method
""",
        timeout_s=50,
    )
    assert cell.value == (True, [False, False], 1, "fork")
    shown = cell.stdout + "".join(str(display.data.get("text/plain")) for display in cell.displays)
    assert "rank 0 raised ValueError: flaky" in shown or "rank 1 raised ValueError: flaky" in shown
    assert "by forkserver" in shown
    assert "a thread other than the main one" in shown

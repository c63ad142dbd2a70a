"""All notebooks, and launches of each kind, with this interpreter's packages, which match the image ``IMAGE``."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest

from tests.dashboard.front_end import VIEW
from tests.event_loop import event_loop  # noqa: F401  a fixture
from tests.kernels import Kernel
from tests.notebooks.checks import CHECKS, SMALL
from tests.notebooks.test_notebooks import check, executed

PINS = (Path(__file__).parent / f"{os.environ['IMAGE']}.txt").read_text()
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
HAS_XLA = "torch_xla==" in PINS


def test_packages_match_the_image() -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    assert re.findall(r"^# Python (\S+)$", PINS, re.MULTILINE) == [python]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", PINS, re.MULTILINE))
    installed = {
        one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()
    }
    differing = {
        name: (version, found)
        for name, version in pinned.items()
        if (found := installed.get(name.replace("_", "-"))) is not None and found.partition("+")[0] != version
    }
    assert differing == {}
    assert {"torch", "ipykernel", "ipython", "ipywidgets"} <= installed.keys() & pinned.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_pass_their_checks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if HAS_XLA and path.stem == "03_tpu":
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
    check(executed(path, SMALL.get(path.stem, ""), CHECKS[path.stem], timeout_s=500), path)


PREAMBLE = """
import os, time
import torch
import nblaunch
from nblaunch import notebook_launcher
def meet(start=0):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(start + dist.get_rank() + 1)
    dist.all_reduce(total)
    print("met", flush=True)
    return total.item()
def fail():
    if os.environ["RANK"] == "1":
        raise LookupError("of rank 1")
    meet()
def wait():
    print("waiting", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_launch_failure_and_interrupt(kernel: Kernel, method: str) -> None:
    kernel.run(PREAMBLE)
    launched = kernel.run(f"notebook_launcher(meet, (10,), num_processes=2, start_method={method!r})")
    assert launched.value == 23
    failed = kernel.run(
        f"notebook_launcher(fail, num_processes=2, start_method={method!r})", raises="LookupError"
    )
    assert failed.raised.value == "of rank 1"
    assert "/nblaunch/" not in failed.raised.text
    waiting = kernel.submit(f"notebook_launcher(wait, num_processes=2, start_method={method!r})")
    waiting.wait_for_text("waiting")
    kernel.interrupt()
    assert waiting.wait().raised.name == "KeyboardInterrupt"
    assert kernel.run("notebook_launcher(meet, num_processes=2)").value == 3


@pytest.mark.parametrize("dashboard", ["html", "text"])
def test_a_table_shows_the_job(kernel: Kernel, dashboard: str) -> None:
    kernel.run(PREAMBLE)
    cell = kernel.run(f"notebook_launcher(meet, num_processes=2, dashboard={dashboard!r})")
    assert "done" in cell.shown


def test_widgets_show_the_job_until_it_ends(kernel: Kernel) -> None:
    kernel.run(PREAMBLE)
    cell = kernel.submit("notebook_launcher(wait, num_processes=2)", allow_stdin=True)
    cell.wait_for(lambda cell: VIEW in "".join(str(one.data) for one in cell.displays), what="widgets")
    assert cell.contents("comm_open")
    kernel.interrupt()
    cell.wait()
    assert "text/html" in cell.displays[0].data


def test_a_background_job_and_a_session(kernel: Kernel) -> None:
    kernel.run(PREAMBLE)
    kernel.run("job = notebook_launcher(meet, (5,), num_processes=2, background=True)")
    assert kernel.run("job.result(timeout=50)").value == 13
    kernel.run("session = nblaunch.Session(2)")
    assert kernel.run("dict(session.execute('base = int(os.environ[\"RANK\"]); base + 1'))").value == {
        0: 1,
        1: 2,
    }
    kernel.run("%load_ext nblaunch")
    kernel.run("%ranks use session")
    assert kernel.run("%%ranks 1\nbase + 10").stdout == "[1] 11\n"
    kernel.run("session.close()")

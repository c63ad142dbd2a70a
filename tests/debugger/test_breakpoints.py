"""``breakpoint()`` in workers; the user answers in the cell of a real kernel."""

from __future__ import annotations

import builtins
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.debugging import answer_prompt, takes_breakpoints
from nblaunch.launcher.debug_client import DebugClient
from nblaunch.wire.worker_commands import Prompted
from tests.kernels import Kernel
from tests.profiles import python_of
from tests.thorough import thorough

PREAMBLE = """
import torch, nblaunch
from nblaunch import Accelerator, notebook_launcher

def loop():
    accelerator = Accelerator()
    total = 0
    for step in range(3):
        total += step
        if step == 1:
            breakpoint()
        accelerator.reduce(torch.ones(1))
    return total
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """Start a kernel for tests whose jobs have all ended with the test."""
    with Kernel.start() as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.mark.parametrize("profile", ["newest", thorough("colab")])
def test_a_blocking_cell_prompts_once_for_all_ranks(profile: str) -> None:
    with Kernel.start(python=python_of(profile)) as kernel:
        kernel.run(PREAMBLE)
        cell = kernel.submit("notebook_launcher(loop, num_processes=3, dashboard='text')", is_typed_into=True)
        for line in ("p step, total", "n", "n", "total = 100", "c"):
            cell.type(line)
        cell.wait()
    assert "(1, 1)" in cell.stdout
    assert "-> accelerator.reduce" in cell.stdout
    assert cell.status == "ok", cell.describe()
    assert cell.stdout.count("at breakpoint()") == 1, cell.describe()


def test_pdb_opens_at_a_failure_after_a_breakpoint(kernel: Kernel) -> None:
    kernel.run(
        "from nblaunch import notebook_launcher\nimport nblaunch\ndef fails():\n    breakpoint()\n    raise ValueError"
    )
    launch = "notebook_launcher(fails, num_processes=1, start_method='fork', post_mortem=True)"
    cell = kernel.submit(launch, is_typed_into=True)
    cell.type("c")
    assert cell.wait().error is not None
    cell = kernel.submit("nblaunch.debug()", is_typed_into=True)
    cell.type("q")
    assert "-> raise ValueError" in cell.wait().stdout


def test_pdb_sets_variables_of_the_function(shared: Kernel) -> None:
    cell = shared.submit("notebook_launcher(loop, num_processes=1, start_method='fork')", is_typed_into=True)
    for line in ("total = 100", "c"):
        cell.type(line)
    assert cell.wait().result == "102"


@pytest.mark.parametrize("method", ["fork", thorough("forkserver")])
@pytest.mark.parametrize(
    ("before", "call"),
    [
        ("import pdb", "pdb.set_trace()"),
        ("from pdb import set_trace", "set_trace()"),
        ("from IPython.core.debugger import set_trace", "set_trace()"),
        thorough("from IPython.core.debugger import Pdb", "Pdb().set_trace()"),
    ],
)
def test_other_calls_of_pdb_are_breakpoints(shared: Kernel, before: str, call: str, method: str) -> None:
    shared.run(f"{before}\ndef add(total):\n    {call}\n    return total + 1")
    launch = f"notebook_launcher(add, (4,), num_processes=1, start_method={method!r}, dashboard='text')"
    cell = shared.submit(launch, is_typed_into=True)
    for line in ("p total * 100", "total = 6", "c"):
        cell.type(line)
    assert cell.wait().result == "7", cell.describe()
    assert "-> return total + 1\n400" in cell.stdout
    # Without input, the call is skipped, and a note names its line.
    cell = shared.run(launch)
    assert cell.result == "5"
    assert "breakpoint() at line 3 of add is skipped" in cell.shown


def test_an_interrupt_at_the_prompt_ends_the_job(shared: Kernel) -> None:
    cell = shared.submit("notebook_launcher(loop, num_processes=2, dashboard='text')", is_typed_into=True)
    cell.wait_for_input()
    shared.interrupt()
    cell.wait()
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt"
    shared.wait_for_no_processes()


def test_a_background_job_waits_for_debug_in_another_cell(shared: Kernel) -> None:
    start = "job = notebook_launcher(loop, num_processes=2, background=True, dashboard='text')"
    cell = shared.run(start, is_typed_into=True)
    cell.wait_for(lambda cell: "is waiting at breakpoint()" in cell.displays[0].data["text/plain"])
    cell = shared.submit("nblaunch.debug()", is_typed_into=True)
    for line in ("p step, total", "c"):
        cell.type(line)
    cell.wait()
    assert cell.status == "ok", cell.describe()
    assert "(1, 1)" in cell.stdout
    assert shared.run("job.result()").value == 3


SHAPES = """
def shapes():
    print("the shape")
    print("an open line", end="")
    breakpoint()
    print("the end")
"""


@pytest.mark.parametrize("dashboard", ["auto", "text"])
def test_output_before_a_prompt_is_shown_before_it(shared: Kernel, dashboard: str) -> None:
    shared.run(SHAPES)
    launch = f"notebook_launcher(shapes, num_processes=1, start_method='fork', dashboard={dashboard!r})"
    cell = shared.submit(launch, is_typed_into=True)
    for line in ("n", "c"):
        cell.type(line)
    cell.wait()
    assert "the shape\nan open line\nrank 0 at breakpoint()" in cell.stdout, cell.describe()
    assert "the end\n--Return--" in cell.stdout, cell.describe()
    assert cell.stdout.count("the shape") == 1


def test_a_prompt_in_another_cell_comes_after_earlier_output(shared: Kernel) -> None:
    shared.run(SHAPES)
    start = "job = notebook_launcher(shapes, num_processes=1, background=True, dashboard='text')"
    job = shared.run(start, is_typed_into=True)
    job.wait_for(lambda job: "is waiting at breakpoint()" in job.displays[0].data["text/plain"])
    assert re.search(r"the shape\n.*an open line", job.displays[0].data["text/plain"]), job.displays
    cell = shared.submit("nblaunch.debug()", is_typed_into=True)
    cell.type("c")
    cell.wait()
    shared.run("job.result()")


def _start_waiting(kernel: Kernel, name: str) -> None:
    """Start a background job whose two ranks wait at the breakpoint."""
    start = f"{name} = notebook_launcher(loop, num_processes=2, background=True, dashboard='text')"
    kernel.run(start, is_typed_into=True)
    kernel.run(f"while len({name}.debugger.prompts) < 2: pass")


def _debug_and_go_on(kernel: Kernel) -> None:
    cell = kernel.submit("nblaunch.debug()", is_typed_into=True)
    cell.type("c")
    assert cell.wait().status == "ok", cell.describe()


def test_debug_finds_the_job_that_waits_behind_others(shared: Kernel) -> None:
    _start_waiting(shared, "first")
    _start_waiting(shared, "second")
    shared.run("notebook_launcher(lambda: None, num_processes=1, dashboard='text')")
    _debug_and_go_on(shared)
    assert shared.run("second.result(), first.is_running").value == (3, True)
    _debug_and_go_on(shared)
    assert shared.run("first.result()").value == 3
    with pytest.raises(AssertionError, match="without asking"):
        shared.submit("nblaunch.debug()", is_typed_into=True).wait_for_input()


def test_debug_opens_the_latest_breakpoint_or_failure(shared: Kernel, tmp_path: Path) -> None:
    # Without a pause, the second breakpoint may come while the cell for the first still runs, which would answer it.
    shared.run(f"""
def twice():
    breakpoint()
    while not os.path.exists({str(tmp_path / "go_on")!r}):
        time.sleep(0.01)
    breakpoint()
    return 3
import os, time
""")
    shared.run("session = nblaunch.Session(1)")
    start = "job = notebook_launcher(twice, num_processes=1, background=True, dashboard='text')"
    shared.run(start, is_typed_into=True)
    shared.run("while not job.debugger.prompts: pass")
    shared.run("session.execute('1 / 0')", raises="ZeroDivisionError")
    cell = shared.submit("nblaunch.debug()", is_typed_into=True)
    cell.type("q")
    assert "<session command" in cell.wait().stdout, cell.describe()
    cell = shared.submit("nblaunch.debug(job=job)", is_typed_into=True)
    cell.type("c")
    assert cell.wait().status == "ok", cell.describe()
    (tmp_path / "go_on").touch()
    shared.run("while not job.debugger.prompts: pass")
    _debug_and_go_on(shared)
    assert shared.run("job.result()").value == 3
    shared.run("session.close()")


def test_fresh_interpreters_show_the_lines_of_the_cell(shared: Kernel) -> None:
    start = "notebook_launcher(loop, num_processes=1, start_method='spawn', dashboard='text')"
    cell = shared.submit(start, is_typed_into=True)
    for line in ("l", "c"):
        cell.type(line)
    cell.wait()
    assert "for step in range(3):" in cell.stdout, cell.describe()


@pytest.mark.parametrize("method", ["fork", thorough("spawn")])
def test_pdb_shows_only_frames_below_the_function(shared: Kernel, method: str) -> None:
    shared.run("""
class Stops(torch.optim.SGD):
    def step(self, closure=None):
        breakpoint()
        return super().step(closure)

def trains():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, Stops(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
""")
    launch = f"notebook_launcher(trains, num_processes=1, start_method='{method}', dashboard='text')"
    cell = shared.submit(launch, is_typed_into=True)
    for line in ("w", "u 100", "c"):
        cell.type(line)
    assert cell.wait().status == "ok", cell.describe()
    places = re.findall(r"^[> ] (\S+)\(\d+\)(\S+)\(\)", cell.stdout, re.MULTILINE)
    walked = places[1:-1]  # pdb also prints its position when it opens, and after "u"
    assert walked[0][1] == "trains", cell.describe()
    assert walked[-1][1] == "step"
    assert any("optimizer.py" in file for file, _ in walked), (
        "what the function calls stays, nblaunch's part too"
    )
    assert places[-1] == walked[0], "up ends at the function"


def test_interact_says_that_a_rank_has_no_terminal(shared: Kernel) -> None:
    cell = shared.submit("notebook_launcher(loop, num_processes=1, dashboard='text')", is_typed_into=True)
    for line in ("interact", "!c = 40", "p c + 2", "c"):
        cell.type(line)
    assert cell.wait().result == "3", cell.describe()
    assert "no terminal" in cell.stdout
    assert "\n42\n" in cell.stdout


def test_the_end_of_input_leaves_pdb(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(prompt: str) -> str:
        raise EOFError

    client = DebugClient({})
    client.prompts[0] = Prompted("")
    sent: list[tuple[int, str]] = []
    monkeypatch.setattr(builtins, "input", ended)
    monkeypatch.setattr(client, "send_line", lambda *line: sent.append(line))
    answer_prompt(client, interrupt=lambda: None)
    assert sent == [(0, "q")]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Tee:
    """A common replacement of ``sys.stdout`` in scripts, which also writes to a file."""

    def write(self, text: str) -> int:
        return len(text)


def test_breakpoints_are_skipped_with_replaced_or_closed_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = io.StringIO()
    closed.close()
    for stdin, stdout, takes in (
        (Terminal(), Terminal(), True),
        (Terminal(), Tee(), False),
        (closed, Terminal(), False),
        (None, Terminal(), False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            patch.setattr(sys, "stdout", stdout)
            assert takes_breakpoints(background=True) is takes

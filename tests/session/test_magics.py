"""``%%ranks`` and ``%ranks`` in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels import Kernel
from tests.profiles import python_of
from tests.thorough import thorough


@pytest.fixture(scope="module", params=["newest", thorough("colab")])
def shared(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Start a kernel in which the magics use a session of three ranks."""
    with Kernel.start(python=python_of(request.param)) as kernel:
        kernel.run("import os\n%load_ext nblaunch\n%ranks start 3")
        yield kernel
        kernel.run("%ranks stop")
        assert kernel.processes() == []


def test_a_cell_runs_on_every_rank(shared: Kernel) -> None:
    assert shared.run("%%ranks\nrank = int(os.environ['RANK'])\n1 + 1").stdout == "[0-2] 2\n"
    *printed, first, second = shared.run("%%ranks 0,2\nprint('here')\nrank * 10").stdout.splitlines()
    assert (sorted(printed), first, second) == (["[0] here", "[2] here"], "[0] 0", "[2] 20")
    assert shared.run("%%ranks 1-2\nx = 1").stdout == ""
    assert shared.run("%%ranks 0 2\nrank").stdout == "[0] 0\n[2] 2\n"
    assert shared.run("%%ranks 0 - 1, 2\n1 + 1").stdout == "[0-2] 2\n"


def test_an_error_fails_the_cell_at_its_own_line(shared: Kernel) -> None:
    cell = shared.run("%%ranks\nbatches = []\nif rank == 1:\n    batches[3]", raises="IndexError")
    assert cell.error is not None
    assert "----> 4     batches[3]" in cell.error.text
    assert "ranks 0 and 2: finished" in cell.error.text
    assert "rank 1" in cell.error.text


def test_lines_are_counted_from_the_magic(shared: Kernel) -> None:
    cell = shared.run("%%ranks\n\n\n1 / 0", raises="ZeroDivisionError")
    assert cell.error is not None
    assert "----> 4 1 / 0" in cell.error.text
    cell = shared.run("%%ranks\nx = 1\nno syntax", raises="SyntaxError")
    assert cell.error is not None
    assert "line 3\n" in cell.error.text
    assert "    no syntax" in cell.error.text


def test_bars_magics_and_shell_commands_work_as_in_a_cell(shared: Kernel) -> None:
    cell = shared.run(
        "%%ranks 1\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass\n%time pass\n!echo $RANK"
    )
    assert "3/3" in cell.stdout
    assert "Wall time" in cell.stdout
    assert "[1] 1\n" in cell.stdout
    assert shared.run("%history -l 1").stdout.startswith("%%ranks 1\nfrom tqdm")


@pytest.mark.parametrize("method", [thorough("fork"), "forkserver"])
def test_figures_and_exits_work_as_in_a_script(kernel: Kernel, method: str) -> None:
    kernel.run(
        f"import nblaunch\nsession = nblaunch.Session(1, start_method={method!r})\n"
        "%load_ext nblaunch\n%ranks use session"
    )
    cell = kernel.run("%%ranks\n%matplotlib inline\nfrom matplotlib import pyplot\npyplot.plot([1, 2]);")
    assert any("image/png" in display.data for display in cell.displays), cell.describe()
    assert kernel.run("%%ranks\nprint(1)\nexit()\nprint(2)").stdout == "1\n"
    kernel.run("session.close()")


def test_help_is_shown_in_the_cell(shared: Kernel) -> None:
    cell = shared.run("%%ranks 1\nrank?")
    assert [one.data["text/plain"].splitlines()[0].split()[-1] for one in cell.displays] == ["int"]


def test_rich_values_are_displayed(shared: Kernel) -> None:
    cell = shared.run("%%ranks\nfrom IPython.display import HTML\nHTML('<b>bold</b>')")
    assert [display.data["text/html"] for display in cell.displays] == ["<b>bold</b>"]


def test_wrong_lines_are_rejected(shared: Kernel) -> None:
    for line in ("%%ranks 7\n1", "%%ranks a\n1", "%ranks begin", "%ranks start x", "%ranks use os"):
        assert shared.run(line, raises="ValueError").error is not None
    assert shared.run("%ranks", raises="ValueError").raised.value.startswith("%ranks is not a command. The")
    assert shared.run("%ranks status").result == "[0-2] 'idle'"


def test_the_first_use_starts_a_session(kernel: Kernel) -> None:
    kernel.run("%env NBLAUNCH_NUM_PROCESSES=2\n%load_ext nblaunch")
    assert kernel.run("%%ranks\n3").stdout == "[0-1] 3\n"
    kernel.run("%ranks restart")
    assert kernel.run("%%ranks 1\n4").stdout == "[1] 4\n"
    kernel.run("%ranks stop")
    assert kernel.processes() == []


def test_debug_and_restart_need_a_session(kernel: Kernel) -> None:
    kernel.run("%load_ext nblaunch")
    for command in ("debug", "restart"):
        error = kernel.run(f"%ranks {command}", raises="ValueError").error
        assert error is not None
        assert "magics.py" not in error.text
        assert kernel.processes() == []


def test_ended_sessions_restart_with_their_settings(kernel: Kernel) -> None:
    kernel.run("import os\n%load_ext nblaunch\n%ranks start 3")
    kernel.run("%%ranks 1\nos._exit(3)", raises="WorkerDied")
    # It does not restart by itself, because a new session would not have its variables.
    kernel.run("%%ranks\nos.getpid()", raises="LaunchError")
    assert kernel.processes() == []
    kernel.run("%ranks restart")
    assert kernel.run("%%ranks\nimport os\nint(os.environ['WORLD_SIZE'])").stdout == "[0-2] 3\n"
    kernel.run("%ranks stop")
    assert kernel.processes() == []


def test_magics_use_a_session_from_a_cell(kernel: Kernel) -> None:
    kernel.run("from nblaunch import Session\nmine = Session(2)\n%load_ext nblaunch\n%ranks use mine")
    kernel.run("mine.execute('x = 8')")
    assert kernel.run("%%ranks\nx").stdout == "[0-1] 8\n"
    kernel.run("mine.close()")
    assert kernel.processes() == []

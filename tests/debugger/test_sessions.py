"""The debugger in a session in a real kernel: after a failed command, and at ``breakpoint()``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kernels import Kernel
from tests.profiles import python_of
from tests.thorough import thorough

PREAMBLE = """
import os, torch, nblaunch
session = nblaunch.Session(3, threads_per_process=1)
%load_ext nblaunch
%ranks use session
"""

FAILS = """%%ranks
rank = int(os.environ["RANK"])
def step(batch, number):
    if rank == 1:
        raise ValueError("boom")
    if rank == 2:
        torch.distributed.all_reduce(batch)
for number in range(2, 4):
    step(torch.ones(8 - (rank == 1), 16), number)
"""


@pytest.fixture(scope="module", params=["newest", thorough("colab")])
def shared(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Start a kernel with a session of three ranks for the magics."""
    with Kernel.start(python=python_of(request.param)) as kernel:
        kernel.run(PREAMBLE)
        yield kernel
        kernel.run("session.close()")
        assert kernel.processes() == []


@pytest.fixture
def failed(shared: Kernel) -> Kernel:
    """Run a cell that fails on rank 1 while rank 2 waits in a collective, after rank 0 has finished it."""
    shared.run(FAILS, raises="ValueError")
    return shared


def test_pdb_opens_on_failed_and_waiting_ranks(failed: Kernel) -> None:
    cell = failed.submit("nblaunch.debug()", is_typed_into=True)
    for line in ("p number, tuple(batch.shape)", "u", "p number + 40", "q"):
        cell.type(line)
    cell.wait()
    for text in ('-> raise ValueError("boom")', "(2, (7, 16))", "42"):
        assert text in cell.stdout, cell.describe()
    cell = failed.submit("%ranks debug 2", is_typed_into=True)
    for line in ("p tuple(batch.shape)", "q"):
        cell.type(line)
    cell.wait()
    assert "-> torch.distributed.all_reduce(batch)" in cell.stdout, cell.describe()
    assert "(8, 16)" in cell.stdout


def test_every_rank_can_be_inspected(failed: Kernel) -> None:
    shapes = "{rank: tuple(shape) for rank, shape in session.inspect('batch.shape').items() if rank}"
    assert failed.run(shapes).value == {1: (7, 16), 2: (8, 16)}
    assert failed.run("dict(session.inspect('rank * 10'))").value == {0: 0, 1: 10, 2: 20}
    text = failed.run("session.compare()").result or ""
    assert "batch.shape is" in text
    assert "(7, 16) on rank 1" in text
    assert "(8, 16) on rank 2" in text
    assert "rank 0: idle" in text


def test_the_next_command_drops_the_frames(failed: Kernel) -> None:
    failed.run(
        "%%ranks\nimport weakref\ndef hold(self_destructing):\n    global seen\n    seen = weakref.ref("
        "self_destructing)\n    raise ValueError\nhold(torch.nn.Linear(1, 1))",
        raises="ValueError",
    )
    assert failed.run("set(session.inspect('seen() is None').values())").value == {False}
    failed.run("session.execute('1')")
    assert failed.run("set(session.inspect('seen() is None').values())").value == {True}
    for call in ("session.find_debugger()", "nblaunch.debug(job=session)"):
        assert failed.run(call, raises="RuntimeError").error is not None


def test_the_next_command_closes_an_open_pdb(failed: Kernel) -> None:
    cell = failed.submit("nblaunch.debug()", is_typed_into=True)
    cell.wait_for_input()
    failed.interrupt()
    assert cell.wait().error is not None
    assert failed.run("session.execute('2')").result == "[0-2] 2"
    threads = (
        'session.execute(\'[t.name for t in __import__("threading").enumerate()].count("nblaunch-pdb")\')'
    )
    failed.run(f"while set({threads}.values()) != {{0}}: pass")


def test_pdb_keeps_no_references_to_the_frame(failed: Kernel) -> None:
    cell = failed.submit("nblaunch.debug()", is_typed_into=True)
    for line in (
        "import weakref, os",
        "os.seen = weakref.ref(batch)",
        "p tuple(batch.shape)",
        "1 / 0",
        "1 +* 0",
        "q",
    ):
        cell.type(line)
    assert cell.wait().status == "ok", cell.describe()
    for text in ("(7, 16)\n", "ZeroDivisionError", "SyntaxError"):
        assert text in cell.stdout, cell.describe()
    assert failed.run("session.ranks(1).execute('os.seen() is None')[1]").value is True


def test_pdb_shows_the_sessions_last_error(shared: Kernel) -> None:
    shared.run("session.execute('import pdb\\ndef fails(self, arg): raise LookupError(arg)')")
    shared.run("session.execute('for cls in pdb.Pdb.__mro__[:-1]: cls.do_fails = fails')")
    shared.run(FAILS, raises="ValueError")
    cell = shared.submit("nblaunch.debug()", is_typed_into=True)
    cell.type("fails with this")
    assert cell.wait().status == "ok", cell.describe()
    assert "LookupError: with this" in cell.stdout, cell.describe()


def test_pdb_does_not_open_on_a_finished_rank(failed: Kernel) -> None:
    cell = failed.submit("nblaunch.debug(0)", is_typed_into=True)
    cell.wait()
    assert cell.error is not None
    assert cell.error.name == "ValueError"


def test_a_breakpoint_in_a_cell_prompts_once_for_all_ranks(shared: Kernel) -> None:
    source = (
        "%%ranks\nx = 1\nbreakpoint()\nx += 1\ntorch.distributed.barrier()\nint(os.environ['RANK']) * 0 + x"
    )
    for _ in range(2):  # stepping to the end of a cell has no effect on the next
        cell = shared.submit(source, is_typed_into=True)
        for line in ("p x", "x = 40", "n", "n", "n"):
            cell.type(line)
        cell.wait_for_input()
        cell.type("c")
        cell.wait()
        assert cell.status == "ok", cell.describe()
        assert cell.stdout.count("at breakpoint()") == 1, cell.describe()
        assert sorted(re.findall(r"^\[[-0-2, ]+\] (\d+)$", cell.stdout, re.MULTILINE)) == ["2", "41"]


def test_output_before_a_prompt_is_shown_before_it(shared: Kernel) -> None:
    cell = shared.submit(
        "%%ranks 0\nprint('shape')\nprint('open', end='')\nbreakpoint()\nx = 1", is_typed_into=True
    )
    cell.type("c")
    cell.wait()
    assert "shape\n[0] open\nrank 0 at breakpoint()" in cell.stdout, cell.describe()


@pytest.mark.parametrize("command", ["session.run(stops)", "session.execute('stops()')"])
def test_pdb_shows_only_frames_of_the_command(shared: Kernel, command: str) -> None:
    shared.run("def stops():\n    breakpoint()\n    return 1")
    shared.run("session.put(stops=stops)")
    cell = shared.submit(command, is_typed_into=True)
    for line in ("w", "c"):
        cell.type(line)
    assert cell.wait().status == "ok", cell.describe()
    functions = re.findall(r"^[> ] .+\(\d+\)(\S+)\(\)", cell.stdout, re.MULTILINE)
    # pdb also prints its position when it opens
    assert functions[1:] == (["stops"] if "run" in command else ["<module>", "stops"]), cell.describe()


def test_an_interrupt_at_the_prompt_ends_the_command(shared: Kernel) -> None:
    shared.run("session.execute('kept = 5')")
    cell = shared.submit("session.execute('breakpoint()\\nkept = 6')", is_typed_into=True)
    cell.wait_for_input()
    shared.interrupt()
    assert cell.wait().error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
    assert shared.run("session.execute('kept')").result == "[0-2] 5"


def test_breakpoints_do_not_wait_without_a_user(failed: Kernel) -> None:
    assert failed.run("nblaunch.debug()", raises="RuntimeError").error is not None
    cell = failed.run("_ = session.ranks(0).execute('breakpoint()')")
    assert "there is no interactive input" in cell.stdout

"""Exceptions and functions whose own code makes reporting them difficult."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.kernels import Cell, Kernel
from tests.thorough import thorough

SETUP = """
import os, pickle, sys, tempfile
import torch
from nblaunch import notebook_launcher

class Base(Exception):
    pass

def launch(error, num_processes=2, **options):
    def train():
        raise error
    return notebook_launcher(train, num_processes=num_processes, **options)
"""

MAX_LINES = 25


@pytest.fixture(scope="module")
def odd_kernel() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run(SETUP)
        yield kernel


def fail(kernel: Kernel, body: str, made: str = "Odd('lost')", options: str = "") -> Cell:
    """Raise an exception of a class with ``body``, catch it as that class, then let the cell show it."""
    return kernel.run(
        f"""
class Odd(Base):
    {body}
try:
    launch({made}{options})
except Odd:
    print("caught")
launch({made}{options})
""",
        raises="Odd",
    )


ODD_BODIES = {
    "str exits": ("def __str__(self): sys.exit(3)", "complete log: "),
    "str interrupts": ("def __str__(self): raise KeyboardInterrupt", "complete log: "),
    "reduce exits": ("def __reduce__(self): sys.exit(0)", "complete log: "),
    "no notes": (
        "__getattribute__ = lambda self, name: {}[name] if name == '__notes__' else super().__getattribute__(name)",
        "complete log: ",
    ),
    "notes are a number": ("__notes__ = 5", "Odd: lost"),
    "notes are a text": ("__notes__ = 'one note'", "Odd: lost"),
    "notes are no texts": ("__notes__ = [3, None]", "Odd: lost"),
}


@pytest.mark.parametrize("odd", ODD_BODIES)
def test_an_exceptions_code_cannot_hide_it(odd_kernel: Kernel, odd: str) -> None:
    body, shown = ODD_BODIES[odd]
    cell = fail(odd_kernel, body)
    assert "caught" in cell.stdout
    assert shown in cell.raised.text


def test_notes_of_the_user_are_shown(odd_kernel: Kernel) -> None:
    cell = fail(odd_kernel, "__notes__ = [f'seen in file {i}' for i in range(50)]")
    assert "seen in file 49" in cell.raised.text
    assert len(cell.raised.lines) <= MAX_LINES


def test_large_attributes_are_left_out(odd_kernel: Kernel) -> None:
    cell = odd_kernel.run(
        """
class Large(Exception):
    pass
error = Large("kept")
error.model, error.step = torch.zeros(25_000_000), 3
try:
    launch(error)
except Large as arrived:
    print(arrived, arrived.step, hasattr(arrived, "model"))
"""
    )
    assert "kept 3 False" in cell.stdout


@pytest.mark.parametrize(
    ("kind", "message"), [("ValueError", "'x' * 30_000_000"), ("Base", "'word\\n' * 2_000_000")]
)
def test_huge_messages_are_shortened(odd_kernel: Kernel, kind: str, message: str) -> None:
    cell = odd_kernel.run(
        f"""
message = {message} + 'the end'
try:
    launch({kind}(message), dashboard="none")
except {kind} as arrived:
    print(arrived.args[0] == message, type(arrived).__name__, pickle.loads(pickle.dumps(arrived)).args[0] == message)
launch({kind}(message))
""",
        raises=kind,
    )
    assert f"True {kind} True" in cell.stdout
    assert len(cell.raised.lines) <= MAX_LINES, cell.raised.lines[:MAX_LINES]
    assert len(cell.raised.text) < 10_000
    assert len(cell.raised.value) < 10_000  # size in the saved notebook
    assert len(cell.stdout) < 30_000
    for shown in (cell.raised.text, cell.raised.value):
        assert "omitted" in shown
        assert "the end" in shown


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_removed_working_folder_is_tolerated(odd_kernel: Kernel, method: str) -> None:
    cell = odd_kernel.run(
        f"""
before = os.getcwd()
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
try:
    print("result", notebook_launcher(lambda: 42, num_processes=2, start_method={method!r}))
finally:
    os.chdir(before)
"""
    )
    assert "result 42" in cell.stdout


def test_infinite_recursion_is_reported_soon(odd_kernel: Kernel) -> None:
    cell = odd_kernel.run(
        """
def train():
    sys.setrecursionlimit(100_000)
    def dive(depth): return dive(depth + 1)
    dive(0)
notebook_launcher(train, num_processes=2)
""",
        raises="RecursionError",
    )
    assert len(cell.raised.lines) <= MAX_LINES


def test_syntax_errors_show_only_user_lines(odd_kernel: Kernel) -> None:
    cell = odd_kernel.run(
        """
def read():
    compile("rate = = 3", "settings.py", "exec")
def train():
    read()
notebook_launcher(train, num_processes=2)
""",
        raises="SyntaxError",
    )
    assert cell.raised.text.count('compile("rate = = 3", "settings.py", "exec")') == 1, cell.describe()
    assert "in train" in cell.raised.text
    assert "/nblaunch/" not in cell.raised.text, cell.describe()
    assert len(cell.raised.lines) <= MAX_LINES, cell.describe()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has exception groups from 3.11 on")
def test_exception_groups_show_only_user_lines(odd_kernel: Kernel) -> None:
    cell = odd_kernel.run(
        """
def read(path):
    raise OSError("no " + path)
def train():
    errors = []
    for path in ("a.txt", "b.txt"):
        try:
            read(path)
        except OSError as error:
            errors.append(error)
    raise ExceptionGroup("files", errors)
notebook_launcher(train, num_processes=2, dashboard="none")
""",
        raises="ExceptionGroup",
    )
    shown = cell.stderr if cell.error is None else cell.error.text
    for text, times in (
        ("OSError: no a.txt", 1),
        ("OSError: no b.txt", 1),
        ('raise OSError("no " + path)', 2),
    ):
        assert shown.count(text) == times, cell.describe()
    assert "/nblaunch/" not in shown, cell.describe()


def test_the_first_of_several_causes_is_named(odd_kernel: Kernel) -> None:
    cell = odd_kernel.run(
        """
def train():
    try:
        try:
            {}["lr"]
        except KeyError as missing:
            raise ValueError("no settings") from missing
    except ValueError as error:
        error.__notes__ = ["seen in settings.yaml"]
        raise RuntimeError("no start")
notebook_launcher(train, num_processes=2)
""",
        raises="RuntimeError",
    )
    assert "ValueError was raised from KeyError: 'lr' (cell " in cell.raised.text, cell.describe()
    assert ", line 4)" in cell.raised.text
    assert cell.raised.lines.count("ValueError: no settings") == 1
    assert (
        cell.raised.lines[cell.raised.lines.index("ValueError: no settings") + 1] == "seen in settings.yaml"
    )
    assert len(cell.raised.lines) <= MAX_LINES, cell.describe()


@pytest.mark.parametrize("method", ["fork", "forkserver", thorough("spawn")])
def test_a_function_may_close_foreign_descriptors(kernel: Kernel, method: str) -> None:
    kernel.run(
        """
import os, torch, nblaunch
class Odd(Exception): pass
def function(fails):
    import os
    os.closerange(3, 900)
    opened = [os.open(os.devnull, os.O_WRONLY) for _ in range(40)]
    if fails:
        raise Odd("of the cell")
    return torch.arange(100_000), os.environ["RANK"]
"""
    )
    launch = f"nblaunch.notebook_launcher(function, (fails,), 2, start_method={method!r}, dashboard='none')"
    kernel.run(
        f"""
fails = True
try:
    {launch}
except Odd as error:
    assert str(error) == "of the cell"
else:
    assert False
fails = False
assert {launch}[0].sum() == 4999950000
"""
    )

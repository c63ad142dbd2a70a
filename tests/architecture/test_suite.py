"""Rules for the tests themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, listing
from tests.conftest import LONGEST_FIRST

TESTS = ROOT / "tests"
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
COST_CLOCKS = re.compile(r"\b(perf_counter|process_time|thread_time|timeit)\b")
HERE = Path(__file__)


def test_no_test_fails_because_the_machine_is_busy() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.parent != TESTS / "benchmarks" and path != HERE]
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in sorted(_timed(path.read_text(encoding="utf-8")))
    ]
    assert len(files) > 200
    assert not offenders, (
        "assert what happens, not how fast, and measure costs in tests/benchmarks;"
        f" an upper bound on measured seconds:{listing(offenders)}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - begun_s < 5",
        "assert 0 <= time.time() - begun_s <= 5",
        "took_s = time.monotonic() - begun_s\nassert 5 > took_s",
        "assert cell.elapsed_s < 20",
        "kernel.run('''\nbegun = time.perf_counter()\n''')",
    ],
)
def test_a_bound_on_measured_seconds_is_found(source: str) -> None:
    assert _timed(source)


@pytest.mark.parametrize(
    "source",
    [
        "while time.monotonic() < deadline:\n    pass",
        "assert time.monotonic() < deadline",
        "assert time.monotonic() - begun_s >= GRACE_S",
        "assert num_bytes < RATE * cell.elapsed_s",
    ],
)
def test_waits_and_lower_bounds_are_allowed(source: str) -> None:
    assert not _timed(source)


def test_listed_long_tests_exist() -> None:
    for group in LONGEST_FIRST:
        assert (ROOT / group).exists(), f"{group} of LONGEST_FIRST in tests/conftest.py"


def _timed(source: str) -> set[int]:
    """Return lines that read a CPU clock, or assert an upper bound on measured seconds."""
    tree = ast.parse(source)
    lines = {number for number, line in enumerate(source.splitlines(), 1) if COST_CLOCKS.search(line)}
    measured = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_measurement(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assert):
            smaller = _smaller_sides(statement.test)
            lines |= {side.lineno for side in smaller if _is_measurement(side, measured)}
    return lines


def _smaller_sides(condition: ast.expr) -> Iterator[ast.expr]:
    """Yield the sides of comparisons that must be smaller."""
    for node in ast.walk(condition):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                if isinstance(operator, ast.Lt | ast.LtE):
                    yield left
                elif isinstance(operator, ast.Gt | ast.GtE):
                    yield right


def _is_measurement(side: ast.expr, measured: set[str]) -> bool:
    """Return whether a node is a difference of clock times, or has the name of such a difference."""
    if isinstance(side, ast.Name):
        return side.id in measured
    if isinstance(side, ast.Attribute):
        return side.attr == "elapsed_s"
    if not (isinstance(side, ast.BinOp) and isinstance(side.op, ast.Sub)):
        return False
    call = side.left
    return isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in CLOCKS

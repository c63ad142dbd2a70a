"""Every failure of the table, in a kernel that goes on afterwards."""

from __future__ import annotations

import re
import socket

import pytest

from tests.failures.cases import CASES, LAUNCH, Case
from tests.failures.conftest import across_methods, assert_as_before, source_line, value_of
from tests.kernels import Cell, Kernel

POSSIBLE = [case for case in CASES if case.is_possible]

MAX_LINES = 25
OTHERS = re.compile(r"^ranks? [\d, ]+: (?!.*complete log)")

INSPECT = """
error = sys.last_value
job = nblaunch.last_job()
"""


@pytest.mark.timeout(90)
@across_methods(
    "case",
    POSSIBLE,
    forkserver=["error", "SIGSEGV", "os._exit(3)", "exception class of a cell"],
    spawn=["error", "SIGKILL"],
)
def test_a_failure_is_reported_and_leaves_nothing(shared: Kernel, method: str, case: Case) -> None:
    cell = shared.run(case.source + LAUNCH.format(method=method), raises=case.raises, timeout_s=30)
    shared.wait_for_no_processes(1.0)
    shared.run(INSPECT)
    assert value_of(shared, "type(error).__name__") == case.raises
    assert value_of(shared, f"bool({case.check})")
    assert cell.reply is not None
    assert case.value in cell.reply["evalue"]
    _check_shown(cell, case)
    _check_evidence(shared, cell, case)
    if case.is_remote:
        _check_traceback(shared, case)
    _check_job(shared, case)
    assert_as_before(shared)


@pytest.mark.timeout(60)
def test_the_next_line_catches_it(shared: Kernel) -> None:
    cell = shared.run(
        CASES[0].source
        + f"""
try:
    {LAUNCH.format(method="fork")}
except ValueError as caught:
    print("caught", caught)
"""
    )
    assert cell.stdout.splitlines()[-1] == "caught the loss is nan"
    assert_as_before(shared)


def _check_shown(cell: Cell, case: Case) -> None:
    if cell.error is None:  # IPython prints exception groups by other means, without any message of their own
        assert case.raises == "ExceptionGroup"
        assert case.value in cell.stderr
        return
    assert source_line(cell).startswith(case.line), cell.describe()
    assert len(cell.raised.lines) <= MAX_LINES, cell.describe()
    for text in case.shows:
        assert text in cell.raised.text, cell.describe()
    assert "/nblaunch/" not in cell.raised.text, cell.describe()


def _check_evidence(kernel: Kernel, cell: Cell, case: Case) -> None:
    """Who, where, and what became of the others: in the message or in the notes."""
    text = value_of(kernel, "'\\n'.join([*getattr(error, '__notes__', []), str(error)])")
    found = re.search(r"^rank (\d+) \(pid (\d+)\) on (\S+); complete log: (\S+)$", text, re.M)
    assert found is not None, text
    shown_rank, pid, host, path = found.groups()
    assert case.rank is None or int(shown_rank) == case.rank
    assert int(pid) == value_of(kernel, f"job.pids[{shown_rank}]")
    assert host == socket.gethostname()
    assert path.endswith(f"rank_{shown_rank}.log")
    assert value_of(kernel, f"os.path.exists({path!r})")
    others = [line for line in text.splitlines() if OTHERS.match(line)]
    assert len(others) == 1, text
    # On a busy machine the launcher may have to stop a rank before it notices that its partner is gone.
    fates = dict(re.findall(r"ranks? ([\d, ]+): ([^;]+)", others[0]))
    assert sorted(rank for ranks in fates for rank in ranks.split(", ")) == ["0", "2"], text
    assert set(fates.values()) <= {"lost the connection to it", "stopped by the launcher"}, text
    if cell.error is not None:
        assert found[0] in cell.raised.text
        assert others[0] in cell.raised.text


def _check_traceback(kernel: Kernel, case: Case) -> None:
    """Printed by Python rather than by IPython: the worker's frames once, last of all, and none of the launcher's."""
    kernel.run("import traceback")
    printed = str(
        value_of(kernel, "''.join(traceback.format_exception(type(error), error, error.__traceback__))")
    )
    assert printed.count("Traceback (most recent call last)") >= 1
    statement = case.line or "raise ExceptionGroup('two things'"
    assert printed.count(statement) == 1, (
        printed
    )  # the cell's own source, also where the worker has never seen the cell
    assert printed.index("notebook_launcher") < printed.rindex("in train"), printed
    assert "/nblaunch/" not in printed, printed


def _check_job(kernel: Kernel, case: Case) -> None:
    status, log, is_running = value_of(kernel, f"(job.status, job.logs({case.rank}), job.is_running)")
    assert (status, is_running) == ("failed", False)
    assert case.prints in log
    assert value_of(kernel, "job.exception() is error")

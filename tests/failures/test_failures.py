"""Every failure of the table, in a kernel that continues afterwards."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.failures.cases import CASES, LAUNCH, Case
from tests.failures.conftest import across_methods, assert_as_before, source_line, value_of
from tests.kernels import Cell, Kernel

POSSIBLE = [case for case in CASES if case.is_possible]

MAX_LINES = 25
OTHERS = re.compile(r"^ranks? [\d, and]+: (?!.*complete log)")

INSPECT = """
import traceback
error, job = sys.last_value, nblaunch.last_job()
found = dict(
    kind=type(error).__name__, is_as_wanted=bool({check}),
    text="\\n".join([*getattr(error, "__notes__", []), str(error)]),
    printed="".join(traceback.format_exception(type(error), error, error.__traceback__)),
    job=(job.status, job.is_running, job.exception() is error), log=job.logs({rank}), pids=dict(job.pids),
)
"""


@across_methods(
    "case",
    POSSIBLE,
    forkserver=["error", "SIGSEGV", "os._exit(3)", "exception class of a cell"],
    spawn=["error", "SIGKILL"],
)
def test_a_failure_is_reported_and_leaves_nothing(shared: Kernel, method: str, case: Case) -> None:
    cell = shared.run(case.source + LAUNCH.format(method=method), raises=case.raises)
    shared.wait_for_no_processes()
    shared.run(INSPECT.format(check=case.check, rank=case.rank))
    found = value_of(shared, "found")
    assert (found["kind"], found["is_as_wanted"]) == (case.raises, True), found["text"]
    assert found["job"] == ("failed", False, True)
    assert case.prints in found["log"]
    assert cell.reply is not None
    assert case.value in cell.reply["evalue"]
    _check_shown(cell, case)
    _check_evidence(cell, case, found["text"], found["pids"])
    if case.is_remote:
        _check_traceback(case, found["printed"])
    assert_as_before(shared)


OTHER_ENDS = {
    "a value that can't be pickled": ("notebook_launcher(lambda: threading.Lock(), (), 2)", "ResultError"),
    "a call that can't be pickled": (
        "lock = threading.Lock()\nnotebook_launcher(lambda: lock, (), 2, start_method='forkserver')",
        "PayloadError",
    ),
    "a port in use": (
        "with socket.create_server(('127.0.0.1', 0)) as taken:\n"
        "    notebook_launcher(add_up, (), 2, use_port=taken.getsockname()[1])",
        "LaunchError",
    ),
    "a value in the background": ("notebook_launcher(add_up, (), 2, background=True).result()", None),
}


@pytest.mark.parametrize("end", OTHER_ENDS)
def test_every_outcome_leaves_nothing_behind(shared: Kernel, end: str) -> None:
    source, error = OTHER_ENDS[end]
    shared.run(source, raises=error)
    assert_as_before(shared)


def _check_shown(cell: Cell, case: Case) -> None:
    if cell.error is None:  # IPython prints exception groups differently, without their own message
        assert case.raises == "ExceptionGroup"
        assert case.value in cell.stderr
        return
    assert source_line(cell).startswith(case.line), cell.describe()
    assert len(cell.error.lines) <= MAX_LINES, cell.describe()
    for text in case.shows:
        assert text in cell.error.text, cell.describe()
    assert "/nblaunch/" not in cell.error.text, cell.describe()


def _check_evidence(cell: Cell, case: Case, text: str, pids: dict[int, int]) -> None:
    """Check that the message or the notes name the rank, the place and the other ranks' outcome."""
    found = re.search(r"^rank (\d+) \(pid (\d+)\) on (\S+); complete log: (\S+)$", text, re.M)
    assert found is not None, text
    rank, pid, host, path = found.groups()
    assert case.rank is None or int(rank) == case.rank
    assert (int(pid), host) == (pids[int(rank)], socket.gethostname())
    assert path.endswith(f"rank_{rank}.log")
    assert Path(path).exists()
    others = [line for line in text.splitlines() if OTHERS.match(line)]
    assert len(others) == 1, text
    # On a busy machine, the launcher may stop a rank before it notices that its partner is gone.
    fates = dict(re.findall(r"ranks? ([\d, and]+): ([^;]+)", others[0]))
    assert sorted(rank for ranks in fates for rank in re.findall(r"\d+", ranks)) == ["0", "2"], text
    assert set(fates.values()) <= {"lost the connection to it", "stopped by the launcher"}, text
    if cell.error is not None:
        assert found[0] in cell.error.text
        assert others[0] in cell.error.text


def _check_traceback(case: Case, printed: str) -> None:
    """Check Python's own traceback: the worker's frames come once and last, without the launcher's frames."""
    statement = case.line or "raise ExceptionGroup('two things'"
    # It has the cell's source, even if the worker has never seen the cell.
    assert printed.count(statement) == 1, printed
    assert printed.index("notebook_launcher") < printed.rindex("in train"), printed
    assert "/nblaunch/" not in printed, printed

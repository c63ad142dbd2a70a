"""The exact display of failures in IPython and in a terminal, as golden files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.failures.cases import STUBBORN
from tests.golden_files import Golden
from tests.kernels import Cell, Kernel

# Code of rank 1, while the others wait for something that can't fail.
KINDS = {
    "an exception": 'raise ValueError("the loss is nan")',
    "an exception with its cause": """
try:
    {}["lr"]
except KeyError as missing:
    raise RuntimeError("no learning rate") from missing
""",
    "an exception that can't be made again": "raise Stubborn(7)",
    "a signal": 'print("it begins")\nos.kill(os.getpid(), signal.SIGKILL)',
    "an exit": 'print("it begins")\nos._exit(3)',
}
FUNCTION = (
    STUBBORN
    + """
def train():
    if os.environ["RANK"] == "1":
{body}
    time.sleep(3600)
"""
)
LAUNCH = "notebook_launcher(train, num_processes=3, interrupt_grace_s=0)"
HANG = """
def train():
    dist.init_process_group()
    if os.environ["RANK"] == "1":
        time.sleep(3600)
    dist.barrier()
notebook_launcher(train, num_processes=3, hang_timeout_s=1, on_hang="stop", interrupt_grace_s=0)
"""


def function(kind: str) -> str:
    return FUNCTION.format(body=textwrap.indent(KINDS[kind].strip("\n"), " " * 8))


def test_failures_in_ipython(shared: Kernel, golden: Golden) -> None:
    cells = {kind: shared.submit(function(kind) + LAUNCH).wait() for kind in KINDS}
    cells["a hang"] = shared.submit(HANG).wait()
    golden.check("failures_in_ipython.txt", {kind: error_of(cell) for kind, cell in cells.items()})


def error_of(cell: Cell) -> str:
    return cell.raised.text


def test_failures_in_a_terminal(golden: Golden, tmp_path: Path) -> None:
    shown = {}
    for kind in ("an exception with its cause", "a signal"):
        (tmp_path / "train.py").write_text("import os, signal, sys, time\n" + function(kind) + "train()\n")
        ended = launched(tmp_path, "--num_processes", "3")
        _, _, below_table = ended.stderr.partition("logs: ")
        shown[f"{kind}, standard error, exit code {ended.returncode}"] = below_table.partition("\n")[2]
        shown[f"{kind}, standard output"] = ended.stdout
    golden.check("failures_in_terminal.txt", shown)


SCRIPT = """
import os
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}") if os.environ["RANK"] == "1" else None
"""


def test_a_script_that_ends_well_in_a_terminal(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plan = launched(tmp_path, "--num_processes", "2", "--print_plan")
    ended = launched(tmp_path, "--num_processes", "2")
    # Memory is read at intervals, perhaps never in so short a job; a slow job has lines of progress.
    volatile = r"^train\.py: running for.*\n|^peak memory: .*\n"
    table = re.sub(volatile, "", ended.stderr, flags=re.MULTILINE)
    golden.check(
        "script_in_terminal.txt",
        {"its plan": plan.stdout, "standard output": ended.stdout, "standard error": table},
    )


def launched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the folder's script with ``nblaunch launch``, without this user's settings."""
    own = {"NBLAUNCH_LOG_DIR": str(folder / "logs"), "NBLAUNCH_CONFIG_FILE": str(folder / "config.yaml")}
    return subprocess.run(
        [sys.executable, "-m", "nblaunch", "launch", "--cpu", *words, "train.py"],
        capture_output=True, text=True, timeout=300, cwd=folder, env=os.environ | own,
    )  # fmt: skip

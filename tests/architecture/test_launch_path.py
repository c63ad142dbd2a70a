"""The path from ``notebook_launcher`` to the user's function is short, and CONTRIBUTING describes it correctly."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_MODULES = 6

# A forked worker's stack begins with the kernel's frames, so it shows the whole path.
PROGRAM = """
import pathlib, sys, traceback
import nblaunch

def files():
    return [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())][::-1]

folder = pathlib.Path(nblaunch.__file__).parent
called = nblaunch.notebook_launcher(files, num_processes=2, dashboard="none")
print(*(pathlib.Path(file).relative_to(folder) for file in called if file.startswith(f"{folder}/")))
"""


def test_a_launch_goes_through_the_modules_that_contributing_names() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    way = [name for name, _ in groupby(ran.stdout.split())]
    assert way[0] == "notebook.py"
    assert way[-1] == "worker/bootstrap.py"
    assert len(way) == len(set(way)) <= MAX_MODULES, "a module is passed once"
    sentence = re.search(
        r"A launch on one machine goes through (.*?);", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    assert sentence is not None
    # The frames of the plan have returned before a worker starts.
    assert [name for name in re.findall(r"`(.*?)`", sentence[1]) if name != "launcher/plan.py"] == way

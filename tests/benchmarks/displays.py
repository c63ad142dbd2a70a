"""Whether displays of forked processes arrive whole: four processes of a data loader and their rank, at the same time.

    python -m tests.benchmarks.displays [--rounds 50]

Each display has 100 kB, far more than the system writes to a pipe in one piece. In every round, each rank also leaves a
daemon behind, which must have ended soon after the job.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import psutil

from tests.benchmarks.bench import Row, count, kernel, show
from tests.kernels import Kernel

_ITEMS = 12
_RANKS = 2
_LIMIT_S = 10.0

_PREPARE = f"""
import os, subprocess
from IPython.display import HTML, display
from torch.utils.data import DataLoader, Dataset
from nblaunch import notebook_launcher

class Shown(Dataset):
    def __len__(self):
        return {_ITEMS}
    def __getitem__(self, i):
        show("item", i)
        return i

def show(kind, i):
    display(HTML(f"<i>{{os.environ['RANK']}} {{kind}} {{i}} " + "x" * 100_000 + "</i>"))

def train():
    subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True)
    for batch in DataLoader(Shown(), num_workers=4):
        show("batch", batch.item())
"""


def measure(rounds: int = 50) -> Iterator[Row]:
    with kernel(check=False) as started:
        started.run(_PREPARE)
        results = [_round(started) for _ in range(rounds)]
    yield count(
        "displays of forked processes: each once and whole", sum(whole for whole, _ in results), rounds
    )
    yield count("daemons of workers: none left", sum(ended for _, ended in results), rounds)


def _round(started: Kernel) -> tuple[bool, bool]:
    cell = started.submit(f"notebook_launcher(train, num_processes={_RANKS})").wait()
    expected = Counter(
        f"<i>{rank} {kind} {i} {'x' * 100_000}</i>"
        for rank in range(_RANKS)
        for kind in ("item", "batch")
        for i in range(_ITEMS)
    )
    html = [display.data.get("text/html", "") for display in cell.displays]
    is_whole = cell.error is None and Counter(text for text in html if text.startswith("<i>")) == expected
    _, left = psutil.wait_procs(started.processes(), _LIMIT_S)
    for process in left:
        process.kill()
    return is_whole, not left


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    sys.exit(0 if show("Displays", measure(**vars(parser.parse_args()))) else 1)

"""The cost of `nblaunch launch`: it and `torchrun` run the same script in turn, from the call to the exit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.bench import ROOT, Pairs, Row, alternate, at_most

SIZES = (2, 4)
NUM_PAIRS = 7
MAX_RATIO = 1.1

SCRIPTS = {
    "process group and all_reduce": """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
""",
    "import torch": "import torch\n",
    "no torch at all": "",
}


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for what, text in SCRIPTS.items():
            script = Path(folder) / "script.py"
            script.write_text(text)
            for size in SIZES:
                pairs = _in_turn(str(script), size, folder)
                value = f"{pairs.ratio:.2f} ({pairs.a_s:.2f} s / {pairs.b_s:.2f} s)"
                holds = pairs.ratio <= MAX_RATIO
                yield Row(
                    f"script, {size} processes, {what}: times torchrun", value, f"<= {MAX_RATIO}", holds
                )
    yield at_most("nblaunch launch --help", _least_ms("launch", "--help"), 150, " ms", 0)


def _in_turn(script: str, size: int, folder: str) -> Pairs:
    ours = [sys.executable, "-m", "nblaunch", "launch", "--cpu", "--num_processes", str(size), script]
    theirs = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(size),
        script,
    ]
    # Both give each process the same number of threads.
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NBLAUNCH_LOG_DIR": folder,
        "NBLAUNCH_CONFIG_FILE": f"{folder}/none",
    }
    return alternate(lambda: _run(ours, env), lambda: _run(theirs, env), NUM_PAIRS)


def _run(command: Sequence[str], env: dict[str, str]) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=env)


def _least_ms(*words: str, repeats: int = 9) -> float:
    """Return the shortest time of a command, including the start of the interpreter."""
    command = [sys.executable, "-m", "nblaunch", *words]
    pairs = [alternate(lambda: _run(command, dict(os.environ)), lambda: None, 1) for _ in range(repeats)]
    return min(pair.a_s for pair in pairs) * 1e3

"""Every benchmark, as one table: ``python -m tests.benchmarks``. Names of single ones may follow."""

from __future__ import annotations

import importlib
import sys

from tests.benchmarks.bench import show

TITLES = {
    "launch_cost": "Launch cost",
    "script_launch": "Launching scripts",
    "memory": "Memory",
    "fsdp_memory": "Memory of sharded models",
    "output": "Output",
    "progress": "Progress",
    "dashboards": "Dashboards",
    "many_ranks": "Many ranks",
    "repeat": "A hundred launches",
    "faults": "A hundred launches with faults",
    "step_overhead": "Step overhead",
    "gpu": "GPUs",
    "gpu_launches": "Launches from a kernel that has used its GPU",
    "lotteries": "Lotteries",
    "checkpoints": "Checkpoints under faults",
    "background": "Background jobs",
    "hangs": "Hangs",
    "questions": "Questions",
    "displays": "Displays",
    "sessions": "Sessions",
    "debugging": "Debugger",
    "detached": "Detached jobs",
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in TITLES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(TITLES)}", file=sys.stderr)
        return 2
    is_good = True
    for name in names or TITLES:
        module = importlib.import_module(f"tests.benchmarks.{name}")
        is_good = show(TITLES[name], module.measure()) and is_good
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

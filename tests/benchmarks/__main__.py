"""Run all benchmarks and print one table: ``python -m tests.benchmarks``.

    python -m tests.benchmarks launch_cost memory                   # some of them
    python -m tests.benchmarks lotteries --errors 10 --peers 0      # parameters of its ``measure``

The exit status is 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from tests.benchmarks.bench import show

TITLES = {
    "launch_cost": "Launch cost",
    "first_steps": "From the call to the first steps",
    "script_launch": "Launching scripts",
    "nodes_launch": "Launches on several nodes",
    "memory": "Memory",
    "fsdp_memory": "Memory of sharded models",
    "output": "Output",
    "progress": "Progress",
    "dashboards": "Dashboards",
    "many_ranks": "Many ranks",
    "many_nodes": "Many nodes",
    "repeat": "A hundred launches",
    "faults": "A hundred launches with faults",
    "step_overhead": "Step overhead",
    "mismatches": "Mismatched collectives",
    "record_cost": "Cost of checks and recording",
    "slow_steps": "Causes of slow steps",
    "step_cost": "Cost of a step on the host",
    "gpu": "GPUs",
    "gpu_launches": "Launches from a kernel that has used its GPU",
    "lotteries": "Lotteries",
    "checkpoints": "Checkpoints under faults",
    "training": "Training loops drawn at random",
    "sessions": "Sessions",
    "debugging": "Debugger",
    "detached": "Detached jobs",
}


def main(words: Sequence[str]) -> int:
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    unknown = [name for name in names if name not in TITLES]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(TITLES)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _exit)
    is_good = True
    for name in names or TITLES:
        measure = importlib.import_module(f"tests.benchmarks.{name}").measure
        options = _options(f"tests.benchmarks {name}", measure, words[len(names) :])
        is_good = show(TITLES[name], measure(**options)) and is_good
    return 0 if is_good else 1


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Exit like a program that ends its kernels; a second signal does not interrupt that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _options(program: str, measure: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Return values for the parameters of ``measure`` from options such as ``--rounds 50``."""
    parser = argparse.ArgumentParser(program)
    for name, parameter in inspect.signature(measure).parameters.items():
        if parameter.default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(parameter.default), default=parameter.default)
    return vars(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

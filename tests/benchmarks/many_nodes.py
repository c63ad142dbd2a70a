"""The cost of 64 nodes with 8 ranks each for the launching process, and the time until 512 failures become an error in
the cell.

    python -m tests.benchmarks many_nodes [--num_nodes 64] [--ranks_per_node 8] [--seconds 20]

The ranks are simulated (``tests/engines/simulated_nodes.py``): they take 20 steps and print a line per second, and
after some time all raise within one second. Launcher, messages and widgets are real.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import bench
from tests.benchmarks.bench import Row, at_most
from tests.engines.simulated_nodes import Play, Played, engine

MAX_MESSAGES_S, MAX_MB_S, MAX_PERCENT, MAX_ERROR_S = 130, 1, 25, 3
_SETTLED_S = 4.0


def measure(num_nodes: int = 64, ranks_per_node: int = 8, seconds: float = 20.0) -> Iterator[Row]:
    for dashboard in ("widgets", "none"):
        with bench.kernel("import torch") as started:
            found = bench.call(started, in_kernel_job, num_nodes, ranks_per_node, seconds, dashboard)
        what = f"{num_nodes} nodes with {ranks_per_node} ranks, dashboard {dashboard!r}"
        yield at_most(f"{what}: messages a second", found["messages_s"], MAX_MESSAGES_S, digits=0)
        yield at_most(f"{what}: MB a second", found["mb_s"], MAX_MB_S)
        yield at_most(f"{what}: share of a core", found["percent"], MAX_PERCENT, "%", 1)
        failures = f"{num_nodes * ranks_per_node} failures within {found['failures_s']:.2f} s"
        yield at_most(f"{what}: {failures}, from the first to the error", found["error_s"], MAX_ERROR_S, " s")


def in_kernel_job(num_nodes: int, ranks_per_node: int, seconds: float, dashboard: Any) -> dict[str, float]:
    from nblaunch import notebook_launcher
    from nblaunch.engines import runner

    with tempfile.TemporaryDirectory(prefix="nblaunch-bench-") as folder:
        path = Path(folder, "played.json")
        runner.find = engine(Play(num_nodes, ranks_per_node, seconds, str(path)))  # type: ignore[assignment]
        spent: list[tuple[float, float]] = []
        timers = [
            threading.Timer(at_s, lambda: spent.append((time.monotonic(), time.process_time())))
            for at_s in (_SETTLED_S, seconds - 1.0)
        ]
        for timer in timers:
            timer.start()
        error_s = 0.0
        try:
            notebook_launcher(
                time.sleep,
                (1.0,),
                engine="processes",
                num_nodes=num_nodes,
                num_processes=num_nodes * ranks_per_node,
                dashboard=dashboard,
            )
        except ValueError:
            error_s = time.time()
        played = Played(**json.loads(path.read_text()))
    (from_s, spent_s), (to_s, all_spent_s) = spent
    return {
        "messages_s": played.messages / seconds,
        "mb_s": played.num_bytes / 1e6 / seconds,
        "percent": 100 * (all_spent_s - spent_s) / (to_s - from_s),
        "failures_s": played.last_s - played.first_s,
        "error_s": error_s - played.first_s,
    }

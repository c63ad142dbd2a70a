"""Cold and warm launches on two nodes with two ranks each, compared with plain Ray actors and Ray's TorchTrainer.

    python -m tests.benchmarks nodes_launch [--rounds 10]

A Ray cluster of two nodes runs on this machine, without its dashboard. In each round, every launcher starts four ranks
that form a gloo group and reduce a tensor; it returns when their values have arrived and it has asked its processes to
end. The next launcher starts when the machine is idle again, at most 10 s later. The first round does not count.
nblaunch connects to the cluster in each launch. So do plain actors, in a new kernel that has imported torch; once more,
both peers launch from a process that is connected already. Warm launches use ``Nodes``, which the first round starts.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil

from tests.benchmarks import bench
from tests.benchmarks.bench import Row, at_most
from tests.benchmarks.reducing import join_and_reduce
from tests.engines.ray_cluster import cluster

NUM_NODES, RANKS_PER_NODE = 2, 2
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
MAX_TIMES_RAW, MAX_TIMES_TRAINER, MAX_WARM_S = 0.9, 0.25, 1
MAX_WAIT_S, IDLE_PERCENT = 10.0, 10.0
_CONNECTED = "import torch; from tests.benchmarks import nodes_launch; nodes_launch.connect()"


def measure(rounds: int = 10) -> Iterator[Row]:
    with cluster() as started, ExitStack() as kernels:
        environment = {"RAY_ADDRESS": started.address}
        ours = kernels.enter_context(bench.kernel("import torch", environment))
        peers = kernels.enter_context(bench.kernel(_CONNECTED, environment))
        launchers: dict[str, Callable[[], float]] = {
            'engine="ray"': lambda: bench.call(ours, in_kernel_launch, "ray"),
            'engine="processes"': lambda: bench.call(ours, in_kernel_launch, "processes"),
            'Nodes(engine="processes")': lambda: bench.call(ours, in_kernel_warm_launch, "processes"),
            'Nodes(engine="ray")': lambda: bench.call(ours, in_kernel_warm_launch, "ray"),
            "Ray actors": lambda: _in_new_kernel(environment, in_kernel_connected_actors),
            "Ray actors, connected before": lambda: bench.call(peers, in_kernel_actors),
            "TorchTrainer, connected before": lambda: bench.call(peers, in_kernel_trainer),
        }
        times: dict[str, list[float]] = {name: [] for name in launchers}
        for number in range(rounds + 1):
            for name, launch in launchers.items():
                _wait_until_idle()
                seconds = launch()
                print(f"round {number}, {name}: {seconds:.2f} s", file=sys.stderr)
                if number:
                    times[name].append(seconds)
    for name, seconds_of in times.items():
        all_of = ", ".join(f"{seconds:.2f}" for seconds in seconds_of)
        yield Row(f"{name}: median of {rounds}", f"{statistics.median(seconds_of):.2f} s ({all_of})")
    median = {name: statistics.median(seconds_of) for name, seconds_of in times.items()}
    for engine in ("processes", "ray"):
        name = f'Nodes(engine="{engine}")'
        yield at_most(f"{name}: a warm launch", median[name], MAX_WARM_S, " s")
    ours_s = median['engine="ray"']
    yield at_most('engine="ray": times Ray actors', ours_s / median["Ray actors"], MAX_TIMES_RAW)
    yield Row(
        'engine="ray": times Ray actors that were connected before',
        f"{ours_s / median['Ray actors, connected before']:.2f}",
    )
    yield at_most(
        'engine="ray": times TorchTrainer',
        ours_s / median["TorchTrainer, connected before"],
        MAX_TIMES_TRAINER,
    )


def _wait_until_idle() -> None:
    """Wait for the processes of the last launcher, which still use the processor while they end."""
    deadline = time.monotonic() + MAX_WAIT_S
    psutil.cpu_percent()
    while psutil.cpu_percent(0.5) > IDLE_PERCENT and time.monotonic() < deadline:
        continue


def _in_new_kernel(environment: dict[str, str], function: Callable[[], float]) -> float:
    with bench.kernel("import torch", environment) as kernel:
        return float(bench.call(kernel, function))


def in_kernel_warm_launch(engine: str) -> float:
    from nblaunch import Nodes

    if engine not in _nodes:
        _nodes[engine] = Nodes(NUM_NODES, engine=engine)  # type: ignore[arg-type]
    return in_kernel_launch(_nodes[engine])


_nodes: dict[str, Any] = {}
"""Engine -> its nodes, in a kernel."""


def in_kernel_launch(engine: Any) -> float:
    from nblaunch import notebook_launcher

    began_s = time.perf_counter()
    values = notebook_launcher(
        join_and_reduce,
        engine=engine,
        num_nodes=NUM_NODES,
        num_processes=NUM_RANKS,
        return_all=True,
        dashboard="none",
    )
    seconds = time.perf_counter() - began_s
    assert values == [NUM_RANKS] * NUM_RANKS, values
    return seconds


def connect() -> None:
    """Connect this process to the cluster. Kernels run this, too."""
    import ray

    ray.init(os.environ["RAY_ADDRESS"], logging_level=logging.ERROR, log_to_driver=False)


def in_kernel_connected_actors() -> float:
    began_s = time.perf_counter()
    connect()
    return time.perf_counter() - began_s + in_kernel_actors()


def in_kernel_actors() -> float:
    """Launch with handwritten Ray code: a placement group, an actor per rank, and a process group."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Rank:
        def place(self) -> tuple[str, int]:
            import socket

            with socket.create_server(("", 0)) as listener:
                return ray.util.get_node_ip_address(), listener.getsockname()[1]

        def run(self, variables: dict[str, str]) -> float:
            os.environ.update(variables)
            return join_and_reduce()

    began_s = time.perf_counter()
    group = placement_group([{"CPU": RANKS_PER_NODE}] * NUM_NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    made: Any = ray.remote(Rank)
    ranks = [
        made.options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank // RANKS_PER_NODE
            ),
        ).remote()
        for rank in range(NUM_RANKS)
    ]
    address, port = ray.get(ranks[0].place.remote())
    common = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
    values = ray.get([one.run.remote({**common, "RANK": str(rank)}) for rank, one in enumerate(ranks)])
    for one in ranks:
        ray.kill(one)
    remove_placement_group(group)
    seconds = time.perf_counter() - began_s
    assert values == [NUM_RANKS] * NUM_RANKS, values
    return seconds


def in_kernel_trainer() -> float:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop() -> None:
        assert join_and_reduce() == NUM_RANKS

    with tempfile.TemporaryDirectory(prefix="nblaunch-bench-") as folder:
        began_s = time.perf_counter()
        TorchTrainer(
            loop,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=NUM_RANKS, placement_strategy="SPREAD"),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        return time.perf_counter() - began_s

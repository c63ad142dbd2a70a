"""A Ray cluster of two nodes on this machine, in a separate process: ``python -m tests.engines.ray_cluster``.

with cluster() as started: ... started.address
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

CORES = 4
_STORE_BYTES = 150 << 20
_NUM_STARTS = 3


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Args:
        address: its address.
        process: the process that has started it.
    """

    address: str
    process: subprocess.Popen[str]

    def raylet(self) -> int:
        """Return the process of the raylet that is not the head's."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        (raylet,) = [process.pid for process in processes if _is_raylet_of_a_node(process)]
        return raylet

    def add_node(self) -> None:
        """Add a node, after another one was killed."""
        assert self.process.stdin is not None, "it is a pipe"
        assert self.process.stdout is not None, "it is a pipe"
        self.process.stdin.write("node\n")
        self.process.stdin.flush()
        while self.process.stdout.readline() not in ("ADDED\n", ""):
            pass


def _is_raylet_of_a_node(process: psutil.Process) -> bool:
    try:
        return (
            process.name() == "raylet"
            and process.status() != psutil.STATUS_ZOMBIE
            and "--head" not in process.cmdline()
        )
    except psutil.NoSuchProcess:  # Ray's short-lived helpers end while this looks at them
        return False


@contextmanager
def cluster() -> Iterator[RayCluster]:
    """Run a cluster while the block runs.

    Raises:
        RuntimeError: it does not start. Ray gives each raylet 30 s, which are sometimes too few on a busy machine.
    """
    for _ in range(_NUM_STARTS):
        with _process() as process:
            assert process.stdout is not None, "it is a pipe"
            lines = iter(process.stdout.readline, "")
            if address := next((line.split()[1] for line in lines if line.startswith("ADDRESS ")), ""):
                yield RayCluster(address, process)
                return
    raise RuntimeError(f"Ray did not start in {_NUM_STARTS} attempts")


@contextmanager
def _process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.ray_cluster"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            process.wait(180)


def main() -> None:
    """Run a cluster until standard input ends; each line of it adds a node."""
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": CORES, "object_store_memory": _STORE_BYTES}
    # By default, Ray's workers have a lower priority than all other programs.
    head = {**settings, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(**settings)
    print("ADDRESS", made.address, flush=True)
    for _ in sys.stdin:
        made.add_node(**settings)
        print("ADDED", flush=True)
    made.shutdown()


if __name__ == "__main__":
    main()

"""A Ray cluster of two nodes on this machine, in a separate process: ``python -m tests.engines.ray_cluster``.

with cluster() as address: ...
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CORES = 4
_STORE_BYTES = 150 << 20


@contextmanager
def cluster() -> Iterator[str]:
    """Run a cluster while the block runs; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.ray_cluster"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        lines = iter(process.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("ADDRESS "))
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    """Run a cluster until standard input ends."""
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": CORES, "object_store_memory": _STORE_BYTES}
    # By default, Ray's workers have a lower priority than all other programs.
    head = {**settings, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(**settings)
    print("ADDRESS", made.address, flush=True)
    sys.stdin.read()
    made.shutdown()


if __name__ == "__main__":
    main()

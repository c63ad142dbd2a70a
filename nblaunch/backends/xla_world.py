"""The world that torch_xla itself sees in a worker, for functions that use it without nblaunch's Accelerator.

torch_xla knows the other processes only once it was initialised as its own launcher does it. Otherwise each worker is a
world of one process: ``xr.world_size()`` is 1, and ``xm.optimizer_step`` reduces nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nblaunch.backends import xla_runtime
from nblaunch.topology import Topology

# What torch_xla's Python code asks its extension for when it needs a device, or the world, for the first time.
_ENTRIES = (
    "_xla_get_default_device",
    "_xla_get_default_device_ordinal",
    "_xla_get_devices",
    "_xla_get_all_devices",
    "_xla_get_replication_devices_count",
    "_xla_get_num_processes",
    "_xla_get_process_index",
    "_xla_num_devices",
)


def join_at_first_use(topology: Topology) -> None:
    """Have this worker join the others as torch_xla's launcher does, when torch_xla first needs a device or the world.

    Not before: the runtime waits for all workers there, and some functions never use it.
    """
    extension = xla_runtime.package()._XLAC
    originals = {name: getattr(extension, name) for name in _ENTRIES}

    def entry(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(*arguments: Any) -> Any:
            for name, one in originals.items():
                setattr(extension, name, one)
            launcher = xla_runtime.part("_internal.pjrt")
            launcher.initialize_multiprocess(topology.local_rank, topology.local_world_size)
            return original(*arguments)

        return enter

    for name, original in originals.items():
        setattr(extension, name, entry(original))

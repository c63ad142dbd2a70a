"""The world that torch_xla itself sees in a worker, for functions that use it without nblaunch's Accelerator.

torch_xla knows the other processes only once it was initialised as its own launcher does it. Otherwise each worker is a
world of one process: ``xr.world_size()`` is 1, and ``xm.optimizer_step`` reduces nothing. On the CPU it always is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nblaunch import packages
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

# Of its module xla_model. A process group of torch_xla calls them, too, and so do other frameworks.
_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_master_param",
    "collective_broadcast",
    "collective_permute",
    "mesh_reduce",
    "reduce_gradients",
    "reduce_scatter",
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


def refuse_spawn(topology: Topology) -> None:
    """Have torch_xla start no processes in this worker, each of which would be another world, or take others' chips."""

    def spawn(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(
            f"xmp.spawn was called in a worker (rank {topology.rank} of {topology.world_size}), where nblaunch has "
            "started one process per device. Call the function itself, or torch_xla.launch, which does so here"
        )

    packages.when_imported("torch_xla._internal.pjrt", lambda launcher: setattr(launcher, "spawn", spawn))


def watch_collectives(report: Callable[[str], None]) -> None:
    """Call ``report(name)`` when the function uses a collective of torch_xla, for the first time."""

    def watch(model: Any) -> None:
        originals = {name: getattr(model, name) for name in _COLLECTIVES}

        def watched(name: str) -> Callable[..., Any]:
            @functools.wraps(originals[name])
            def collective(*arguments: Any, **options: Any) -> Any:
                for one, original in originals.items():
                    setattr(model, one, original)
                report(name)
                return originals[name](*arguments, **options)

            return collective

        for name in originals:
            setattr(model, name, watched(name))

    packages.when_imported("torch_xla.core.xla_model", watch)


def has_exchanged_copies() -> bool:
    """Return whether a collective of torch.distributed ran on copies of XLA tensors, which it then leaves as they are.

    Torch has no kernel of it for them, and copies the arguments to the host, but not back.
    """
    return any(name.startswith("c10d::") for name in xla_runtime.part("debug.metrics").counter_names())

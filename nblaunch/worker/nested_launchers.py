"""Launchers of other libraries that the function calls, although every rank already has its process.

    Trainer(strategy="ddp_notebook").fit(model)     on each of N ranks: N processes, which all join as this rank

Such processes share the ranks' address and numbers. They disturb each other, and their errors are about connections.
"""

from __future__ import annotations

from typing import Any

from nblaunch import packages
from nblaunch.topology import Topology

_LIGHTNING = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
_LAUNCHER = "{}.strategies.launchers.multiprocessing"
_ENDED = ("ProcessRaisedException", "ProcessExitedException")


def reject(topology: Topology) -> None:
    """Have Lightning's launchers of several processes raise an error in this worker, if the job has several ranks."""
    if topology.world_size == 1:
        return

    def raise_error(launcher: Any) -> None:
        raise RuntimeError(
            f"this strategy starts processes of its own, but rank {topology.rank} is already one of the "
            f"{topology.world_size} processes that nblaunch has started. Use strategy='ddp', with "
            f"devices={topology.local_world_size}, instead of 'ddp_notebook', 'ddp_fork' or 'ddp_spawn'"
        )

    def watch(module: Any) -> None:
        packages.call_before(module._MultiProcessingLauncher, "launch", raise_error)

    for package in _LIGHTNING:
        packages.observe_when_imported(_LAUNCHER.format(package), watch)


def explain(error: BaseException) -> tuple[str, ...]:
    """Return a sentence about the function's own processes, if one of them has failed."""
    kind = type(error)
    if kind.__name__ not in _ENDED or not kind.__module__.startswith("torch.multiprocessing"):
        return ()
    return (
        "the function started this process itself, with torch.multiprocessing. If it was meant to be a rank, call its "
        "function directly: nblaunch has already started one process per rank",
    )

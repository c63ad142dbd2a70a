"""Pipes to processes that the kernel has started, such as environments for reinforcement learning.

    kernel ──request──> process      A fork copies the kernel's end. All ranks then write into one stream, and each
           <──reply────              reply reaches any one of them, in parts if two ranks read at once.

Each rank reports the first pipe of this kind that it reads from. The launcher warns if all ranks read from the same
one. Pipes in one direction are left out: queues use them, with a lock, and several readers are their purpose.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from nblaunch import context, env, packages
from nblaunch.user_code import innermost_user_frame
from nblaunch.worker.inheritance.positions import Identity

CHECK = "shared_pipe"
"""Name of this check in ``NBLAUNCH_CHECKS``."""

_NOT_OURS = "can only"
"""Beginning of the assertions of ``multiprocessing.Process`` in a process that has not started it."""


def watch(channels: Collection[Identity]) -> None:
    """Report reads from the kernel's pipes.

    Args:
        channels: the kernel's open channels other than files.
    """
    module: Any = sys.modules.get("multiprocessing.connection")
    if module is None or env.is_check_off(CHECK):
        return  # without the module, the kernel has no such pipe
    reported: list[Identity] = []

    def report(connection: Any) -> None:
        if reported or not (connection.readable and connection.writable):
            return
        status = os.fstat(connection.fileno())
        if (status.st_dev, status.st_ino) in channels:
            reported.append((status.st_dev, status.st_ino))
            _report(reported[0])

    packages.call_before(module.Connection, "_recv_bytes", report)


def _report(pipe: Identity) -> None:
    context.current().observe(
        CHECK,
        "all ranks read from one pipe to a process that a cell has started, so a rank may get the reply to another "
        "rank's request",
        "Create the object that owns the process inside the function, such as a SubprocVecEnv or ParallelEnv, so that "
        "each rank has its own",
        innermost_user_frame(),
        value=pipe,
        judged_by="distinct",
    )


def explain(error: BaseException) -> tuple[str, ...]:
    """Return a sentence that explains why a rank can't use a process that the kernel has started."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    is_process = (
        traceback is not None and traceback.tb_frame.f_globals.get("__name__") == "multiprocessing.process"
    )
    if not (is_process and isinstance(error, AssertionError) and str(error).startswith(_NOT_OURS)):
        return ()
    return (
        "a cell started this process, and only the kernel can wait for it. Create the object that owns it inside the "
        "function",
    )

"""A worker's input, under every start method: a call, and the worker's assignment as one plain value.

The launcher also sends the source code of cells to a fresh interpreter; a forked worker already has them.
"""

from __future__ import annotations

import linecache
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nblaunch.host import descriptors
from nblaunch.topology import Topology
from nblaunch.wire.argument_paths import ArgPath

FunctionCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""The user's function and its positional arguments."""

_HAS_REAL_TIME_SIGNALS = hasattr(signal, "SIGRTMIN")
STACKS_SIGNAL = signal.SIGRTMIN + 7 if _HAS_REAL_TIME_SIGNALS else signal.SIGUSR2
"""Asks a worker for its Python stack. It is a real-time signal, because frameworks use SIGUSR1 and SIGUSR2."""

NATIVE_STACKS_SIGNAL = STACKS_SIGNAL + 1 if _HAS_REAL_TIME_SIGNALS else signal.SIGUSR1
"""Asks again if a worker that is blocked in native code has not answered. The frames may then be read at any moment."""

NUM_THREADS = "threads of Python: "
"""Prefix of the line that follows a stack written by the worker itself."""


@dataclass(frozen=True)
class Assignment:
    """The task of one worker. Descriptors are numbers that are valid in the worker.

    Args:
        topology: its ranks and sizes.
        backend: name of the device family.
        environment: all variables to set (None removes one).
        accelerator_defaults: settings for an ``Accelerator`` in the function.
        attempt: number of the attempt in this launcher, from 0; restarts of nodes are in ``environment``.
        board_fd: memory file with the progress board.
        event_fd: write end of its event pipe.
        outbox_fd: empty memory file for its return value and trained states; -1 if none are wanted.
        command_fd: socket for commands from the kernel, for a session or the debugger; -1 if the kernel sends none.
        log_path: file for its output.
        stacks_path: file for the stacks that faulthandler writes, after a crash or on request.
        num_threads: CPU threads for its operations.
        post_mortem: whether to keep the worker for a debugger after its function has failed.
        has_breakpoints: whether ``breakpoint()`` opens pdb in this worker; the user types into the kernel.
        is_script: whether the function is a script; rank 0 then reads the launcher's standard input.
        is_spmd: whether this worker drives all devices on its machine, rather than one.
        returns_value: whether the kernel wants this worker's return value.
        is_main: whether it sends data that all ranks share, such as the weights of a model that each rank holds.
        wanted_modules: argument paths (the same on every rank) of the modules whose weights the kernel wants. Once the
            function has returned, ``worker/delivery.py`` decides which ranks send them.
        wanted_optimizers: argument paths (the same on every rank) of the optimizers and schedulers whose states the
            kernel wants.
        restricts_threads: whether to run CPU operations on one thread, because the OpenMP pools could not be paused
            before the fork.
        key: the job's key, for objects that its ranks exchange (``wire/signing.py``); b"" if the machines do not share
            one.
        parent_pid: the process that starts it; the worker ends if that process is gone.
        registered_backend: the pickled backend, for a fresh interpreter that can't find it by name.
        descendant_tag: tag that marks its descendants (``host/descendants.py``).
    """

    topology: Topology
    backend: str
    environment: Mapping[str, str | None]
    accelerator_defaults: Mapping[str, Any]
    attempt: int
    board_fd: int
    event_fd: int
    outbox_fd: int
    log_path: str
    stacks_path: str
    num_threads: int
    command_fd: int = -1
    post_mortem: bool = False
    has_breakpoints: bool = False
    is_script: bool = False
    is_spmd: bool = False
    returns_value: bool = True
    is_main: bool = True
    wanted_modules: tuple[ArgPath, ...] = ()
    wanted_optimizers: tuple[ArgPath, ...] = ()
    restricts_threads: bool = False
    key: bytes = field(default=b"", repr=False)
    parent_pid: int = 0
    registered_backend: bytes = field(default=b"", repr=False)
    descendant_tag: int = 0

    @property
    def rank(self) -> int:
        """The rank of the worker."""
        return self.topology.rank

    @property
    def reads_input(self) -> bool:
        """Whether the worker has the launcher's standard input."""
        return self.is_script and self.rank == 0

    @property
    def own_fds(self) -> tuple[int, ...]:
        """The descriptors that no other worker needs."""
        fds = (self.event_fd, self.outbox_fd, self.command_fd)
        return tuple(fd for fd in fds if fd >= 0)

    def with_high_descriptors(self) -> Assignment:
        """Copy the worker's descriptors to high numbers, because the function may close all low ones."""
        fds = (self.board_fd, self.event_fd, self.outbox_fd, self.command_fd)
        if descriptors.is_high(min([fd for fd in fds if fd >= 0], default=0)):
            return self
        return replace(
            self,
            board_fd=descriptors.high_copy(self.board_fd),
            event_fd=descriptors.high_copy(self.event_fd),
            outbox_fd=descriptors.high_copy(self.outbox_fd),
            command_fd=descriptors.high_copy(self.command_fd),
        )


def capture_sources() -> dict[str, str]:
    """Return the text of the cells that this process has run, by file name, because their files do not exist."""
    return {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }


def restore_sources(sources: Mapping[str, str]) -> None:
    """Let tracebacks show lines of files that do not exist; ``sources`` maps their names to their text."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)

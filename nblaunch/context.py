"""The context of this process: its topology, backend, slot of the board, and connection to the launcher.

``worker/bootstrap.py`` installs a context before it calls the user's function, as ``start_methods/inline.py`` does. In
other processes (``torchrun``, plain ``python``, a notebook cell), :func:`current` makes one from the environment.
Training code uses the launcher only through the context, so that the same script runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nblaunch import backends, env
from nblaunch.backends.base import Backend
from nblaunch.events import Event
from nblaunch.topology import Topology
from nblaunch.wire.board import Slot, private_slot
from nblaunch.wire.locks import WorkerLocks

if TYPE_CHECKING:  # a process without a launcher needs none
    from nblaunch.wire.worker_commands import CommandConnection


def _discard(event: Event) -> None:
    """Drop an event: there is no launcher."""


def _do_nothing() -> None:
    """Do nothing: there are no losses."""


@dataclass
class ProcessContext:
    """The context of a process: of a worker in its job, or of one without a launcher (``is_launched`` False).

    Args:
        topology: ranks and sizes.
        backend: device family.
        slot: of the progress board.
        emit: sends an event to the launcher; waits while the pipe is full.
        locks: between the workers of this machine.
        accelerator_defaults: defaults for arguments of ``Accelerator``, set by the launch, as
            ``{"mixed_precision": "bf16"}``.
        parent_pid: process that started this worker; 0 if there is none.
        attempt: number of the attempt in this launcher, from 0; on several nodes see ``TORCHELASTIC_RESTART_COUNT``.
        command_connection: on which the kernel sends commands; None where it sends none.
        debug_connection: on which the kernel asks the debugger in this process; None where there is none.
        key: authenticates objects from other ranks of the job (``wire/signing.py``); b"" if there is none.
        is_launched: the process runs the function of a launch, as a worker or inline; False if the context was made
            from the environment.
        num_commands: commands of a session that this process has begun.
        reports: what this process shows on the board (``nblaunch.progress.reports``), None before its first use; opaque
            here.
        training: the ``SharedState`` of ``nblaunch.training`` in this process, None before its first use; opaque here.
        was_reset: ``PartialState._reset_state()`` was called: what the user has of ``training`` does not make it anew.
        compares_shapes: collectives compare the shapes of their tensors over ranks; None: as launched.
        flush_losses: writes the last losses and the memory of the device to the board, which are held back because
            reading them waits for the device; set with ``reports``, called when the function has returned.
        forget_losses: begins the losses of the board anew, for another command of a session; set with ``reports``.
    """

    topology: Topology
    backend: Backend
    slot: Slot = field(default_factory=private_slot)
    emit: Callable[[Event], None] = _discard
    locks: WorkerLocks = field(default_factory=WorkerLocks)
    accelerator_defaults: Mapping[str, Any] = field(default_factory=dict)
    parent_pid: int = 0
    attempt: int = 0
    command_connection: CommandConnection | None = field(default=None, compare=False, repr=False)
    debug_connection: CommandConnection | None = field(default=None, compare=False, repr=False)
    key: bytes = field(default=b"", repr=False)
    is_launched: bool = False
    num_commands: int = 0
    reports: Any = field(default=None, compare=False, repr=False)
    training: Any = None
    was_reset: bool = False
    compares_shapes: bool | None = None
    flush_losses: Callable[[], None] = field(default=_do_nothing, compare=False, repr=False)
    forget_losses: Callable[[], None] = field(default=_do_nothing, compare=False, repr=False)


_current: ProcessContext | None = None


def current() -> ProcessContext:
    """Return the context of this process; made from the environment at the first call if none is installed."""
    global _current
    if _current is None:
        _current = ProcessContext(
            topology=Topology.from_env(env.snapshot()),
            backend=backends.choose("cpu" if env.read("ACCELERATE_USE_CPU") else "auto"),
        )
    return _current


def install(context: ProcessContext | None) -> None:
    """Set the context of this process; None removes it.

    Called by the worker's bootstrap and by the inline engine.
    """
    global _current
    _current = context


def take() -> ProcessContext | None:
    """Remove and return the context of this process; None if there was none."""
    global _current
    taken, _current = _current, None
    return taken


def exists() -> bool:
    """Return whether this process has a context. Creates none."""
    return _current is not None


def is_worker() -> bool:
    """Return whether this process runs the function of a launch, as a worker or inline. Creates no context."""
    return _current is not None and _current.is_launched

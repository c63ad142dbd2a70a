"""The context of this process: topology, backend, slot on the board, and connection to the launcher.

``worker/bootstrap.py`` and ``start_methods/inline.py`` install a context before they call the user's function. In
other processes (``torchrun``, plain ``python``, a notebook cell), :func:`current` creates one from the environment.
Training code uses the launcher only through the context, so that the same script runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from nblaunch import backends, env
from nblaunch.backends.base import Backend
from nblaunch.events import Event, Observation
from nblaunch.topology import Topology
from nblaunch.wire.board import Slot, private_slot
from nblaunch.wire.locks import WorkerLocks

if TYPE_CHECKING:  # a process without a launcher does not need these modules
    from nblaunch.wire.worker_commands import CommandConnection


def _drop(event: Event) -> None:
    """Drop an event, because no launcher receives it."""


def _do_nothing() -> None:
    """Do nothing, because the process has not recorded any losses."""


@dataclass
class ProcessContext:
    """The context of a worker, or of a process without a launcher (``is_launched`` False).

    Args:
        topology: ranks and sizes.
        backend: device family.
        slot: the slot of this process on the progress board.
        emit: sends an event to the launcher; blocks while the pipe is full.
        locks: locks that the workers on this machine share.
        accelerator_defaults: defaults for arguments of ``Accelerator``, set by the launch, such as
            ``{"mixed_precision": "bf16"}``.
        parent_pid: id of the process that started this worker; 0 = none.
        attempt: number of the attempt, counted from 0 by this launcher; in a job on several nodes, see
            ``TORCHELASTIC_RESTART_COUNT``.
        connection: receives the kernel's commands for a session or the debugger; None = no commands.
        key: key that authenticates objects from other ranks of the job (``wire/signing.py``); b"" = none.
        is_launched: whether the process is running a launch's function, as a worker or inline; False if the context
            comes from the environment.
        is_watched: whether another process reads the slot and the events; False if the context comes from the
            environment.
        num_commands: number of session commands that this process has started.
        num_collectives: returns how many collectives this process has called; None = unknown.
        reports: the reports that this process writes to the board (``progress/board_reports.py``); None before their
            first use. This module treats them as opaque.
        training: the ``SharedState`` of ``nblaunch.training`` in this process; None before its first use. This module
            treats it as opaque.
        was_reset: whether ``PartialState._reset_state()`` was called; the user's objects then don't recreate
            ``training``.
        compares_shapes: whether collectives compare shapes across ranks; None = use the launch's setting.
        flush_losses: writes the last losses and the device memory to the board. They are written late, because the
            process has to wait for the device to read them. Set with ``reports``, and called when the function has
            returned.
        forget_losses: clears the losses on the board for the next command of a session; set with ``reports``.

    Attributes:
        is_current: whether this is the context that :func:`current` returns.
    """

    topology: Topology
    backend: Backend
    slot: Slot = field(default_factory=private_slot)
    emit: Callable[[Event], None] = _drop
    locks: WorkerLocks = field(default_factory=WorkerLocks)
    accelerator_defaults: Mapping[str, Any] = field(default_factory=dict)
    parent_pid: int = 0
    attempt: int = 0
    connection: CommandConnection | None = field(default=None, compare=False, repr=False)
    key: bytes = field(default=b"", repr=False)
    is_launched: bool = False
    is_watched: bool = True
    num_commands: int = 0
    num_collectives: Callable[[], int] | None = field(default=None, compare=False, repr=False)
    reports: Any = field(default=None, compare=False, repr=False)
    training: Any = None
    was_reset: bool = False
    compares_shapes: bool | None = None
    flush_losses: Callable[[], None] = field(default=_do_nothing, compare=False, repr=False)
    forget_losses: Callable[[], None] = field(default=_do_nothing, compare=False, repr=False)
    is_current: bool = field(default=False, init=False, compare=False, repr=False)

    def observe(self, check: str, problem: str, advice: str, frame: FrameType | None, **more: Any) -> None:
        """Send a check's observation, with the line of the user's code that ``frame`` is running.

        A check that the user has turned off sends nothing.

        Args:
            check: name of the check.
            problem: as in :class:`Observation`.
            advice: as in :class:`Observation`.
            frame: the user's frame; None = unknown.
            **more: further arguments of :class:`Observation`.
        """
        if env.is_check_off(check):
            return
        place: dict[str, Any] = (
            {} if frame is None else {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno}
        )
        self.emit(
            Observation(self.topology.rank, check=check, problem=problem, advice=advice, **place, **more)
        )


_current: ProcessContext | None = None


def current() -> ProcessContext:
    """Return the context of this process. If none is installed, create it from the environment."""
    if _current is None:
        made = ProcessContext(
            topology=Topology.from_env(env.snapshot()),
            backend=backends.choose("cpu" if env.read("ACCELERATE_USE_CPU") else "auto"),
            is_watched=False,
        )
        install(made)
        return made
    return _current


def launched_fields(argument: str) -> Mapping[str, Any]:
    """Return what the launch sets in an argument of ``Accelerator`` that is a plugin: field -> value.

    Plugins that the function makes take from here what it does not pass to them. Outside a worker, this is empty; no
    context is created, because plugins may also be made in the kernel.
    """
    fields: Mapping[str, Any] = {} if _current is None else _current.accelerator_defaults.get(argument, {})
    return fields


def complete_from_launch(plugin: Any, argument: str) -> None:
    """Set the fields of a plugin that are None to what the launch sets in this argument of ``Accelerator``."""
    for name, value in launched_fields(argument).items():
        if getattr(plugin, name) is None:
            setattr(plugin, name, value)


def install(context: ProcessContext | None) -> None:
    """Set the context of this process; None removes it.

    The worker's bootstrap and the inline engine call this function.
    """
    global _current
    if _current is not None:
        _current.is_current = False
    if context is not None:
        context.is_current = True
    _current = context


def take() -> ProcessContext | None:
    """Remove and return the context of this process, or None."""
    taken = _current
    install(None)
    return taken


def exists() -> bool:
    """Return whether this process has a context; never create one."""
    return _current is not None


def is_worker() -> bool:
    """Return whether this process is running a launch's function; never create a context."""
    return _current is not None and _current.is_launched

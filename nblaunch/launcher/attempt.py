"""One attempt of a job: describes its workers and starts them.

    Attempt ── start_attempt ──> RunningAttempt: the workers, and this process's resources for them

Each worker gets its own assignment: event pipe, outbox, log files, environment.

If there are several machines, :class:`Peers` represents the other nodes; ``nodes/link.py`` and ``engines/uplink.py``
implement it.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from nblaunch import env
from nblaunch.diagnosis.memory import MemoryRecord
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.errors import LaunchError
from nblaunch.events import AttemptStarted
from nblaunch.host import descriptors
from nblaunch.host.descendants import Descendants
from nblaunch.launcher.guardian import Guardian
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.logtail import LogTail
from nblaunch.launcher.monitor import DeviceSampler
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.launcher.store import StoreHost
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods import STARTERS
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.start_methods.worker_group import WorkerGroup, exit_statuses_kept
from nblaunch.topology import Topology
from nblaunch.wire import signing
from nblaunch.wire.assignment import Assignment
from nblaunch.wire.board import Board, Slot, SlotReading, create_memory_file
from nblaunch.wire.channel import EventReceiver
from nblaunch.wire.stop_agreement import Agreement, Boundary
from nblaunch.wire.worker_commands import CommandConnection, connect


class Peers(Protocol):
    """The other nodes of a job, while workers run."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the nodes have sent something."""

    def receive(self) -> None:
        """Handle messages from the nodes."""

    @property
    def is_closed(self) -> bool:
        """Whether no more messages can arrive."""

    @property
    def must_end(self) -> bool:
        """Whether the workers of this node must end because of other nodes."""

    def agreement(self, slots: Mapping[int, Slot]) -> Agreement:
        """Start an agreement with the other nodes on the step at which all ranks leave their loops."""

    def boundary(self, slots: Mapping[int, Slot], now_s: float) -> Boundary | None:
        """Start an agreement among the ranks on an optimizer step; an interrupt is raised on all ranks just before that
        step.

        Return None if this is impossible.
        """

    def exchange(
        self, readings: Sequence[SlotReading], report: AttemptReport, running: Mapping[int, Slot]
    ) -> list[SlotReading]:
        """Send the state of this node's ranks; return readings of all ranks, and add failures to the report."""

    def worker_settings(self, topology: Topology) -> dict[str, str | None]:
        """Return environment variables for this node's workers, in addition to their topology."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks on this machine.

    Args:
        spec: what to run.
        plan: how to run it.
        number: number of this attempt in this launcher, from 0; names its log folder.
        restart_count: number of restarts of the job's workers (``TORCHELASTIC_RESTART_COUNT``). The agents of several
            nodes agree on it, because launchers may join at different times.
        topology: topology of the first of these ranks. With ``master_port`` 0, this process hosts the workers' store.
        log: the job's log folder.
        saved: copy of the call, made at launch, if this attempt may start later; None = use the call itself.
        peers: the other nodes of the job; None = one machine.
        store: listening socket of the workers' store, if it is already open.
        key: key for signing objects that ranks send to each other; b"" = a new key, on one machine.
        first_collected: rank that sends values that are the same on all ranks; None = the first of this machine.
        compares_ranks: whether this launcher compares its ranks; otherwise the coordinator compares all ranks.
    """

    spec: LaunchSpec
    plan: LaunchPlan
    number: int
    restart_count: int
    topology: Topology
    log: JobLog
    saved: SavedCall | None = None
    peers: Peers | None = None
    store: StoreHost | None = None
    key: bytes = field(default=b"", repr=False)
    first_collected: int | None = None
    compares_ranks: bool = True

    @property
    def keeps_workers(self) -> bool:
        """Whether the workers are kept for a debugger after a failure; only the last attempt keeps them."""
        return self.spec.post_mortem and self.number >= self.spec.max_restarts

    @property
    def ranks(self) -> range:
        """The ranks that run on this machine."""
        return range(self.topology.rank, self.topology.rank + self.topology.local_world_size)

    def start_event(self) -> AttemptStarted:
        """Return the event that announces this attempt to listeners."""
        return AttemptStarted(
            function_name=self.spec.function_name,
            num_processes=self.topology.world_size,
            backend=self.plan.backend.name,
            start_method=self.plan.start_method,
            reason=self.plan.reason,
            fallback=self.plan.fallback,
            log_dir=str(self.log.attempt_path(self.number)),
            attempt=self.number,
            label_template=self.spec.log_line_prefix_template,
            is_spmd=self.spec.is_spmd,
            mixed_precision=self.spec.mixed_precision,
            first_rank=self.topology.rank,
        )


@dataclass(frozen=True)
class RunningAttempt:
    """The workers of an attempt, and the resources that this process holds for them. Must be closed.

    Args:
        attempt: the attempt, with the port of the store in its topology.
        assignments: one per worker.
        group: processes of the workers.
        board: the progress of all ranks.
        receivers: rank -> receiver of its events.
        commands: rank -> connection for commands, to a session or the debugger; empty = no commands.
        tails: rank -> follower of its log.
        store: the store, which starts when a worker first connects to it; None = an agent hosts it.
        selector: waits for all of these.
        memory: samples host memory, from just before the workers start.
        devices: samples the use of the workers' devices.
        guardian: kills the workers if this process dies; not started yet.
        left_running: processes outside the workers' process groups that were killed when the attempt was closed.
    """

    attempt: Attempt
    assignments: Sequence[Assignment]
    group: WorkerGroup
    board: Board
    receivers: Mapping[int, EventReceiver]
    commands: Mapping[int, CommandConnection]
    tails: Mapping[int, LogTail]
    store: StoreHost | None
    selector: selectors.BaseSelector
    memory: MemoryRecord
    devices: DeviceSampler
    guardian: Guardian
    left_running: list[str]
    _resources: ExitStack = field(repr=False)

    def close(self) -> None:
        """End running processes and release all resources."""
        self._resources.close()


def start_attempt(attempt: Attempt) -> RunningAttempt:
    """Start the workers of an attempt.

    Raises:
        PayloadError: the call can't be sent to workers.
        LaunchError: a worker, descriptor, port or folder was not available. Nothing is left behind.
    """
    with ExitStack() as stack, start_failures_as_launch_errors(attempt):
        return _start(attempt, stack)


@contextmanager
def start_failures_as_launch_errors(attempt: Attempt) -> Iterator[None]:
    """Turn system errors in the block into :class:`LaunchError`; the block must contain only system calls."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"the system did not provide resources for {len(attempt.ranks)} workers: {error}. If descriptors ran out "
            "(ulimit -n), close some files or use fewer processes."
        ) from error


def _start(attempt: Attempt, stack: ExitStack) -> RunningAttempt:
    """Acquire everything and start the workers; ``stack`` releases everything in reverse order."""
    attempt.log.make_attempt_folder(attempt.number, attempt.ranks)
    stack.enter_context(exit_statuses_kept())
    descendants = Descendants()
    # Do as much as possible before the fork, because every page that is written while workers run is copied.
    memory = MemoryRecord()
    tails = _open_tails(attempt, stack)
    selector = _open_selector(stack)
    board = Board.create(attempt.topology.world_size)
    stack.callback(board.close)
    store = _open_store_socket(attempt, stack)
    if store is not None:
        attempt = replace(attempt, topology=replace(attempt.topology, master_port=store.port))
    with ExitStack() as worker_ends:
        assignments, receivers, commands = _assign(attempt, board, descendants.tag, stack, worker_ends)
        call = (attempt.spec.function, attempt.spec.args)
        group = STARTERS[attempt.plan.start_method](call, assignments, board, attempt.saved)
    left_running: list[str] = []
    # Runs after the group has been closed, when no worker can start another process.
    groups = group.process_groups()
    stack.callback(lambda: left_running.extend(descendants.end({*groups, *group.pids().values()})))
    stack.callback(group.close)
    devices = DeviceSampler(attempt.plan.backend, attempt.ranks.start, len(attempt.ranks))
    stack.callback(devices.close)
    log_path = attempt.log.log_path(attempt.ranks.start, attempt.number)
    guardian = Guardian(group.process_groups(), descendants.tag, log_path)
    stack.callback(guardian.dismiss)
    return RunningAttempt(
        attempt, assignments, group, board, receivers, commands, tails, store,
        selector, memory, devices, guardian, left_running, stack.pop_all(),
    )  # fmt: skip


def _open_store_socket(attempt: Attempt, stack: ExitStack) -> StoreHost | None:
    """Open the socket for the store that the supervisor starts; None if an agent hosts it."""
    if attempt.topology.master_port:
        return None
    store = attempt.store or StoreHost(attempt.topology.master_addr, attempt.spec.master_port)
    stack.callback(store.close)
    return store


def _open_tails(attempt: Attempt, stack: ExitStack) -> dict[int, LogTail]:
    max_bytes = env.read("NBLAUNCH_LOG_LIMIT_MB") * 1_000_000
    log, number = attempt.log, attempt.number
    keeps_files = attempt.spec.is_detached
    tails = {
        rank: LogTail(rank, log.log_path(rank, number), max_bytes, keeps_file=keeps_files)
        for rank in attempt.ranks
    }
    for tail in tails.values():
        stack.callback(tail.close)
    return tails


def _open_selector(stack: ExitStack) -> selectors.BaseSelector:
    selector = selectors.DefaultSelector()
    stack.callback(selector.close)
    # Workers of other jobs must not keep epoll's descriptor open; other selectors have none.
    if hasattr(selector, "fileno"):
        descriptors.keep_from_children(selector.fileno())
        stack.callback(descriptors.forget, selector.fileno())
    return selector


def _assign(
    attempt: Attempt, board: Board, tag: int, stack: ExitStack, worker_ends: ExitStack
) -> tuple[list[Assignment], dict[int, EventReceiver], dict[int, CommandConnection]]:
    """Create each worker's descriptors and assignment; return the assignments, and the launcher's ends by rank.

    Args:
        attempt: the attempt, with the port of the store in its topology.
        board: progress board of all ranks.
        tag: tag that identifies descendants of the workers.
        stack: closes resources of this process at the end of the attempt.
        worker_ends: closes descriptors that only the workers need, once they have them.

    Raises:
        OSError: descriptors or memory ran out.
    """
    spec, plan = attempt.spec, attempt.plan
    assignments: list[Assignment] = []
    receivers: dict[int, EventReceiver] = {}
    commands: dict[int, CommandConnection] = {}
    key = attempt.key or (signing.new_key() if attempt.topology.num_nodes == 1 else b"")
    main_rank = attempt.ranks.start if attempt.first_collected is None else attempt.first_collected
    for local_rank, rank in enumerate(attempt.ranks):
        topology = replace(attempt.topology, rank=rank, local_rank=local_rank)
        returns_value = rank == main_rank or spec.return_all
        assignments.append(
            Assignment(
                topology=topology,
                backend=plan.backend.name,
                environment=_environment(attempt, topology),
                accelerator_defaults=spec.accelerator_defaults,
                is_spmd=spec.is_spmd,
                attempt=attempt.number,
                board_fd=board.fd,
                event_fd=_open_events(rank, receivers, stack, worker_ends),
                # Every rank may hold shards of weights, so each gets an outbox.
                outbox_fd=_open_outbox(rank, stack)
                if returns_value or plan.modules or plan.optimizers
                else -1,
                command_fd=_connect(rank, commands, worker_ends) if spec.has_debugger else -1,
                post_mortem=attempt.keeps_workers,
                has_breakpoints=spec.has_breakpoints,
                is_script=spec.is_script,
                log_path=str(attempt.log.log_path(rank, attempt.number)),
                stacks_path=str(attempt.log.stacks_path(rank, attempt.number)),
                num_threads=plan.num_threads,
                returns_value=returns_value,
                is_main=rank == main_rank,
                wanted_modules=tuple(plan.modules),
                wanted_optimizers=tuple(plan.optimizers),
                key=key,
                descendant_tag=tag,
            )
        )
    return assignments, receivers, commands


def _open_events(
    rank: int, receivers: dict[int, EventReceiver], stack: ExitStack, worker_ends: ExitStack
) -> int:
    """Create the pipe for a rank's events; return the worker's end."""
    reading, writing = os.pipe()
    descriptors.keep_from_children(reading)
    receivers[rank] = EventReceiver(reading, f"rank {rank}")
    stack.callback(descriptors.close, reading)
    writing = descriptors.moved_high(writing)
    worker_ends.callback(os.close, writing)
    return writing


def _open_outbox(rank: int, stack: ExitStack) -> int:
    fd = descriptors.moved_high(create_memory_file(f"nblaunch-outbox-{rank}"))
    stack.callback(os.close, fd)
    return fd


def _connect(rank: int, commands: dict[int, CommandConnection], worker_ends: ExitStack) -> int:
    """Create a connection to a rank; return the worker's end."""
    commands[rank], fd = connect()
    worker_ends.callback(os.close, fd)
    return fd


def _environment(attempt: Attempt, topology: Topology) -> dict[str, str | None]:
    """Return the environment variables that a worker sets first; None unsets a variable."""
    backend, peers = attempt.plan.backend, attempt.peers
    return {
        **topology.to_env(attempt.restart_count, attempt.spec.max_restarts),
        **attempt.spec.environment,
        **backend.worker_env(topology),
        **((backend.spmd_env() or {}) if attempt.spec.is_spmd else {}),
        **(peers.worker_settings(topology) if peers is not None else {}),
    }

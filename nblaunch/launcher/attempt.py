"""One attempt of a job: everything it needs is made, workers of this machine run, everything is released again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from nblaunch import env
from nblaunch.backends.base import Backend
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.engines.base import Engine, WorkerGroup
from nblaunch.engines.saved_call import SavedCall
from nblaunch.errors import LaunchError
from nblaunch.events import Event, Exited, Note, Started
from nblaunch.host.descendants import Descendants
from nblaunch.launcher.guardian import Guardian
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.logtail import LogTail
from nblaunch.launcher.monitor import DeviceLeakCheck, Monitor
from nblaunch.launcher.rendezvous import RendezvousHost
from nblaunch.launcher.requests import StopRequests
from nblaunch.launcher.supervisor import Peers, Supervisor
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire import descriptors, outbox, sealing
from nblaunch.wire.assignment import Assignment
from nblaunch.wire.board import Board, Sample, create_memory_file
from nblaunch.wire.channel import EventReceiver
from nblaunch.wire.modules import Place
from nblaunch.wire.outbox import Outcome

_MAX_NAMED = 5  # processes that workers left running


@dataclass
class Attempt:
    """One run of all ranks of this machine.

    Args:
        spec: what to run.
        number: of this attempt, from 0.
        place: of the first of them in the world. ``master_port`` 0: the workers' store is hosted here.
        backend: what they compute on.
        engine: how they start.
        num_threads: CPU threads of each.
        weights_of: places of the modules in the arguments whose weights are wanted back.
        log: the job's log folder.
        requests: requests to the job.
        emit: takes every event.
        show: takes the board's samples.
        saved: the call as it was at the launch, where this attempt may start later; None = as it is now.
        peers: the other nodes of the job, where there are any.
        restart_count: how often workers were started before, the same number on all machines.
    """

    spec: LaunchSpec
    number: int
    place: Topology
    backend: Backend
    engine: Engine
    num_threads: int
    weights_of: tuple[Place, ...]
    log: JobLog
    requests: StopRequests
    emit: Callable[[Event], None]
    show: Callable[[Sequence[Sample]], None]
    saved: SavedCall | None = None
    peers: Peers | None = None
    restart_count: int = 0

    def start(self) -> None:
        """Make everything and start the workers; :meth:`watch` must follow, in any thread.

        Raises:
            LaunchError: a worker, descriptor, port or folder could not be had. Nothing is left behind.
        """
        self._stack = ExitStack()
        self._leak_check = DeviceLeakCheck(self.backend)
        with ExitStack() as stack, self._refusals_named():
            self._assignments, self._supervisor = self._start(stack)
            self._stack = stack.pop_all()

    def watch(self) -> tuple[AttemptReport, dict[int, Outcome]]:
        """Watch the workers to their end, collect what they leave; returns the report and the outcomes.

        Raises:
            LaunchError: the system refused what workers need while they run.
        """
        with self._stack:
            report = self._supervisor.run()
            if report.unkillable:
                self._guardian.stay()
            outcomes = _collect(self._assignments, report)
        for line in self._leak_check.leaks():
            self.emit(Note.of_job(line, "warning"))
        return report, outcomes

    def close(self) -> None:
        """End workers that were started and are not watched; nothing after :meth:`watch`."""
        self._stack.close()

    @contextmanager
    def _refusals_named(self) -> Iterator[None]:
        """Around what the start of workers needs of the system, and nothing else: other errors are not refusals."""
        try:
            yield
        except OSError as error:
            raise LaunchError(
                f"the system refused what {self.place.local_world_size} workers need: {error}. If descriptors ran out "
                "(ulimit -n), close some or use fewer processes."
            ) from error

    def _start(self, stack: ExitStack) -> tuple[list[Assignment], Supervisor]:
        self.log.start_attempt(
            self.number, range(self.place.rank, self.place.rank + self.place.local_world_size)
        )
        descendants = Descendants()
        board = Board.create(self.place.world_size)
        stack.callback(board.close)
        rendezvous = self._host(stack)
        place = self.place if rendezvous is None else replace(self.place, master_port=rendezvous.port)
        with ExitStack() as worker_ends:  # what only the workers need, once they have it
            assignments, receivers = self._assign(stack, worker_ends, board, place, descendants.mark)
            call = (self.spec.function, self.spec.args)
            group = self.engine.start(call, assignments, board, self.saved)
        # After the group was closed: then no worker is left that could start another process.
        stack.callback(self._end_descendants, descendants, group, group.process_groups())
        stack.callback(group.close)
        tails = self._tails(stack, [assignment.rank for assignment in assignments])
        monitor = Monitor(self.backend, place.rank, place.local_world_size)
        stack.callback(monitor.close)
        guardian = Guardian(group.process_groups(), descendants.mark)
        stack.callback(guardian.dismiss)
        supervisor = Supervisor(
            group=group,
            receivers=receivers,
            tails=tails,
            board=board,
            monitor=monitor,
            rendezvous=rendezvous,
            requests=self.requests,
            emit=partial(self._emit_with, guardian, group),
            show=self.show,
            settle=partial(self._settle, guardian),
            grace_s=self.spec.interrupt_grace_s,
            stacks_paths={a.rank: self.log.stacks_path(a.rank, self.number) for a in assignments},
            hang_timeout_s=self.spec.hang_timeout_s,
            stops_on_hang=self.spec.on_hang == "stop",
            peers=self.peers,
        )
        stack.callback(supervisor.close)
        self._guardian = guardian
        return assignments, supervisor

    def _tails(self, stack: ExitStack, ranks: Sequence[int]) -> dict[int, LogTail]:
        max_bytes = env.read("NBLAUNCH_LOG_LIMIT_MB") * 1_000_000
        tails = {rank: LogTail(rank, self.log.log_path(rank, self.number), max_bytes) for rank in ranks}
        for tail in tails.values():
            stack.callback(tail.close)
        return tails

    def _end_descendants(
        self, descendants: Descendants, group: WorkerGroup, first_groups: Sequence[int]
    ) -> None:
        found = descendants.end({*first_groups, *group.pids().values()})
        if found:
            shown = ", ".join(found[:_MAX_NAMED]) + (
                f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            )
            self.emit(Note.of_job(f"ended with the job, though out of the workers' process groups: {shown}"))

    def _host(self, stack: ExitStack) -> RendezvousHost | None:
        """Listen for workers that want the store; None where another machine does."""
        if self.place.master_port:
            return None
        # Among nodes, that port is where the agents meet.
        port = self.spec.master_port if self.peers is None else None
        rendezvous = RendezvousHost(self.place.master_addr, port)
        stack.callback(rendezvous.close)
        if self.peers is not None:
            self.peers.send_port(rendezvous.port)
        return rendezvous

    def _settle(self, guardian: Guardian) -> None:
        """What workers do not wait for, and the shortest jobs do without."""
        with self._refusals_named():
            guardian.start()
        try:
            self.log.prune()
        except OSError as error:  # old logs are no reason to end a job
            self.emit(Note.of_job(f"logs of earlier jobs could not be removed: {error}", "warning"))

    def _emit_with(self, guardian: Guardian, group: WorkerGroup, event: Event) -> None:
        if isinstance(event, (Started, Exited)):
            own = {event.pid} if isinstance(event, Started) else set()  # a forkserver may report it later
            guardian.watch_only(own.union(group.process_groups()))
        self.emit(event)

    def _assign(
        self, stack: ExitStack, worker_ends: ExitStack, board: Board, place: Topology, mark: int
    ) -> tuple[list[Assignment], dict[int, EventReceiver]]:
        """Make each worker's descriptors and assignment."""
        assignments, receivers = [], {}
        key = sealing.new_key() if place.num_nodes == 1 else b""
        for local_rank in range(place.local_world_size):
            topology = replace(place, rank=place.rank + local_rank, local_rank=local_rank)
            rank = topology.rank
            reading, writing = os.pipe()
            descriptors.keep_from_children(reading)
            receivers[rank] = EventReceiver(reading, f"rank {rank}")
            stack.callback(descriptors.close, reading)
            worker_ends.callback(os.close, writing)
            # Of weights, any rank may hold a part.
            wants_outcome = self._returns_value(topology) or bool(self.weights_of)
            outbox_fd = create_memory_file(f"nblaunch-outbox-{rank}") if wants_outcome else -1
            if wants_outcome:
                stack.callback(os.close, outbox_fd)
            own = self._assignment(topology, board.fd, writing, outbox_fd)
            assignments.append(replace(own, key=key, mark=mark))
        return assignments, receivers

    def _returns_value(self, topology: Topology) -> bool:
        return topology.local_rank == 0 or self.spec.return_all

    def _device_env(self, topology: Topology) -> dict[str, str | None]:
        own = self.backend.worker_env(topology)
        spanning = self.backend.spanning_env() if self.spec.spans_devices else None
        return own | (spanning or {})

    def _assignment(self, topology: Topology, board_fd: int, event_fd: int, outbox_fd: int) -> Assignment:
        settings = {**topology.to_env(self.number), **self.spec.environment, **self._device_env(topology)}
        if self.peers is not None:
            settings |= self.peers.worker_settings(topology, self.restart_count)
        return Assignment(
            topology=topology,
            backend=self.backend.name,
            environment=settings,
            defaults=self.spec.defaults,
            spans_devices=self.spec.spans_devices,
            attempt=self.number,
            board_fd=board_fd,
            event_fd=event_fd,
            outbox_fd=outbox_fd,
            log_path=str(self.log.log_path(topology.rank, self.number)),
            stacks_path=str(self.log.stacks_path(topology.rank, self.number)),
            num_threads=self.num_threads,
            returns_value=self._returns_value(topology),
            sends_weights_of=self.weights_of,
        )


def _collect(assignments: Sequence[Assignment], report: AttemptReport) -> dict[int, Outcome]:
    """Read the outboxes of the ranks that finished."""
    return {
        rank: outbox.read(fd, report.finished[rank].contents, report.weights.get(rank, {}))
        for rank, fd in ((assignment.rank, assignment.outbox_fd) for assignment in assignments)
        if fd >= 0 and rank in report.finished
    }

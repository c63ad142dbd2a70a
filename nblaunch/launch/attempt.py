"""One attempt of a job: everything it needs is made, workers run, everything is released again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from nblaunch.backends.base import Backend
from nblaunch.engines.base import Engine
from nblaunch.errors import LaunchError
from nblaunch.events import Event, Started
from nblaunch.launch.diagnosis.report import AttemptReport
from nblaunch.launch.guardian import Guardian
from nblaunch.launch.joblog import JobLog, LogTail
from nblaunch.launch.rendezvous import RendezvousHost
from nblaunch.launch.requests import StopRequests
from nblaunch.launch.supervisor import Supervisor
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology
from nblaunch.wire import descriptors, outbox
from nblaunch.wire.assignment import Assignment
from nblaunch.wire.board import Board, Sample, create_memory_file
from nblaunch.wire.channel import EventReceiver
from nblaunch.wire.outbox import Outcome


@dataclass
class Attempt:
    """One run of all ranks.

    Args:
        spec: what to run.
        number: of this attempt, from 0.
        num_processes: how many workers.
        backend: what they compute on.
        engine: how they start.
        num_threads: CPU threads of each.
        weights_of: positions of the modules in ``args`` whose weights are wanted back.
        log: the job's log folder.
        requests: what people ask of the job.
        tell: takes every event.
        show: takes the board's samples.
    """

    spec: LaunchSpec
    number: int
    num_processes: int
    backend: Backend
    engine: Engine
    num_threads: int
    weights_of: tuple[int, ...]
    log: JobLog
    requests: StopRequests
    tell: Callable[[Event], None]
    show: Callable[[Sequence[Sample]], None]

    def run(self) -> tuple[AttemptReport, dict[int, Outcome]]:
        """Start the workers, watch them to their end, collect what they leave; returns the report and the outcomes.

        Raises:
            LaunchError: a worker, descriptor, port or folder could not be had. Nothing is left behind.
        """
        try:
            with ExitStack() as stack:
                return self._run(stack)
        except OSError as error:
            raise LaunchError(
                f"the system refused what {self.num_processes} workers need: {error}. If descriptors ran out "
                "(ulimit -n), close some or use fewer processes."
            ) from error

    def _run(self, stack: ExitStack) -> tuple[AttemptReport, dict[int, Outcome]]:
        self.log.start_attempt(self.number)
        board = Board.create(self.num_processes)
        stack.callback(board.close)
        rendezvous = RendezvousHost(self.spec.master_addr, self.spec.master_port)
        stack.callback(rendezvous.close)
        with ExitStack() as worker_ends:  # what only the workers need, once they have it
            assignments, receivers = self._assign(stack, worker_ends, board, rendezvous.port)
            group = self.engine.start((self.spec.function, self.spec.args), assignments, board)
        stack.callback(group.close)
        tails = {a.rank: LogTail(a.rank, self.log.log_path(a.rank, self.number)) for a in assignments}
        for tail in tails.values():
            stack.callback(tail.close)
        guardian = Guardian(group.process_groups())
        stack.callback(guardian.dismiss)
        self.log.prune()
        supervisor = Supervisor(
            group=group,
            receivers=receivers,
            tails=tails,
            board=board,
            rendezvous=rendezvous,
            requests=self.requests,
            tell=partial(self._tell_with, guardian),
            show=self.show,
            grace_s=self.spec.interrupt_grace_s,
            stacks_paths={a.rank: self.log.stacks_path(a.rank, self.number) for a in assignments},
            hang_timeout_s=self.spec.hang_timeout_s,
            stops_on_hang=self.spec.on_hang == "stop",
        )
        report = supervisor.run()
        return report, _collect(assignments, report)

    def _tell_with(self, guardian: Guardian, event: Event) -> None:
        if isinstance(event, Started):
            guardian.watch(event.pid)
        self.tell(event)

    def _assign(
        self, stack: ExitStack, worker_ends: ExitStack, board: Board, port: int
    ) -> tuple[list[Assignment], dict[int, EventReceiver]]:
        """Make each worker's descriptors and orders."""
        assignments, receivers = [], {}
        for rank in range(self.num_processes):
            reading, writing = os.pipe()
            descriptors.keep_from_children(reading)
            receivers[rank] = EventReceiver(reading)
            stack.callback(descriptors.close, reading)
            worker_ends.callback(os.close, writing)
            wants_outcome = rank == 0 or self.spec.return_all
            outbox = create_memory_file(f"nblaunch-outbox-{rank}") if wants_outcome else -1
            if wants_outcome:
                stack.callback(os.close, outbox)
            assignments.append(self._assignment(rank, board.fd, writing, outbox, port))
        return assignments, receivers

    def _device_env(self, topology: Topology) -> dict[str, str | None]:
        own = self.backend.worker_env(topology)
        spanning = self.backend.spanning_env() if self.spec.strategy == "spmd" else None
        return own | (spanning or {})

    def _assignment(self, rank: int, board_fd: int, event_fd: int, outbox_fd: int, port: int) -> Assignment:
        topology = Topology(
            rank=rank,
            local_rank=rank,
            world_size=self.num_processes,
            local_world_size=self.num_processes,
            master_addr=self.spec.master_addr,
            master_port=port,
        )
        return Assignment(
            topology=topology,
            backend=self.backend.name,
            environment={**topology.to_env(self.number), **self._device_env(topology)},
            defaults=self.spec.defaults,
            attempt=self.number,
            board_fd=board_fd,
            event_fd=event_fd,
            outbox_fd=outbox_fd,
            log_path=str(self.log.log_path(rank, self.number)),
            stacks_path=str(self.log.stacks_path(rank, self.number)),
            num_threads=self.num_threads,
            sends_weights_of=self.weights_of if rank == 0 else (),
        )


def _collect(assignments: Sequence[Assignment], report: AttemptReport) -> dict[int, Outcome]:
    """Read the outboxes of the ranks that finished."""
    return {
        assignment.rank: outbox.read(assignment.outbox_fd, report.finished[assignment.rank].contents)
        for assignment in assignments
        if assignment.outbox_fd >= 0 and assignment.rank in report.finished
    }

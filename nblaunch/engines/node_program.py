"""NodeProgram: loads the call once, and runs this node's ranks in each attempt, like a launcher on one machine.

    Boot, CallPart ──> load ──> Ready
    StartRanks ──> start_attempt, Supervisor ──> ranks forked from this process ──> AttemptOver
    StartRanks ──> the same again, after a failure anywhere
    end of the channel ──> the ranks end, and this process with them
    Leave ──> this process ends, and another runs the next job on the same channel (node.py)

The node program is a clean process with one thread, so that its ranks can be forked and share the model. Only the
coordinator makes decisions about other nodes (``coordinator.py``).
"""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nblaunch import backends, env, packages
from nblaunch.diagnosis.failure import memory_evidence, shm_evidence
from nblaunch.diagnosis.report import AttemptReport, Evidence
from nblaunch.diagnosis.root_cause import RootCause
from nblaunch.engines import shipping
from nblaunch.engines.channel import Channel
from nblaunch.engines.collectives import NodeCalls, sharing
from nblaunch.engines.messages import (
    AskClock,
    AttemptOver,
    Boot,
    CallPart,
    ClockIs,
    Hello,
    Leave,
    Ready,
    Rejected,
    StartRanks,
    StoreOpened,
)
from nblaunch.engines.uplink import Uplink
from nblaunch.errors import LaunchError
from nblaunch.host import heap
from nblaunch.launcher.attempt import Attempt, start_attempt
from nblaunch.launcher.joblog import JobLog, log_root
from nblaunch.launcher.plan import LaunchPlan, plan_launch, replan_start_method
from nblaunch.launcher.requests import JobRequests
from nblaunch.launcher.store import StoreHost
from nblaunch.launcher.supervisor import Supervisor
from nblaunch.nodes import network
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.wire.board import create_memory_file
from nblaunch.worker import process_control

_KINDS = (LaunchError, ValueError, TypeError, RuntimeError)
"""Types of errors that keep their type in the launching process, which raises any other error as a LaunchError."""

_TERMINATION_GRACE_S = 20.0


class NodeProgram:
    """The node program after it has received its key.

    Args:
        boot: the first message.
        channel: channel to the coordinator.
    """

    def __init__(self, boot: Boot, channel: Channel) -> None:
        self._boot = boot
        self._channel = channel
        self._host = Hello.of_this_process().host
        self._id = f"{self._host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._requests: JobRequests | None = None
        # If a batch system reclaims this machine, the coordinator ends the whole job in an orderly way.
        signal.signal(signal.SIGTERM, self._on_termination)

    def run(self) -> bool:
        """Load the call, then run attempts until the coordinator ends the job, or closes the channel.

        Returns:
            Whether the coordinator has ended the job but keeps the channel open for another one.
        """
        log_folder = log_root() / "nodes"
        log_folder.mkdir(mode=0o700, exist_ok=True)
        self._log = JobLog(str(log_folder))
        try:
            self._address = self._boot.address or _address()
            spec, plan = self._load()
        except Exception as error:
            self._reject(error)
            return False
        if spec is None or plan is None:
            return False  # the coordinator has ended
        self._channel.send(self._ready(plan))
        while not self._channel.is_closed:
            messages = iter(self._channel.wait())
            for message in messages:
                if isinstance(message, Leave):
                    return True
                if isinstance(message, StartRanks):
                    self._run_attempt(spec, plan, message, messages)
                elif isinstance(message, AskClock):
                    self._channel.send(ClockIs(message.sent_s, time.time(), time.monotonic()))
        return False

    def _reject(self, error: BaseException) -> None:
        kind = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "")
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        self._channel.send(Rejected(kind or LaunchError.__name__, text))
        self._channel.send_now()

    def _on_termination(self, signum: int, frame: object) -> None:
        if self._requests is not None:
            self._requests.terminate(_TERMINATION_GRACE_S)

    # --- loading -------------------------------------------------------------------------------------------------

    def _load(self) -> tuple[LaunchSpec | None, LaunchPlan | None]:
        """Return the launch with its call, and the plan of this node; None if the coordinator has ended.

        Raises:
            Exception: the call can't be loaded here, or the plan rejects it.
        """
        boot = self._boot
        saved = self._receive_call()
        if saved is None:
            return None, None
        if not boot.is_same_machine:
            shipping.adopt_paths(saved.path, saved.folder)
            saved = replace(saved, modules={})
            shipping.install(boot.modules, _made(self._log.path / "modules"))
        if lacking := shipping.missing(boot.required):
            raise LaunchError(
                f"modules that the call needs are missing on this node: {', '.join(lacking)}. Install them for its "
                f"Python, {sys.executable}"
            )
        saved.restore_surroundings()
        if boot.registered_backend:
            backends.find(boot.spec.backend, boot.registered_backend)
        try:
            with process_control.ending_with(self._channel.reading_fd):
                (function, args), _ = saved.load()
        except (Exception, SystemExit) as error:
            raise LaunchError(
                f"the call can't be loaded on this node: {type(error).__name__}: {error}"
            ) from error
        saved.close()
        spec = replace(boot.spec, function=function, args=args)
        with heap.growing():
            plan = plan_launch(spec)
            plan.backend.preload()
            with suppress(ImportError):  # ranks report the error if they need the module
                importlib.import_module("torch.distributed")  # once per node instead of in each rank
        return spec, replan_start_method(plan, spec)

    def _receive_call(self) -> SavedCall | None:
        fd = create_memory_file("nblaunch-call")
        at = 0
        while at < self._boot.call_bytes:
            for message in self._channel.wait():
                assert isinstance(message, CallPart), "nothing else comes before a reply"
                at += os.pwrite(fd, message.data, at)
            if self._channel.is_closed:
                return None
        return replace(self._boot.call, fd=fd)

    def _ready(self, plan: LaunchPlan) -> Ready:
        return Ready(
            id=self._id,
            address=self._address,
            torch=packages.version("torch") or "",
            num_processes=plan.num_processes,
            backend=plan.backend.name,
            start_method=plan.start_method,
            reason=plan.reason,
            fallback=plan.fallback,
            num_threads=plan.num_threads,
            warnings=plan.warnings,
        )

    # --- an attempt ----------------------------------------------------------------------------------------------

    def _run_attempt(
        self, spec: LaunchSpec, plan: LaunchPlan, order: StartRanks, later: Iterator[object]
    ) -> None:
        """Run the ranks of this node until they end, and send their results.

        Args:
            later: messages to these ranks that arrived together with :class:`StartRanks`.
        """
        self._requests = requests = JobRequests()
        uplink = Uplink(self._channel, requests, self._id, self._host, self._address)
        try:
            store = None
            if not order.topology.master_port:
                store = StoreHost(self._address, None)
                self._channel.send(StoreOpened(store.port))
            attempt = Attempt(
                spec=spec,
                plan=replan_start_method(plan, spec),
                number=order.number,
                restart_count=order.number,
                topology=order.topology,
                log=self._log,
                peers=uplink,
                store=store,
                key=order.key,
                first_collected=0,
                compares_ranks=False,
            )
            uplink.begin(attempt)
            uplink.take(later)
            running = start_attempt(attempt)
            uplink.outboxes = {assignment.outbox_fd: assignment.rank for assignment in running.assignments}
            uplink.calls = NodeCalls(running.board, running.attempt.ranks)
            supervisor = Supervisor(
                running, requests, uplink.emit, lambda readings: None, read_outbox=uplink.send_outbox
            )
            report, _ = supervisor.run()
        except Exception as error:
            self._reject(error)
            return
        finally:
            self._requests = None
            requests.close()
        uplink.calls = None  # the board is closed
        uplink.end([rank for rank, (status, _) in report.exits.items() if status.code])
        own_ranks = range(attempt.ranks.start, attempt.ranks.stop)
        self._channel.send(
            AttemptOver(
                signalled=report.signalled,
                unkillable=report.unkillable,
                evidence=_evidence(report),
                last_readings=tuple(reading for reading in report.last_readings if reading.rank in own_ranks),
                hang=report.hang,
                calls=sharing(report.calls),
            )
        )
        self._channel.send_now()


def _evidence(report: AttemptReport) -> Mapping[int, Evidence]:
    """Return this machine's evidence about the failures of its ranks, if there is any."""
    causes = [RootCause(rank, failed=failed, time_s=failed.time_s) for rank, failed in report.failed.items()]
    causes += [
        RootCause(rank, status=status, time_s=time_s)
        for rank, (status, time_s) in report.exits.items()
        if rank not in report.failed and status.code != 0
    ]
    by_rank = {
        cause.rank: Evidence(tuple(memory_evidence(report, cause)), tuple(shm_evidence(report, cause)))
        for cause in causes
    }
    return {rank: evidence for rank, evidence in by_rank.items() if evidence != Evidence()}


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


def _address() -> str:
    """Return the address by which ssh reached this machine, or the address on its default route."""
    connection = env.read("SSH_CONNECTION").split()
    return connection[2] if len(connection) == 4 else network.default_address()

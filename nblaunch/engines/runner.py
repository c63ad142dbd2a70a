"""EngineRunner: starts nodes with an engine, and runs a job on them, attempt after attempt.

    call, by cloudpickle ──> engine: a node program on each machine ──> all load it and plan their launch
                         ──> Coordinator, one attempt ──> merged report ──> result, weights and errors, as usual
    after a failure      ──> the same nodes again; after a lost node, new ones

Compared with a job on one machine, only the attempts differ, so EngineRunner works in a kernel, in the background, and
in a detached job's process. None of these processes connects to a cluster: an engine that needs a library for that uses
a separate process (``ray.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nblaunch import backends, errors
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.engines import Engine, NodeHandle, NodesWanted, find, shipping
from nblaunch.engines.coordinator import Coordinator, describe_nodes, world_size
from nblaunch.engines.link import LinkWaiter, NodeLink, end_all, torch_notes
from nblaunch.engines.messages import AskClock, Boot, ClockIs, Ready, Rejected
from nblaunch.errors import JobCancelled, LaunchError
from nblaunch.events import Fact, Note
from nblaunch.host import signal_handlers
from nblaunch.launcher.runner import JobRunner
from nblaunch.start_methods.saved_call import save_call
from nblaunch.start_methods.spawn import registered_backend
from nblaunch.topology import Topology
from nblaunch.wire import signing
from nblaunch.wire.outbox import RankResult
from nblaunch.wire.pickling import payload
from nblaunch.worker.inheritance import random_states

_TICK_S = 0.1
_NOTE_S = 10.0
"""Seconds until a note names the nodes that are not ready."""

_ADVICE = "on one machine, where workers are forked from the notebook, nothing needs to be pickled"


class EngineRunner(JobRunner):
    """Runs one job on the nodes of an engine, once."""

    _engine: Engine | None = None
    _key = b""

    def _start_job(self) -> None:
        """Save the current call; nodes start in :meth:`_finish`."""
        for warning in self.plan.warnings:
            self.emit(Note.of_job(warning, "warning"))
        self._links: list[NodeLink] = []
        self._saved = save_call((self.spec.function, self.spec.args), _ADVICE)
        random_states.move_on()
        nodes = self.spec.nodes
        self._engine = find(self.spec.engine)() if nodes is None else nodes.lend()
        self._key = signing.new_key()

    # --- attempts ------------------------------------------------------------------------------------------------

    def _finish_attempts(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        """Start the nodes, and run attempts until one succeeds or no restarts are left.

        Raises:
            KeyboardInterrupt: the job was interrupted while nodes were starting.
            JobCancelled: the job was cancelled while nodes were starting.
            LaunchError: nodes, or the ranks on one of them, could not be started.
        """
        self._gather()
        report, rank_results = self._run_attempt()
        while self._wants_restart(report):
            failure = self._record_failure(report)
            self.attempt += 1
            self.pids = {}
            text = f"{failure}; starting all ranks again (restart {self.attempt} of at most {self.spec.max_restarts})"
            self.emit(Note.of_job(text, "warning"))
            if any(link.loss for link in self._links):
                end_all(self._links)
                self._gather()
            report, rank_results = self._run_attempt()
        self._leave(keeps=True)
        return report, rank_results

    def _run_attempt(self) -> tuple[AttemptReport, dict[int, RankResult]]:
        self._announce_attempt()
        self.emit(Fact(name="nodes", text=describe_nodes(self._links)))
        coordinator = Coordinator(
            self._make_attempt(),
            self._links,
            signing.digest(self._key, b"ranks"),
            self.requests,
            self.emit,
            self.emit_readings,
        )
        return coordinator.run()

    def keep_weights(self, wanted: bool) -> None:
        """Do nothing: nodes decide whether to keep weights when they receive the interrupt."""

    def _leave(self, *, keeps: bool = False) -> None:
        """Release the engine, and end the programs on all nodes unless the engine keeps nodes whose job is over."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            handles = [link.leave() for link in self._links] if keeps and engine.keeps_nodes else []
            kept = [handle for handle in handles if handle is not None]
            if kept and len(kept) == len(self._links):
                engine.keep(kept)
            else:
                end_all(self._links)
        finally:
            engine.close()

    def _release(self) -> None:
        if self._engine is not None:
            self._leave()
        super()._release()

    # --- nodes ---------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Start the nodes, or take those that are kept, and wait until all have loaded the call.

        If the program on a kept node has ended, all nodes are started again, but only once. Once all nodes are ready,
        the job adopts their plan.
        """
        assert self._engine is not None, "the job has started"
        assert self._saved is not None, "the job has started"
        wanted = NodesWanted(
            spec=self.spec,
            log_path=lambda number: self._new_log(f"node_{number}.log"),
            check=self._check_requests,
            note=self._note,
            path=self._saved.path,
            folder=self._saved.folder,
            environment=self._saved.environment,
        )
        kept = self._engine.take_kept()
        try:
            self._load_call(kept or self._engine.start_nodes(wanted), len(kept) or self.spec.min_nodes)
        except _NodeEnded as ended:
            if not kept:
                raise LaunchError(str(ended)) from None
            self._note(f"restarting the programs on all nodes, because {ended}")
            end_all(self._links)
        else:
            self._adopt_plan()
            return
        self._gather()  # without kept nodes

    def _load_call(self, handles: Sequence[NodeHandle], min_nodes: int) -> None:
        """Send the call to the nodes, and wait until all have loaded it.

        Nodes that can't be reached are left out if enough remain.

        Raises:
            _NodeEnded: fewer than ``min_nodes`` nodes can load it, because the programs on the others have ended.
            LaunchError: a node can't run the call, or is not ready in time.
        """
        assert self._engine is not None, "the job has started"
        self._links = [NodeLink(handle, number) for number, handle in enumerate(handles)]
        for text in self._engine.notes() if self.attempt == 0 else ():
            self._note(text)
        boot, waiter = self._boot(), LinkWaiter(self.requests.fileno())
        began_s, has_noted, timeout_s = time.monotonic(), False, self.spec.rendezvous_timeout_s
        while missing := [link for link in self._links if not link.has_clock]:
            waiter.wait(self._links, _TICK_S)
            self._check_requests()
            for link in list(self._links):  # a node may be lost while others load the call
                self._receive(link, boot)
                if link.channel.is_closed:
                    self._handle_end(link, min_nodes)
            waited_s = time.monotonic() - began_s
            labels = ", ".join(link.label for link in missing)
            if waited_s > timeout_s:
                raise LaunchError(
                    f"not all nodes were ready within {timeout_s:g} s: {labels} did not answer. A larger "
                    "rdzv_timeout_s allows more time"
                )
            if waited_s > _NOTE_S and not has_noted:
                has_noted = True
                self._note(f"waiting for {labels} to load the call")

    def _receive(self, link: NodeLink, boot: Boot) -> None:
        """Handle what a node has sent before its ranks start."""
        assert self._saved is not None, "the job has started"
        link.channel.flush()
        if link.hello is None:
            link.receive_hello()
            if link.hello is not None:
                link.send_boot(boot, self._saved.fd)
        for message in link.receive() if link.hello is not None else ():
            if isinstance(message, Ready):
                link.ready = message
                link.channel.send(AskClock())
            elif isinstance(message, ClockIs):
                link.set_clock(message)
            elif isinstance(message, Rejected):
                kind = getattr(errors, message.kind, None) or _BUILT_IN.get(message.kind, LaunchError)
                raise kind(f"{link.label}: {message.text}")

    def _handle_end(self, link: NodeLink, min_nodes: int) -> None:
        """Continue without a node that was never reached, if enough nodes are left."""
        text = f"the program on {link.label} ended before the ranks started: {link.how_ended()}"
        if link.hello is not None or len(self._links) <= min_nodes:
            raise _NodeEnded(text)
        self._note(f"{text}; continuing without that node")
        self._links.remove(link)
        link.close()
        for number, other in enumerate(self._links):
            other.number = number

    def _boot(self) -> Boot:
        """Return the message that every node receives first, without the node's address."""
        assert self._engine is not None, "the job has started"
        assert self._saved is not None, "the job has started"
        spec, saved = self.spec, self._saved
        is_same_machine = self._engine.is_this_machine
        modules = [] if is_same_machine else shipping.user_modules(saved.folder)
        required = [] if is_same_machine else shipping.required(payload.pickles_in(saved.fd), modules)
        per_node = None if spec.num_processes is None else spec.num_processes // spec.max_nodes
        of_node = replace(
            spec,
            engine="local",
            nodes=None,
            num_nodes=1,
            hosts=(),
            resources_per_node=None,
            runtime_env=None,
            num_processes=per_node,
            # The coordinator detects hangs from the progress on all nodes.
            hang_timeout_s=None,
            rdzv_timeout_s=None,
            log_dir=None,
            is_detached=False,
        ).without_call()
        environment = saved.environment if is_same_machine else shipping.variables(saved.environment)
        given = spec.runtime_env or {}
        environment = {
            name: value for name, value in environment.items() if name not in (given.get("env_vars") or {})
        }
        call = replace(saved, fd=-1, environment={}, path=tuple(map(str, saved.path)))
        if given.get("working_dir") is not None:  # the nodes' folder
            call = replace(call, folder=None)
        return Boot(
            key=self._key,
            spec=of_node,
            registered_backend=registered_backend(spec.backend),
            call=call,
            call_bytes=os.fstat(saved.fd).st_size,
            modules=modules,
            required=required,
            environment=environment,
            is_same_machine=is_same_machine,
            address="",
            is_kept=self._engine.keeps_nodes,
        )

    def _note(self, text: str) -> None:
        self.emit(Note.of_job(text))

    def _new_log(self, name: str) -> Path:
        path = self.log.path / name
        return path if path.exists() else self.log.new_file(name)

    def _check_requests(self) -> None:
        """Raise an error if the job was interrupted or cancelled while the nodes were starting."""
        signal_handlers.run_arrived()
        self.emit_readings(())  # makes listeners publish, which shows notes
        self.requests.acknowledge()
        if self.requests.is_cancelled:
            raise JobCancelled(f"{self.spec.function_name} was cancelled while its nodes were starting")
        if self.requests.interrupts or self.requests.terminations:
            raise KeyboardInterrupt

    def _adopt_plan(self) -> None:
        """Combine the nodes' plans into the job's plan.

        Raises:
            LaunchError: the nodes have different kinds of devices.
        """
        plans = [link.ready for link in self._links if link.ready is not None]
        first = plans[0]
        if len({plan.backend for plan in plans}) > 1:
            kinds = ", ".join(f"{link.label}: {link.ready.backend}" for link in self._links if link.ready)
            raise LaunchError(
                f"nodes have different kinds of devices ({kinds}); choose one kind for all nodes with backend=..."
            )
        size = world_size(self._links)
        self.topology = Topology(world_size=size, local_world_size=size, master_addr=first.address)
        self.plan = replace(
            self.plan,
            backend=backends.find(first.backend),
            num_processes=size,
            start_method=first.start_method,
            reason=first.reason,
            fallback=first.fallback,
            num_threads=first.num_threads,
        )
        warnings = dict.fromkeys(text for plan in plans for text in plan.warnings)
        for text in [*warnings, *torch_notes(self._links)] if self.attempt == 0 else ():
            self.emit(Note.of_job(text, "warning"))


class _NodeEnded(Exception):
    """The program on a required node ended before the ranks started."""


_BUILT_IN = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}

"""Session: workers that persist between cells, with the notebook's variables and their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from nblaunch import dashboard as dashboards
from nblaunch import formatting, other_debuggers
from nblaunch.dashboard import Dashboard
from nblaunch.diagnosis.exceptions import HiddenLauncherFrames, hides_launcher
from nblaunch.diagnosis.failure import failure_of
from nblaunch.diagnosis.root_cause import find_root_cause
from nblaunch.errors import JobCancelled
from nblaunch.events import Note
from nblaunch.host import signal_handlers
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.debug_client import Comparison, DebugClient, RankValues, release_kept_failures
from nblaunch.launcher.outcome import EndedAttempt, JobOutcome
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.session.client import ENDED, FailedCommand, RankCommands, SessionClient, SomeRanks
from nblaunch.session.output import CommandReport, SessionOutput, emit
from nblaunch.session.server import serve
from nblaunch.spec import (
    BackendName,
    DashboardKind,
    EngineName,
    LaunchSpec,
    MixedPrecision,
    StartMethod,
    uses,
)
from nblaunch.start_methods.saved_call import save_call
from nblaunch.user_code import running_cell
from nblaunch.wire.argument_paths import ArgPath, modules_in
from nblaunch.wire.exceptions import set_attribute
from nblaunch.wire.worker_commands import Execute, RunFunction, SessionCommand
from nblaunch.worker.inheritance import fresh_processes

T = TypeVar("T")

_END_S = 10.0
_FIRST_LINES_S = 0.3
"""Seconds before output is shown. A shorter command shows its output at the end, with identical lines from several
ranks merged.
"""


class Session(RankCommands):
    """Workers, one per device, that persist between cells and execute code and functions.

    They are forked from the kernel, so every rank has the notebook's variables as they were at that time. Each rank
    keeps its own variables from cell to cell.

    Example::

        with Session(num_processes=4) as session:
            session.execute("x = torch.full((2,), float(torch.distributed.get_rank()))")
            session["x"]                              # rank -> tensor
            accuracy = session.run(train, (model,))   # like notebook_launcher(train, (model,)), on running workers

    Args:
        num_processes: number of workers; None = one per device.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``; the default of an ``Accelerator()`` on the ranks.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"xpu"``, ``"mps"``, ``"xla"`` or ``"torch_tpu"``.
        start_method: ``"auto"``, ``"fork"``, ``"forkserver"`` or ``"spawn"``. Without a fork, the ranks start without
            variables; calls send the functions and values that they use.
        hang_timeout_s: seconds without progress before the position of every rank is shown; None = never.
        threads_per_process: CPU threads per worker; None = usable cores / workers.
        log_dir: folder for logs; None = ``NBLAUNCH_LOG_DIR``, or a private folder in the temporary folder.
        num_nodes: must be 1, because the ranks of a session run on this machine.
        engine: ``"auto"`` or ``"local"``.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is invalid; raised before any process starts.
        LaunchError: the workers could not be started.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        mixed_precision: MixedPrecision = "no",
        backend: BackendName | str = "auto",
        start_method: StartMethod = "auto",
        threads_per_process: int | None = None,
        hang_timeout_s: float | None = 300.0,
        log_dir: str | None = None,
        num_nodes: int | str = 1,
        engine: EngineName = "auto",
    ) -> None:
        with HiddenLauncherFrames():
            _check_machine(engine, num_nodes)
        self._settings: dict[str, Any] = {
            "num_processes": num_processes,
            "mixed_precision": mixed_precision,
            "backend": backend,
            "start_method": start_method,
            "threads_per_process": threads_per_process,
            "hang_timeout_s": hang_timeout_s,
            "log_dir": log_dir,
        }
        self._failed: FailedCommand | None = None
        self._value: tuple[Any, ...] = ()
        self._unloaded_weights: Mapping[ArgPath, dict[str, Any]] = {}
        self._start_whole()

    # --- commands ----------------------------------------------------------------------------------------------------

    def ranks(self, *ranks: int) -> RankCommands:
        """Return an object that sends commands only to some ranks: ``session.ranks(0, 2).execute("loss.item()")``.

        Args:
            *ranks: the ranks; all if none are given.

        Raises:
            ValueError: there are no such ranks.
        """
        with HiddenLauncherFrames():
            return SomeRanks(self, self._checked_ranks(ranks or None))

    def _target(self) -> tuple[Session, Sequence[int]]:
        return self, self._ranks

    def _execute(self, command: Execute, ranks: Sequence[int] | None) -> dict[int, Any]:
        """Execute code on ranks and show their output; return rank -> value.

        Must be called in a :meth:`SessionClient.command` block.
        """
        __tracebackhide__ = True
        chosen = self._checked_ranks(ranks)
        self._client.raise_if_ended()  # check this before anything is displayed
        in_notebook = dashboards.kernel_shell() is not None
        begun = replace(
            self._attempt(self._runner.spec).start_event(), function_name=running_cell() or "commands"
        )
        printer = dashboards.lines_printer(
            first_s=_FIRST_LINES_S, omits_hangs=in_notebook, display_ids=self._display_ids
        )
        emit([printer], [begun])
        rows: list[Dashboard] = []

        def open_rows() -> list[Dashboard]:
            rows.extend(dashboards.choose()[:1] if in_notebook else ())
            emit(rows, [replace(begun, ago_s=time.time() - begun.time_s)])
            return rows

        with self._output.shown_by([printer], open_rows):
            report = self._request(chosen, command)
            outcome = self._outcome(report)
            emit(rows, [outcome.end_event()])
        outcome.with_traceback().raise_error()
        return {rank: result.value_of(rank) for rank, result in report.results().items()}

    @overload
    def run(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        *,
        return_all: Literal[False] = False,
        sync_weights: bool = True,
        dashboard: DashboardKind = "auto",
    ) -> T: ...

    @overload
    def run(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        *,
        return_all: Literal[True],
        sync_weights: bool = True,
        dashboard: DashboardKind = "auto",
    ) -> list[T]: ...

    @overload
    def run(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        *,
        return_all: bool,
        sync_weights: bool = True,
        dashboard: DashboardKind = "auto",
    ) -> T | list[T]: ...

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        return_all: bool = False,
        sync_weights: bool = True,
        dashboard: DashboardKind = "auto",
    ) -> Any:
        """Run ``function(*args)`` on every rank, like ``notebook_launcher``, but on running workers.

        Args:
            function: as in :func:`nblaunch.notebook_launcher`. It is sent to the ranks with cloudpickle, together with
                the notebook variables that it names. These replace the ranks' variables with the same names.
            args: its positional arguments. The trained weights of modules in them are copied back.
            return_all: return the list of all ranks' values.
            sync_weights: load the trained weights into the modules in ``args``.
            dashboard: as for :func:`nblaunch.notebook_launcher`.

        Returns:
            The return value of rank 0, or of all ranks.

        Raises:
            KeyboardInterrupt: the call was interrupted. If every rank nevertheless returned, the weights are loaded and
                :meth:`result` returns the value. Otherwise, the error's ``partial`` contains the values from ranks that
                had returned, by rank. A second interrupt kills the workers: weights in transit are then lost, but the
                value is not.
            JobCancelled: a second interrupt killed ranks that had not returned; the error has the same ``partial``.
            BaseException: as in :func:`nblaunch.notebook_launcher`. The session survives an exception that the function
                raises.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            specs = [
                LaunchSpec(function=function, args=args, return_all=return_all, sync_weights=sync_weights)
            ]
            del function, args  # IPython keeps tracebacks, and with them this frame
            return run_in_session(self, specs.pop(), dashboard=dashboard)

    @hides_launcher
    def result(self) -> Any:
        """Return the value of the last :meth:`run`.

        The value survives an interrupt if the function handled it and returned, or had already returned. It is kept
        until the next command.

        Raises:
            RuntimeError: the last command was not a call, or did not return on every rank.
        """
        if not self._value:
            raise RuntimeError("the last command did not call a function that returned on every rank")
        return self._value[0]

    @hides_launcher
    def weights(self) -> dict[ArgPath, dict[str, Any]]:
        """Return the last :meth:`run`'s trained weights that did not fit the kernel's modules (usually none).

        They are kept until the next command.

        Returns:
            position in ``args`` -> state dict, as in :meth:`nblaunch.Job.weights`.
        """
        return dict(self._unloaded_weights)

    def _run_call(self, spec: LaunchSpec, shown: Sequence[Dashboard]) -> JobOutcome:
        """Call a function on all ranks, show the call as a job, and return its outcome."""
        attempt = self._attempt(spec)
        command = RunFunction(returns_all=spec.return_all, wanted_modules=tuple(attempt.plan.modules))
        with (
            closing(save_call((spec.function, spec.args), _ADVICE)) as saved,
            self._output.shown_by(shown),
        ):
            emit(shown, [attempt.start_event()])
            try:
                report = self._request(self._ranks, command, [saved.fd])
            except JobCancelled as error:
                report = self._output.command
                _, notes = EndedAttempt(attempt, report, report.results()).keep_values(error)
                set_attribute(error, "__notes__", [note.text for note in notes])
                raise
            outcome, notes = EndedAttempt(attempt, report, report.results()).conclude(self.pids)
            if not self.is_running:  # killed after every rank had sent its value
                notes.append(Note.of_job(ENDED, "warning"))
            emit(shown, [*notes, outcome.end_event()])
        self._unloaded_weights = outcome.unloaded_weights
        return outcome

    # --- the debugger ------------------------------------------------------------------------------------------------

    def inspect(self, expression: str, timeout_s: float = 10.0) -> RankValues:
        """Evaluate an expression on every rank, in the innermost frame of user code on that rank.

        If a rank's last command raised an exception or was interrupted, that rank uses the frame where this happened.
        An idle rank evaluates the expression with its variables. A rank that is running a command sent by another
        thread uses the command's current frame, even in a collective.

        Args:
            expression: Python expression, such as ``"batch.shape"``.
            timeout_s: how long to wait for the replies.

        Returns:
            rank -> value; an exception if the expression raised one; a ValueError if the value can't be rebuilt in the
            kernel. Ranks that did not reply are missing.

        Raises:
            LaunchError: the session has ended.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            return self._client.debugger.inspect(expression, timeout_s)

    def compare(self, timeout_s: float = 10.0) -> Comparison:
        """Compare the local variables of the same function across all ranks, like :meth:`nblaunch.Job.compare`.

        The function is the one in which the last command failed, or its innermost caller that is active on all ranks.

        Args:
            timeout_s: how long to wait for the replies.

        Raises:
            LaunchError: the session has ended.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            failed = self._failed
            return self._client.debugger.compare(failed.failed_rank if failed else 0, timeout_s)

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client of the debugger, and the rank to debug, for :func:`nblaunch.debug`.

        Raises:
            RuntimeError: the last command did not fail, or a launch has started since.
            ValueError: the command did not fail on this rank.
        """
        if self._failed is None or self._failed.is_released:
            raise RuntimeError(
                "there is nothing to debug: the last command of the session did not fail, or a launch or "
                "another session has started since"
            )
        return self._failed.find_debugger(rank)

    # --- the workers -------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._runner.plan.num_processes

    @property
    def _ranks(self) -> range:
        return range(self.num_processes)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank that has started."""
        return dict(self._runner.pids)

    @property
    def is_running(self) -> bool:
        """Whether the workers are running."""
        return self._runner.is_running

    def status(self) -> RankValues:
        """Return for each rank ``"idle"``, ``"busy for 3 s"`` or ``"ended"``."""
        ended = self._output.ended if self.is_running else self._ranks
        busy, busy_s = self._client.busy, time.monotonic() - self._client.busy_since_s
        return RankValues(
            {
                rank: "ended" if rank in ended else f"busy for {busy_s:.0f} s" if rank in busy else "idle"
                for rank in self._ranks
            }
        )

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the ranks' command, like the notebook's interrupt button. Works from any thread.

        Variables are kept. A second interrupt kills the workers, and so do five minutes without progress after the
        first. Does nothing while no command is running.
        """
        self._client.interrupt()

    def restart(self) -> None:
        """End the workers and start new ones from the kernel's current state. The ranks' variables are lost."""
        __tracebackhide__ = True
        self.close()
        self._start_whole()

    def close(self) -> None:
        """End the workers, and kill the running command, if any."""
        with signal_handlers.held_back():
            self._failed = None
            self._client.close()
            if not self._runner.ends_within(_END_S):
                self._runner.requests.cancel()
                self._runner.wait()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "ended"
        return f"<Session of {self.num_processes} {self._runner.plan.backend.name} workers, {state}>"

    # --- start -------------------------------------------------------------------------------------------------------

    def _start_whole(self) -> None:
        """Start the workers; leave none behind if an exception is raised, even by a signal handler."""
        __tracebackhide__ = True
        try:
            with HiddenLauncherFrames(), signal_handlers.held_back():
                self._start()
        except BaseException as error:
            runner: JobRunner | None = getattr(self, "_runner", None)
            if runner is not None:
                runner.end_unwatched(error)
            raise

    def _start(self) -> None:
        self._display_ids: set[tuple[int, str]] = set()
        self._output = SessionOutput()
        spec = LaunchSpec(function=serve, is_session=True, sync_weights=False, **self._settings)
        plan = plan_launch(spec, background=True)
        self._runner = JobRunner(spec, plan, [self._output], self._output.wake)
        release_kept_failures()
        with self._output.shown_by([dashboards.lines_printer()]), other_debuggers.untraced():
            if reason := self._runner.plan.fallback:
                text = (
                    f"{reason}. Ranks do not have the notebook's variables: send them with "
                    "session.put(name=value)"
                )
                self._output.on_event(Note.of_job(text))
                self._output.pump()  # the start takes seconds
            self._runner.run_in_background()
        self._runner.requests.cancel_without(self)
        self._runner.raise_if_not_started()
        self._client = SessionClient(self._runner, self._output)

    # --- reports -----------------------------------------------------------------------------------------------------

    def _request(
        self, ranks: Sequence[int], command: SessionCommand, files: Sequence[int] = ()
    ) -> CommandReport:
        """Send a command as :meth:`SessionClient.request` does; keep a failure's frames until the next command."""
        __tracebackhide__ = True
        failed, self._failed, self._value = self._failed, None, ()
        self._unloaded_weights = {}
        if failed is not None:
            failed.release()
        with other_debuggers.untraced():
            report = self._client.request(ranks, command, files)
        for rank, failed_there in report.failed.items():
            if failed_there.info.type_name == "NameError":
                evidence = fresh_processes.explain_in_session(failed_there.info.message)
                report.failed[rank] = replace(failed_there, evidence=(*failed_there.evidence, *evidence))
        if failed_on := sorted(report.failed):
            root = find_root_cause(report)
            self._failed = FailedCommand(
                self._client.debugger, root.rank if root is not None else failed_on[0], failed_on
            )
        return report

    def _checked_ranks(self, ranks: Sequence[int] | None) -> Sequence[int]:
        """Return the chosen ranks.

        Raises:
            ValueError: there are no such ranks.
        """
        wanted = list(self._ranks if ranks is None else ranks)
        if not wanted or any(rank not in self._ranks for rank in wanted):
            given = ", ".join(map(repr, wanted))
            how = (
                ""
                if all(isinstance(rank, int) for rank in wanted)
                else ". Pass each rank as a separate argument: ranks(0, 1)"
            )
            raise ValueError(f"ranks({given}): this session has {formatting.ranks(self._ranks)}{how}")
        return sorted(set(wanted))

    def _outcome(self, report: CommandReport) -> JobOutcome:
        """Return the outcome of a command."""
        if self._client.num_interrupts:
            return JobOutcome("interrupted", KeyboardInterrupt())
        if not report.failed:
            return JobOutcome("done")
        failure = failure_of(report, self.pids, self._runner.log, 0)
        return JobOutcome("failed", failure.error, failure.rank, failure.headline, advice=failure.advice)

    def _attempt(self, spec: LaunchSpec) -> Attempt:
        """Return the call in ``spec`` as an attempt of a job that runs on this session's workers."""
        plan = replace(self._runner.plan, modules=modules_in(spec.args) if spec.sync_weights else {})
        return Attempt(spec, plan, 0, 0, self._runner.topology, self._runner.log)


def _check_machine(engine: str, num_nodes: int | str) -> None:
    """Raise ValueError if the ranks of a session would have to run on other machines."""
    __tracebackhide__ = True
    if engine in ("auto", "local") and num_nodes in (1, "1", "1:1"):
        return
    given: dict[str, Any] = {"engine": engine} if engine not in ("auto", "local") else {}
    given |= {"num_nodes": num_nodes} if num_nodes not in (1, "1", "1:1") else {}
    wanted = ", ".join(f"{name}={value!r}" for name, value in given.items())
    raise ValueError(
        f"Session({wanted}) is not possible: the ranks of a session run on this machine, because commands, variables "
        f"and results are sent over its sockets. Leave {formatting.joined(list(given))} out. To start ranks on other "
        f"machines for one call, use notebook_launcher(function, args, {wanted}); nblaunch.Nodes(...) keeps these "
        "machines ready between calls"
    )


def run_in_session(
    session: Session, spec: LaunchSpec, *, background: bool = False, dashboard: str = "auto"
) -> Any:
    """Run the call in ``spec`` on a session; see :meth:`Session.run`.

    Raises:
        TypeError: ``session`` is not a session.
        ValueError: a setting in ``spec`` can't apply to running workers.
    """
    __tracebackhide__ = True
    if not isinstance(session, Session):
        raise TypeError(f"session={session!r} is {formatting.kind(session)}; pass an nblaunch.Session")
    if background:
        raise ValueError(
            "background=True can't be combined with session=, because a session runs one command at a time"
        )
    if spec.sync_optimizers:
        raise ValueError(
            "sync_optimizers=True can't be combined with session=, because the ranks of a session keep "
            "their optimizers; leave it out, or launch without session="
        )
    session_spec, plan = session._runner.spec, session._runner.plan
    settings = {
        "num_processes": session.num_processes, "backend": plan.backend.name, "start_method": plan.start_method,
    }  # fmt: skip
    for name in _START_SETTINGS:
        value, current = getattr(spec, name), settings.get(name, getattr(session_spec, name))
        if value not in (getattr(LaunchSpec, name), getattr(session_spec, name), current):
            shown = "strategy='spmd'" if name == "is_spmd" else f"{name}={value!r}"
            raise ValueError(
                f"{shown}: the session's workers are already running with {current!r}. Leave it out, or launch "
                "without session="
            )
    spec = replace(spec, **{name: getattr(session_spec, name) for name in _START_SETTINGS})
    client = session._client
    late: KeyboardInterrupt | None = None
    try:
        with client.command():
            client.raise_if_ended()  # check this before anything is displayed
            outcome = session._run_call(spec, dashboards.choose(dashboard))
            outcome.with_traceback().raise_error()
            values = [outcome.values.get(rank) for rank in session._ranks]
            session._value = (values if spec.return_all else values[0],)
            late = outcome.late_interrupt("session.result()")
    except KeyboardInterrupt:
        if late is None:
            raise
        raise late from None  # the rest of the cell must not run
    return session.result()


def execute_and_display(
    session: Session, command: Execute, ranks: Sequence[int] | None = None
) -> dict[int, dict[str, Any]]:
    """Execute a command like :meth:`Session.execute`; return rank -> display of the last value, by MIME type."""
    __tracebackhide__ = True
    with HiddenLauncherFrames(), session._client.command():
        shown = session._execute(command, ranks)
        return {rank: bundle for rank, bundle in shown.items() if bundle}


_START_SETTINGS = [field.name for field, use in uses() if use.is_of_start]
"""Settings that apply for the lifetime of the workers."""

_ADVICE = "or launch without session="

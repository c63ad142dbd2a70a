"""Session: workers that stay between cells, with the variables of the notebook and their own."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from nblaunch import dashboard as dashboards
from nblaunch.dashboard import Dashboard
from nblaunch.diagnosis.rendering import HiddenLauncherFrames
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.errors import LaunchError
from nblaunch.events import AttemptStarted, Event, Exited, ExitStatus, JobEnded, Note, Returned, Started
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.job import Job
from nblaunch.launcher.outcome import JobOutcome, conclude_job
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.session.messages import Assign, Call, Close, Command, Execute, LeaveGroup, Reply
from nblaunch.session.output import SessionOutput
from nblaunch.session.server import serve
from nblaunch.session.sockets import Door, Link
from nblaunch.session.values import RankValues
from nblaunch.spec import LaunchSpec
from nblaunch.wire import outbox, payload
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.exceptions import set_attribute
from nblaunch.wire.modules import modules_in
from nblaunch.wire.outbox import RankResult

Replies = dict[int, tuple[Reply, list[int]]]
"""rank -> its reply, and descriptors of files that came with it."""

_TICK_S = 0.1
_PATIENCE_S = 0.5
"""From the first failure until the other ranks, which may wait for the failed one, are interrupted."""

_END_S = 10.0


class Session:
    """Workers that stay, one per device, and run what they are sent.

    They are forked from the kernel: every variable that the notebook has then is there on every rank, and each rank
    keeps its own from cell to cell.

    Example::

        with Session(num_processes=4) as session:
            session.execute("x = torch.full((2,), float(rank))")
            session["x"]                              # rank -> tensor
            accuracy = session.run(train, (model,))   # as notebook_launcher(train, (model,)), on warm workers

    Args:
        num_processes: number of workers; None = one per device.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``; the default of an ``Accelerator()`` on the ranks.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"xla"``.
        start_method: ``"auto"``, ``"fork"``, ``"forkserver"`` or ``"spawn"``. Without a fork the ranks begin with no
            variables; calls travel with the functions and values that they name.
        threads_per_process: CPU threads of each worker; None = usable cores / workers.
        log_dir: folder for logs; None = ``NBLAUNCH_LOG_DIR``, or a private folder in the temporary folder.

    Raises:
        TypeError, ValueError, RuntimeError: an argument can't be used; raised before any process starts.
        LaunchError: the workers could not be started.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        mixed_precision: str = "no",
        backend: str = "auto",
        start_method: str = "auto",
        threads_per_process: int | None = None,
        log_dir: str | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "num_processes": num_processes,
            "mixed_precision": mixed_precision,
            "backend": backend,
            "start_method": start_method,
            "threads_per_process": threads_per_process,
            "log_dir": log_dir,
        }
        with HiddenLauncherFrames():
            self._start()

    # --- what ranks do -----------------------------------------------------------------------------------------------

    def execute(self, code: str, *, ranks: Sequence[int] | None = None) -> RankValues:
        """Run ``code`` on the ranks as a cell is run: ``await`` at the top, ``%`` magics, ``!`` commands.

        What they print is shown in the running cell, with the rank.

        Args:
            code: Python.
            ranks: which; None = all.

        Returns:
            rank -> the value of a last expression; None on ranks without one. Tensors arrive on the CPU, and an
            :class:`nblaunch.wire.pickle_errors.Unpicklable` stands for what can't be pickled.

        Raises:
            KeyboardInterrupt: the command was interrupted. Names that ranks have set stay.
            WorkerDied: a rank has ended; the session has then ended, too.
            BaseException: what the code raised on the first rank that failed, with its original type.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self._count += 1
            replies = self._execute(Execute(code=code, filename=f"<session command {self._count}>"), ranks)
            return RankValues({rank: _value_of(rank, *reply) for rank, reply in replies.items()})

    def show_command(self, command: Execute, ranks: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """Run a command as :meth:`execute` does; return rank -> the display of a last value, by MIME type."""
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            replies = self._execute(command, ranks)
            return {rank: dict(reply.shown) for rank, (reply, _) in replies.items() if reply.shown}

    def _execute(self, command: Execute, ranks: Sequence[int] | None) -> Replies:
        """Run code on ranks and show what they print meanwhile; return their replies, none of which has failed."""
        __tracebackhide__ = True
        chosen = self._checked(ranks)
        printer = dashboards.lines_printer()
        printer.on_event(self._announcement("", ""))
        with self._output.shown_by([printer]):
            replies = self._ask(chosen, command)
        self._raise_failures(replies)
        return replies

    def __getitem__(self, name: str) -> RankValues:
        """Return rank -> the value of a variable.

        Raises:
            NameError: a rank has no such variable.
        """
        __tracebackhide__ = True
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no name of a variable; session.execute() takes expressions")
        return self.execute(name)

    def put(self, *, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Set variables on the ranks: ``session.put(lr=0.1)``.

        Args:
            ranks: which; None = all.
            **values: name -> value, pickled; tensors are shared by the ranks until one writes to them.

        Raises:
            PayloadError: a value can't be pickled.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self._raise_failures(self._ask(self._checked(ranks), Assign(), values))

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        return_all: bool = False,
        sync_weights: bool = True,
        dashboard: str = "auto",
    ) -> Any:
        """Run ``function(*args)`` on every rank, as ``notebook_launcher`` does, on workers that run already.

        Args:
            function: as for :func:`nblaunch.notebook_launcher`. It travels to the ranks by cloudpickle, with what it
                names; ranks that were forked have the variables of the notebook as they were then.
            args: its positional arguments; the weights of modules among them come back.
            return_all: return the list of all ranks' values.
            sync_weights: load the trained weights of the modules in ``args`` back into these very modules.
            dashboard: as for :func:`nblaunch.notebook_launcher`.

        Returns:
            The return value of rank 0, or of all ranks.

        Raises:
            BaseException: as :func:`nblaunch.notebook_launcher`. After one of the function's the session goes on.
        """
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            specs = [
                LaunchSpec(function=function, args=args, return_all=return_all, sync_weights=sync_weights)
            ]
            del function, args  # IPython keeps tracebacks and so this frame
            return self.run_spec(specs.pop(), dashboard=dashboard)

    def run_spec(self, spec: LaunchSpec, *, background: bool = False, dashboard: str = "auto") -> Any:
        """Run the call of ``spec`` as :meth:`run` describes.

        Raises:
            ValueError: a setting of it can't hold for workers that run already.
        """
        __tracebackhide__ = True
        if background:
            raise ValueError("background=True: a session does one thing at a time; launch without session=")
        own = self._runner.spec
        for name in _OF_START:
            value = getattr(spec, name)
            if value not in (getattr(LaunchSpec, name, None), getattr(own, name)):
                raise ValueError(
                    f"{name}={value!r}: the workers of the session run already, with {getattr(own, name)!r}"
                )
        spec = replace(spec, **{name: getattr(own, name) for name in _OF_START})
        plan = replace(self._runner.plan, modules=modules_in(spec.args) if spec.sync_weights else {})
        attempt = Attempt(spec, plan, 0, self._runner.topology, self._runner.log)
        outcome = self._run_shown(attempt, dashboards.choose(dashboard))
        outcome.with_traceback().raise_error()
        return [outcome.values.get(rank) for rank in self.ranks] if spec.return_all else outcome.values.get(0)

    def _run_shown(self, attempt: Attempt, shown: Sequence[Dashboard]) -> JobOutcome:
        """Run a call on all ranks and show it as a job; return its outcome."""
        spec, now = attempt.spec, time.time()
        command = Call(sends_weights_of=tuple(attempt.plan.modules))
        start = self._announcement(spec.function_name, spec.mixed_precision)
        _emit(shown, [start, *(Started(rank, now, pid=pid) for rank, pid in self.pids.items())])
        with self._output.shown_by(shown):
            replies = self._ask(self.ranks, command, (spec.function, spec.args))
            outcome, notes = self._conclude(attempt, replies)
            _emit(shown, [*notes, *_events_of(replies), _end_of(outcome)])
        return outcome

    # --- the workers -------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """How many ranks there are."""
        return self._runner.topology.world_size

    @property
    def ranks(self) -> range:
        """All ranks."""
        return self._runner.ranks

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process."""
        return dict(self._runner.pids)

    @property
    def is_running(self) -> bool:
        """Whether the workers run."""
        return self._runner.is_running

    def status(self) -> RankValues:
        """Return rank -> ``"idle"``, ``"busy for 3 s"`` or ``"ended"``."""
        if not self.is_running:
            return RankValues(dict.fromkeys(self.ranks, "ended"))
        busy = f"busy for {time.monotonic() - self._busy_since:.0f} s"
        return RankValues({rank: busy if rank in self._busy else "idle" for rank in self.ranks})

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run now, as the notebook's interrupt button does. Any thread.

        Names that they have set stay. The second time, the workers are killed.
        """
        self._num_interrupts += 1
        if self._num_interrupts > 1:
            self._runner.requests.cancel()
        self._signal(self._busy)

    def restart(self) -> None:
        """End the workers, and start new ones from the kernel as it is now. What the ranks had is gone."""
        __tracebackhide__ = True
        with HiddenLauncherFrames():
            self.close()
            self._start()

    def close(self) -> None:
        """End the workers. What runs on them is killed."""
        if self._busy:
            self._runner.requests.cancel()
        for link in self._links.values():
            with suppress(OSError):
                link.send(Close())
        if not self._runner.wait(_END_S):
            self._runner.requests.cancel()
            self._runner.wait()
        self._release()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "ended"
        return f"<Session of {self.num_processes} {self._runner.plan.backend.name} workers, {state}>"

    # --- start and end -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._links: dict[int, Link] = {}
        self._busy: set[int] = set()
        self._busy_since = 0.0
        self._num_interrupts = 0
        self._group = 1
        self._count = 0
        self._lock = threading.Lock()
        self._output = SessionOutput()
        door = Door()
        try:
            spec = LaunchSpec(
                function=serve,
                args=(door.address, door.key),
                sync_weights=False,
                hang_timeout_s=None,
                **self._settings,
            )
            self._runner = JobRunner(spec, plan_launch(spec, background=True), [self._output])
            self._runner.run_in_background()
            self._end = weakref.finalize(self, self._runner.requests.cancel)
            Job(self._runner).raise_if_not_started()
            self._links = door.accept(self.ranks, lambda: self.is_running)
        finally:
            door.close()
        if len(self._links) < len(self.ranks):
            self._raise_end()

    def _release(self) -> None:
        self._end.detach()
        for link in self._links.values():
            link.close()
        self._links = {}
        self._busy = set()

    def _raise_end(self) -> None:
        """Raise why the workers have ended."""
        __tracebackhide__ = True
        self._runner.wait()
        self._release()
        outcome = self._runner.outcome
        assert outcome is not None, "the job of the session still runs"
        if outcome.error is not None:
            set_attribute(outcome.error, "__notes__", [*getattr(outcome.error, "__notes__", ()), _ENDED])
            outcome.raise_error()
        raise LaunchError(_ENDED)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _checked(self, ranks: Sequence[int] | None) -> Sequence[int]:
        """Return the ranks that were chosen.

        Raises:
            ValueError: there are no such ranks.
        """
        chosen = sorted(set(self.ranks if ranks is None else ranks))
        if not chosen or not set(chosen) <= set(self.ranks):
            raise ValueError(
                f"ranks={ranks!r}: this session has the ranks {self.ranks[0]} to {self.ranks[-1]}"
            )
        return chosen

    def _ask(self, ranks: Sequence[int], command: Command, content: Any = None) -> Replies:
        """Send a command to ranks and wait for their replies."""
        if not self.is_running:
            raise LaunchError(_ENDED)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "the session is running another command; wait for it, or call session.interrupt()"
            )
        try:
            with self._interruptible():
                return self._exchange(ranks, command, content)
        finally:
            self._busy = set()
            self._lock.release()

    def _exchange(self, ranks: Sequence[int], command: Command, content: Any) -> Replies:
        if len(ranks) == len(self.ranks) and isinstance(command, (Execute, Call)):
            command = replace(command, group=self._group)
        files = [_file_of(content)] if content is not None else []
        try:
            self._busy, self._busy_since = set(ranks), time.monotonic()
            for rank in ranks:
                self._send(rank, command, files)
        finally:
            for fd in files:
                os.close(fd)
        replies = self._collect()
        if any(reply.has_output for reply, _ in replies.values()):
            self._runner.requests.ask_logs().result()
        if len(ranks) > 1 and any(reply.failed is not None for reply, _ in replies.values()):
            self._group += 1  # the ranks may be at odds in the present one
        return replies

    def _send(self, rank: int, command: Command, files: Sequence[int] = ()) -> None:
        try:
            self._links[rank].send(command, files)
        except OSError:
            self._raise_end()

    def _collect(self) -> Replies:
        """Wait for the replies of the busy ranks; free those that wait for a rank that has failed."""
        replies: Replies = {}
        failed_s: float | None = None
        while self._busy:
            waiting = {self._links[rank].connection: rank for rank in self._busy}
            for connection in wait(list(waiting), _TICK_S):
                rank = waiting[connection]  # type: ignore[index]
                replies[rank] = self._receive(rank)
                self._busy.discard(rank)
                if replies[rank][0].failed is not None and failed_s is None:
                    failed_s = time.monotonic()
            self._output.pump()
            if self._num_interrupts:
                self._signal(self._busy)  # again: one that arrives before a rank has begun has no effect
            patience_s = 0.0 if self._num_interrupts else _PATIENCE_S
            if failed_s is not None and self._busy and time.monotonic() - failed_s > patience_s:
                failed_s = None
                self._free_waiting(replies)
        return {rank: replies[rank] for rank in sorted(replies)}

    def _receive(self, rank: int) -> tuple[Reply, list[int]]:
        try:
            return self._links[rank].receive()
        except (EOFError, OSError):
            self._raise_end()
            raise

    def _free_waiting(self, replies: Replies) -> None:
        """Interrupt the ranks that have not replied. Those in a collective return once the failed ones have left it."""
        self._signal(self._busy)
        for rank, (reply, _) in replies.items():
            if reply.failed is not None:
                self._send(rank, LeaveGroup())
                self._receive(rank)

    def _signal(self, ranks: Sequence[int] | set[int]) -> None:
        pids = self.pids
        for rank in list(ranks):
            with suppress(ProcessLookupError, KeyError):
                os.kill(pids[rank], signal.SIGINT)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Pass interrupts of the kernel on to the ranks while the block runs; raise KeyboardInterrupt after it."""
        self._num_interrupts = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda signum, frame: self.interrupt())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)

    # --- what came of a command --------------------------------------------------------------------------------------

    def _raise_failures(self, replies: Replies) -> None:
        """Raise what a command raised on the first rank that failed."""
        __tracebackhide__ = True
        if all(reply.failed is None for reply, _ in replies.values()):
            if self._num_interrupts:
                raise KeyboardInterrupt
            return
        spec = LaunchSpec(function=serve, args=("", b""), sync_weights=False)
        attempt = Attempt(spec, self._runner.plan, 0, self._runner.topology, self._runner.log)
        self._conclude(attempt, replies)[0].with_traceback().raise_error()

    def _conclude(self, attempt: Attempt, replies: Replies) -> tuple[JobOutcome, list[Note]]:
        """Return the outcome of a command as that of a job, and notes about it."""
        report = AttemptReport(
            returned={
                rank: reply.returned or Returned(rank, reply.time_s)
                for rank, (reply, _) in replies.items()
                if reply.failed is None
            },
            weights={rank: dict(reply.weights) for rank, (reply, _) in replies.items()},
            failed={rank: reply.failed for rank, (reply, _) in replies.items() if reply.failed},
            exits={rank: (ExitStatus(0), time.time()) for rank in replies},
            interrupted=self._num_interrupts > 0,
        )
        results = {rank: _take_result(*reply) for rank, reply in replies.items()}
        return conclude_job(attempt, report, results, self.pids, [])

    def _announcement(self, function_name: str, mixed_precision: str) -> Event:
        """Return the event that begins a display."""
        plan = self._runner.plan
        return AttemptStarted(
            rank=-1,
            time_s=time.time(),
            function_name=function_name,
            num_processes=self.num_processes,
            backend=plan.backend.name,
            start_method=plan.start_method,
            reason=plan.reason,
            log_dir=str(self._runner.log.attempt_path(0)),
            mixed_precision=mixed_precision,
        )


_OF_START = ("num_processes", "backend", "start_method", "threads_per_process", "num_nodes", "engine")
"""Settings that only the start of workers can give them."""

_ENDED = "the session has ended, and what its ranks had is gone; session.restart() starts new ones"


def _emit(shown: Sequence[Dashboard], events: Sequence[Event]) -> None:
    for event in events:
        for dashboard in shown:
            dashboard.on_event(event)


def _events_of(replies: Replies) -> Iterator[Event]:
    """Yield how each rank has ended, as a job's dashboards learn it."""
    for rank, (reply, _) in replies.items():
        if reply.failed is not None:
            yield reply.failed
        elif reply.returned is not None:
            yield reply.returned
        yield Exited(rank, time.time(), status=ExitStatus(0 if reply.failed is None else 1))


def _end_of(outcome: JobOutcome) -> Event:
    return JobEnded(
        -1, time.time(), outcome=outcome.status, failed_rank=outcome.failed_rank, message=outcome.message
    )


def _file_of(content: Any) -> int:
    fd = create_memory_file("nblaunch-command")
    try:
        payload.dump(content, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take_result(reply: Reply, files: Sequence[int]) -> RankResult:
    try:
        if reply.returned is None or not files:
            return RankResult(value=reply.value)
        return outbox.read(files[0], reply.returned.value_location, reply.weights)
    finally:
        for fd in files:
            os.close(fd)


def _value_of(rank: int, reply: Reply, files: Sequence[int]) -> Any:
    result = _take_result(reply, files)
    if result.value_error:
        raise ValueError(f"the value of rank {rank} can't be rebuilt in the kernel: {result.value_error}")
    return result.value

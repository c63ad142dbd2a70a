"""The life of one worker, from its first instruction to its last.

    other_debuggers  detaches from the kernel's debugger
    process_control  starts a POSIX session, ends with its parent, drops the kernel's signal handlers, handles SIGINT
    output           redirects descriptors 1 and 2 to the log file and 0 to /dev/null; replaces ``sys.stdin``,
                     ``sys.stdout`` and ``sys.stderr``; rank 0 of a script keeps its input
    process_control  asks to be killed first when memory runs out; writes stacks on request
    inheritance      drops state that belongs only to the kernel; shows text instead of HTML; adapts a cell's Trainers
    files            detects ranks that write to the same file that the kernel opened
    payload          pickles definitions in cells by value for fresh multiprocessing processes
    signs            counts bars and parameters as progress, and optimizer_steps counts steps
    import_times     explains slow imports
    file_writes      records which files the function saves, and how long that takes
    context          sets environment, backend, thread counts, displays, ``nblaunch.context``; the debugger's hook
    ──> Started
    function         loads the call; delivery records the modules' tensors; calls the user's function
    delivery         the value ──> Returned ──> the state of each module or optimizer ──> StateSent
                     (if the function raised: ──> Failed; after ``sys.exit(n)`` with n != 0: only an exit code;
                     if the user interrupted it: ──> Interrupted, the states, Failed)
    finish           joins threads after success; runs exit handlers; waits until the kernel or the launcher has
                     read the queues that the function filled; flushes files that are still open; after success,
                     leaves process groups except gloo's; ``os._exit``

A worker never returns to the code that forked it.

A process that the function forks (for a data loader or a pool, for example) inherits the rank's pipe and board slot.
Its displays and logs appear under the rank; its state and result are ignored.
"""

from __future__ import annotations

import atexit
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from nblaunch import backends, context, env, other_debuggers
from nblaunch.backends import process_group
from nblaunch.backends.base import Reporters
from nblaunch.context import ProcessContext
from nblaunch.events import Fact, Note, PutUnread, Started, WorkerState
from nblaunch.host import descendants
from nblaunch.host.sockets import Connection
from nblaunch.progress import frameworks, plain_loops, signs
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board, Slot
from nblaunch.wire.channel import EventSender
from nblaunch.wire.locks import WorkerLocks
from nblaunch.wire.originals import Originals
from nblaunch.wire.pickling import payload
from nblaunch.wire.worker_commands import CommandConnection
from nblaunch.worker import (
    collective_hooks,
    file_writes,
    frames,
    import_times,
    output,
    process_control,
)
from nblaunch.worker.delivery import Delivery
from nblaunch.worker.failure import describe_failure
from nblaunch.worker.inheritance import (
    connections,
    fresh_processes,
    kernel_only,
    lost_changes,
    queues,
    tracker_runs,
    unfinished_files,
)
from nblaunch.worker.inheritance.files import KernelFiles
from nblaunch.worker.optimizer_steps import steps

if TYPE_CHECKING:
    from nblaunch.worker.debugger import Debugger


def run(
    assignment: Assignment,
    load_call: Callable[[], FunctionCall],
    slot: Slot | None = None,
    originals: Originals | None = None,
    files: KernelFiles | None = None,
) -> NoReturn:
    """Run the worker that ``assignment`` describes, then end the process.

    Args:
        assignment: the worker's task.
        load_call: returns the function and its arguments. It is called once output is being captured, so that an import
            error in a pickled function is shown like any other.
        slot: the worker's slot on the board, if the caller has already mapped the board.
        originals: where the worker can read the launcher's tensors for the call; None if it can't.
        files: files that the parent had open when it forked this process; None in a fresh interpreter.
    """
    exit_code = 1
    try:
        exit_code = _Worker(assignment, slot, files).run(load_call, originals)
    except BaseException:
        # The cause is an error in nblaunch, a late interrupt, or a function that closed all descriptors.
        output.append_to_log(assignment.log_path, traceback.format_exc())
    finally:
        os._exit(exit_code)


class _Worker:
    """One rank's process and its connections to the launcher. The new process creates this object first.

    Args:
        assignment: the rank's task.
        slot: as in :func:`run`.
        files: as in :func:`run`.
    """

    def __init__(self, assignment: Assignment, slot: Slot | None, files: KernelFiles | None = None) -> None:
        other_debuggers.leave()
        process_control.lead_posix_session()
        process_control.end_with_parent(assignment.parent_pid)
        process_control.reset_signals()
        descendants.carry(assignment.descendant_tag)
        self.assignment = assignment = assignment.with_high_descriptors()
        self.slot = slot or Board(assignment.topology.world_size, assignment.board_fd).slot(assignment.rank)
        self.locks = WorkerLocks(assignment.board_fd, assignment.rank)
        self.interrupts = process_control.Interrupts(
            self.slot, process_control.FunctionBounds(_call.__code__, _Worker._run_function.__code__)
        )
        self.child_handler = process_control.ChildHandler()
        self.sender = EventSender(assignment.event_fd)
        self.files = files
        self._state_before_compiling = WorkerState.RUNNING
        self._is_subprocess = False
        self._debugger: Debugger | None = None
        self._passed_breakpoints: set[str] = set()

    def run(self, load_call: Callable[[], FunctionCall], originals: Originals | None) -> int:
        """Prepare, call the function, report the outcome, finish; return the exit code."""
        # Keep the value and the error until the worker has finished, because the process may have to wait for other
        # ranks while it frees them.
        try:
            self._prepare()
            self._watch_imports()
            frames.begin_stacks_at_function()
            file_writes.leave_out_present_objects()
            process_control.unblock_signals()
            with self.interrupts, self.child_handler:
                function, args = load_call()
            _value, exit_code = self._run_function(function, args, originals)
        except BaseException as error:
            exit_code = self._report_failure(error)
            return exit_code if self._is_subprocess else self._finish(exit_code)
        return exit_code if self._is_subprocess else self._finish(exit_code)

    def _run_function(
        self, function: Callable[..., Any], args: tuple[Any, ...], originals: Originals | None
    ) -> tuple[Any, int]:
        """Call the function and deliver what it returned; return the value and the exit code."""
        assignment = self.assignment
        delivery = Delivery(
            assignment.topology,
            assignment.outbox_fd,
            assignment.returns_value,
            args,
            originals,
            assignment.wanted_modules,
            assignment.wanted_optimizers,
            assignment.is_main,
        )
        if assignment.post_mortem:
            process_group.extend_collective_timeout()
        changes = lost_changes.Changes(
            function,
            args,
            is_forked=not fresh_processes.is_fresh_process(),
            advice="" if assignment.wanted_optimizers else lost_changes.IN_A_LAUNCH,
            collected=delivery.modules,
        )
        try:
            with self.interrupts, self.child_handler:
                value, exit_code = _call(function, args)
        except KeyboardInterrupt:
            if self.slot.keeps_weights and not self._is_subprocess:
                self._deliver_interrupted(delivery)
            raise
        if self._is_subprocess:
            return value, _end_subprocess(exit_code)
        if exit_code == 0:
            # Set the state at once, so that the value is not lost if an interrupt arrives.
            self.slot.set_state(WorkerState.FINISHING)
        process_group.drop_destroyed_groups()
        if exit_code != 0:
            return value, exit_code
        output.show_pending_figures()
        context.current().flush_losses()
        for lost in changes.describe(value):
            self._note(lost)
        for sent in delivery.results(value, left_by_exit=value is _EXITED):
            self.sender.send(sent)
        return value, 0

    def _deliver_interrupted(self, delivery: Delivery) -> None:
        """Deliver what the function had trained before the user interrupted it."""
        process_group.drop_destroyed_groups()
        self.slot.set_state(WorkerState.FINISHING)
        for sent in delivery.interrupted_states():
            self.sender.send(sent)

    def _report_failure(self, error: BaseException) -> int:
        """Send ``error``, which ended the function or its preparation, to the launcher; return the exit code."""
        if self._is_subprocess:
            if isinstance(error, KeyboardInterrupt):  # the rank reports the interrupt
                return 1
            traceback.print_exception(error)
            return _end_subprocess(1)
        self.slot.set_state(WorkerState.FAILED)
        self.sender.send(describe_failure(self.assignment.rank, error, self._evidence(error)))
        if self._debugger is not None and self.assignment.post_mortem:
            self._wait_at(error, self._debugger)
        return 1

    def _wait_at(self, error: BaseException, debugger: Debugger) -> None:
        """Hold the worker at ``error`` until the kernel releases or interrupts it."""
        try:
            with self.interrupts:
                debugger.wait_at(error)
        except KeyboardInterrupt:
            return

    def _prepare(self) -> None:
        assignment = self.assignment
        kernel_streams = (sys.stdout, sys.stderr)
        output.capture(assignment.log_path, keeps_input=assignment.reads_input)
        process_control.prefer_for_oom_kill()
        process_control.watch_faults(assignment.stacks_path)
        kernel_only.leave_kernel(kernel_streams)
        if not assignment.reads_input:
            kernel_only.reject_input(is_script=assignment.is_script)
        elif assignment.has_breakpoints:  # the launcher's user sits at a terminal
            output.announce_input(assignment.rank, self.sender.send)
        payload.send_cells_by_value()
        self.slot.record_spans()
        steps.count_on(self.slot)
        signs.count_progress(self.slot)
        num_collectives = collective_hooks.record_collectives(self.slot)
        file_writes.FileWrites(assignment.rank, self.slot, self.sender.send, num_collectives).watch()
        process_group.adapt_joining(assignment.topology)
        env.apply(assignment.environment)
        backend = backends.find(assignment.backend, assignment.registered_backend)
        backend.prepare_worker(assignment.topology)
        if assignment.is_spmd:
            backend.enable_spmd()
        _limit_threads(1 if assignment.restricts_threads else assignment.num_threads)
        output.connect_displays(assignment.rank, self.sender.send)
        context.install(
            ProcessContext(
                topology=assignment.topology,
                backend=backend,
                slot=self.slot,
                emit=self.sender.send,
                locks=self.locks,
                parent_pid=assignment.parent_pid,
                accelerator_defaults=assignment.accelerator_defaults,
                attempt=assignment.attempt,
                connection=CommandConnection(assignment.command_fd) if assignment.command_fd >= 0 else None,
                key=assignment.key,
                is_launched=True,
                num_collectives=num_collectives,
            )
        )
        plain_loops.watch()
        frameworks.watch(assignment.rank)
        process_group.adapt_groups(assignment.topology)
        self._watch_objects_of_kernel()
        self._prepare_debugger()
        os.register_at_fork(after_in_child=self._become_subprocess)
        backend.set_reporters(Reporters(self._note, self._show_compiling, self._report_fact))
        self.slot.set_state(WorkerState.RUNNING)
        self.sender.send(Started(rank=assignment.rank, pid=os.getpid()))
        if assignment.restricts_threads and assignment.num_threads > 1 and assignment.rank == 0:
            self.sender.send(Note.of_job(_ONE_THREAD.format(assignment.num_threads)))

    def _watch_objects_of_kernel(self) -> None:
        """Repair the kernel's tracker runs, files and connections in this worker, or report their use."""
        tracker_runs.watch(self._warn)
        if self.files is not None:
            closed = connections.leave_to_first_rank(self._closed_connections)
            connections.renew(self.files.channels | closed)
            connections.watch_pipes(self.files.channels)
            self.files.watch(self.assignment.rank, self.locks, self._warn)
        else:
            unfinished_files.reject_writes_to_copies()

    def _watch_imports(self) -> None:
        """Explain slow imports on the first rank only, because all ranks import the same packages."""
        if self.assignment.rank == 0:
            is_fresh = self.files is None or fresh_processes.is_fresh_process()
            # A script's ranks have no kernel in which the user could import something before the launch.
            import_times.watch(is_fresh or self.assignment.is_script, self._note)

    def _prepare_debugger(self) -> None:
        """Let the kernel inspect this worker within the limits that the launch sets."""
        sys.breakpointhook = (
            self._stop_at_breakpoint if self.assignment.has_breakpoints else self._pass_breakpoint
        )
        other_debuggers.redirect_set_trace()
        if self.assignment.post_mortem:
            # It answers even while the rank is waiting in a collective.
            self._debugger = self._start_debugger()

    def _start_debugger(self) -> Debugger:
        from nblaunch.worker.debugger import Debugger

        connection = context.current().connection
        assert connection is not None, "a launch with a debugger gives its workers a connection"
        debugger = Debugger(self.assignment.rank, connection)
        debugger.start()
        return debugger

    def _stop_at_breakpoint(self, *args: object, **kwargs: object) -> None:
        """Open pdb at ``breakpoint()``, except in a process that the function forked, which has no input."""
        if not self._is_subprocess:
            self._debugger = self._debugger or self._start_debugger()
            self._debugger.stop_at(other_debuggers.caller(sys._getframe(1)))

    def _pass_breakpoint(self, *args: object, **kwargs: object) -> None:
        """Skip ``breakpoint()`` with a note, because there is no interactive input."""
        frame = other_debuggers.caller(sys._getframe(1))
        place = f"line {frame.f_lineno} of {frame.f_code.co_name}"
        if place not in self._passed_breakpoints:
            self._passed_breakpoints.add(place)
            text = f"breakpoint() at {place} is skipped, because there is no interactive input"
            self.sender.send(Note(rank=self.assignment.rank, text=text))

    def _become_subprocess(self) -> None:
        """Give up the rank in a process that was just forked from the worker."""
        self._is_subprocess = True
        self.slot.detach()
        self.locks.detach()
        self.interrupts.reset_in_subprocess()
        output.renew_buffers()
        process_control.watch_faults_of_subprocess()

    def _evidence(self, error: BaseException) -> tuple[str, ...]:
        """Return evidence for ``error``: connections, names, processes, the device. A failure never hides the error."""
        try:
            of_connections = connections.explain(error, self._closed_connections, self.assignment.rank)
            of_names = fresh_processes.explain(error)
            of_processes = (*connections.explain_process(error), *process_group.explain_launcher(error))
            of_device = backends.find(self.assignment.backend).explain_failure(error)
            return *of_connections, *of_names, *of_processes, *of_device
        except Exception as broken:
            return (f"(the device could not be queried: {type(broken).__name__}: {broken})",)

    @property
    def _closed_connections(self) -> Sequence[Connection]:
        """The kernel's connections that belong to another rank."""
        is_first = self.assignment.topology.local_rank == 0
        return () if is_first or self.files is None else self.files.connections

    def _note(self, text: str) -> None:
        """Emit a note that is the same on all ranks, from the first rank only."""
        if self.assignment.rank == 0:
            self.sender.send(Note.of_job(text))

    def _warn(self, text: str) -> None:
        """Emit a warning about the whole job from this rank."""
        self.sender.send(Note.of_job(text, "warning"))

    def _report_unread(self, pipes: tuple[int, ...], has_tensors: bool) -> None:
        """Report that this rank is waiting for others to read the values that it put into queues."""
        self.sender.send(PutUnread(self.assignment.rank, pipes=pipes, has_tensors=has_tensors))

    def _report_fact(self, name: str, text: str) -> None:
        """Report a fact for the table's header, from the first rank only."""
        if self.assignment.rank == 0:
            self.sender.send(Fact(name=name, text=text))

    def _show_compiling(self, is_compiling: bool) -> None:
        if is_compiling:
            if self.slot.state is not WorkerState.COMPILING:
                self._state_before_compiling = self.slot.state
                self.slot.set_state(WorkerState.COMPILING)
        elif self.slot.state is WorkerState.COMPILING:
            self.slot.set_state(self._state_before_compiling)

    def _finish(self, exit_code: int) -> int:
        """Do what the interpreter does at exit: run exit handlers and, after success, join threads.

        Errors are printed, not raised.
        """
        try:
            # The interpreter calls these functions at exit, but os._exit skips them. None of them has a public name.
            if exit_code == 0:
                threading._shutdown()  # type: ignore[attr-defined]  # joins threads that may still be writing files
            atexit._run_exitfuncs()
            queues.hand_over(self.slot, self._report_unread, self._warn)
            if multiprocessing.process._children or multiprocessing.util._finalizer_registry:  # type: ignore[attr-defined]
                multiprocessing.util._exit_function()  # type: ignore[attr-defined]
            file_writes.write_left_open()
            if self.files is not None:
                self.files.flush()
            output.flush_c_streams()
            if exit_code == 0:
                # NCCL waits for operations that it began with other ranks; after a failure, it would wait until the
                # launcher killed this process.
                process_group.leave_at_exit()
        except BaseException as error:
            print(f"while the worker was ending: {type(error).__name__}: {error}", file=sys.stderr)
        lost = output.flush()
        if lost:
            text = f"{lost} bytes of output were lost, because the disk had no space for {self.assignment.log_path}"
            self.sender.send(Note(rank=self.assignment.rank, text=text))
        return exit_code


_EXITED = object()
"""The value of a function that called ``sys.exit``."""

_ONE_THREAD = (
    "every worker computes with one thread instead of {}, because this process's OpenMP library can't be paused "
    "for a fork; start_method='forkserver' avoids this"
)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    """Call the user's function; ``sys.exit(n)`` gives exit code ``n`` instead of a value."""
    try:
        return function(*args), 0
    except SystemExit as leaving:
        if _has_rejected_arguments(leaving):
            raise RuntimeError(_PARSED.format(sys.argv[1:])).with_traceback(leaving.__traceback__) from None
        if leaving.code is None or leaving.code == 0:
            return _EXITED, 0
        if isinstance(leaving.code, int):
            return _EXITED, leaving.code & 0xFF or 1
        print(leaving.code, file=sys.stderr)
        return _EXITED, 1


_PARSED = (
    "argparse rejected the command line. In a notebook, that is the kernel's command line, {}. Pass the arguments "
    "yourself, as in parse_args(['--lr', '0.1']), or call parse_args([]) to use the defaults"
)


def _has_rejected_arguments(leaving: SystemExit) -> bool:
    """Return whether ``argparse`` is exiting in a notebook's worker because it can't parse the arguments.

    In a script, ``argparse`` reads the script's own command line, and the caller expects its exit code. The last frame
    need not be in ``argparse``, because wandb and other libraries replace ``sys.exit`` in the kernel.
    """
    is_of_argparse = any(
        frame.f_globals.get("__name__") == "argparse" and frame.f_code.co_name == "exit"
        for frame, _ in traceback.walk_tb(leaving.__traceback__)
    )
    return leaving.code == 2 and is_of_argparse and "ipykernel" in os.path.basename(sys.argv[0])


def _end_subprocess(exit_code: int) -> int:
    """End a forked process that has left the function; return no value and run no exit handlers."""
    print(
        f"process {os.getpid()}, which the function forked, left the function and ends here. The rank returns the "
        "worker's value. End forked processes with os._exit(0).",
        file=sys.stderr,
    )
    threading._shutdown()  # type: ignore[attr-defined]
    output.flush()
    return exit_code


def _limit_threads(num_threads: int) -> None:
    """Limit CPU operations to their share of the cores, whether or not torch is already imported."""
    env.apply({"OMP_NUM_THREADS": str(num_threads)})
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads)

"""The session's server in each worker: it executes commands and reports on them with events, as a worker reports on its
function. It is the function that the session's job runs.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache
from types import CodeType
from typing import Any, NoReturn

from nblaunch import context, other_debuggers
from nblaunch.backends import process_group
from nblaunch.events import CommandEvent, Event, Exited, ExitStatus, Note, Returned, Started, WorkerState
from nblaunch.host import descriptors
from nblaunch.session.interrupts import CommandInterrupts
from nblaunch.user_code import ipython_shell
from nblaunch.wire.assignment import restore_sources
from nblaunch.wire.channel import plain_copy
from nblaunch.wire.pickling import payload
from nblaunch.wire.worker_commands import (
    NO_DESCRIPTOR,
    Close,
    Execute,
    LeaveGroup,
    RunFunction,
    SessionCommand,
    SetVariables,
)
from nblaunch.worker import output
from nblaunch.worker.debugger import Debugger
from nblaunch.worker.delivery import Delivery
from nblaunch.worker.failure import describe_failure
from nblaunch.worker.inheritance import lost_changes
from nblaunch.worker.optimizer_steps import steps
from nblaunch.worker.process_control import ChildHandler, FunctionBounds

_EXITED = "the command called sys.exit({!r}). Raise an exception instead, so that its traceback appears here"


def serve() -> None:
    """Execute the commands of a session on this rank until the session is closed or its kernel has ended."""
    worker = context.current()
    assert worker.connection is not None, "the workers of a session are started with a connection"
    debugger = Debugger(worker.topology.rank, worker.connection)
    debugger.end_command(None)  # idle until the first command
    server = _Server(debugger)
    debugger.start()
    process_group.extend_collective_timeout()
    worker.slot.set_state(WorkerState.DONE)  # no progress is expected between commands
    server.run()


class _Server:
    """The server of one rank."""

    def __init__(self, debugger: Debugger) -> None:
        self._debugger = debugger
        self._pass_breakpoint = sys.breakpointhook
        self._topology = context.current().topology
        self._rank = self._topology.rank
        self._number = 0
        self._slot = context.current().slot
        self._group = 0
        self._pid = os.getpid()
        self._child_handler = ChildHandler()
        self._bounds = FunctionBounds(_call_until_exit.__code__, _Server._call_function.__code__)
        self._interrupts = CommandInterrupts(self._bounds)
        debugger.before_command = self._free_if_stuck

    def run(self) -> None:
        """Execute commands until the session ends."""
        while True:
            command, files = self._debugger.commands.get()
            if isinstance(command, Close):
                return
            if isinstance(command, LeaveGroup):
                _leave_group()
                continue
            files = [descriptors.moved_high(fd) for fd in files]
            try:
                self._execute(command, files)
            finally:
                for fd in files:
                    with suppress(OSError):  # the command closed it
                        os.close(fd)

    def _emit(self, event: Event) -> None:
        """Report an event of the current command."""
        has_torch = "torch" in sys.modules
        context.current().emit(
            CommandEvent(self._rank, number=self._number, event=event, has_torch=has_torch)
        )

    def _free_if_stuck(self, command: SessionCommand) -> None:
        """Free the main thread, in the debugger's thread, if other ranks have left the group and it waits for them."""
        if isinstance(command, LeaveGroup):
            self._interrupts.free_if_stuck()

    def _execute(self, command: SessionCommand, files: Sequence[int]) -> None:
        """Execute a command, and report its start, its results and its end."""
        self._number, failed = command.number, None
        is_code = isinstance(command, (Execute, RunFunction))
        self._debugger.begin_command()
        if is_code:
            context.current().num_commands += 1
            self._slot.clear_progress()
            self._slot.boundaries.begin_anew()
            context.current().forget_losses()
            self._slot.set_state(WorkerState.RUNNING)
            self._slot.note_progress()
        self._emit(Started(self._rank, pid=self._pid))
        sys.breakpointhook = self._stop_at_breakpoint if command.has_breakpoints else self._pass_breakpoint
        try:
            try:
                self._interrupts.allow()
                self._do(command, files)
            finally:
                self._interrupts.hold()
                self._child_handler.take_out()  # a ``__repr__``, for example, may have set it
            self._debugger.end_command(None)
        except BaseException as error:
            failed = describe_failure(self._rank, error)
            self._debugger.end_command(error)
        self._slot.set_state(WorkerState.DONE)
        output.flush()
        if failed is not None:
            self._emit(failed)
        self._emit(Exited(self._rank, status=ExitStatus(0 if failed is None else 1)))

    def _stop_at_breakpoint(self, *args: object, **kwargs: object) -> None:
        if os.getpid() == self._pid:  # a process that the code forked has no input
            self._debugger.stop_at(other_debuggers.caller(sys._getframe(1)))

    def _do(self, command: SessionCommand, files: Sequence[int]) -> None:
        if not files:
            raise OSError(NO_DESCRIPTOR)
        if isinstance(command, SetVariables):
            vars(sys.modules["__main__"]).update(payload.load_mapped(files[0]))
            self._emit(Returned(self._rank))
            return
        self._enter_group(command)
        if isinstance(command, Execute):
            self._run_code(command, files[0])
        elif isinstance(command, RunFunction):
            self._call(command, *files)

    def _run_code(self, command: Execute, outbox_fd: int) -> None:
        with self._child_handler:
            result, _ = _call_until_exit(_run_cell, command)
        is_value, value = result or (False, None)
        if command.shows_value:
            value = plain_copy(_display_of(value)) if is_value else {}
        delivery = Delivery(self._topology, outbox_fd, True, (), None, ())
        self._deliver(delivery, value, left_by_exit=False)

    def _call(self, command: RunFunction, call_fd: int, outbox_fd: int) -> None:
        function, args = payload.load_mapped(call_fd)
        returns_value = command.returns_all or self._rank == 0
        delivery = Delivery(self._topology, outbox_fd, returns_value, args, None, command.wanted_modules)
        changes = lost_changes.Changes(None, args, is_forked=False, advice=lost_changes.IN_A_SESSION)
        steps.is_cut = False
        try:
            value, has_exited = self._call_function(function, args)
        except KeyboardInterrupt:
            if self._slot.keeps_weights:
                for event in delivery.interrupted_states():
                    self._emit(event)
            raise
        if self._rank == 0:
            for text in changes.describe(value):
                self._emit(Note.of_job(text))
        self._deliver(delivery, value, left_by_exit=has_exited)

    def _deliver(self, delivery: Delivery, value: Any, *, left_by_exit: bool) -> None:
        """Flush what the command has left pending, such as figures and losses, and report its value and its states."""
        process_group.drop_destroyed_groups()
        output.show_pending_figures()
        context.current().flush_losses()
        output.flush()
        for event in delivery.results(value, left_by_exit=left_by_exit):
            self._interrupts.hold()
            self._emit(event)

    def _call_function(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, bool]:
        """Return the result of :func:`_call_until_exit`. No interrupt is raised after the function has ended."""
        try:
            with self._child_handler:
                return _call_until_exit(function, *args)
        finally:
            self._interrupts.hold()
            self._bounds.leave()

    def _enter_group(self, command: SessionCommand) -> None:
        """Join the process group that the command needs, with all other ranks."""
        if not command.group:
            return
        if self._group != command.group:
            process_group.break_off()
        if not process_group.is_joined():
            process_group.name_next_group(f"session-{command.group}")
            backend = context.current().backend
            backend.join(self._topology, backend.device(self._topology))
        self._group = command.group


def _leave_group() -> None:
    """Leave the process group; if that fails, print the error, because the kernel does not wait for a result."""
    try:
        process_group.break_off()
    except Exception:
        traceback.print_exc()
        output.flush()


def _end_subprocess() -> NoReturn:
    """End a forked process that has left the command's code; the rank itself reports the result."""
    error = sys.exc_info()[1]
    if error is not None:
        traceback.print_exception(error)
    output.flush()
    os._exit(0 if error is None else 1)


def _call_until_exit(function: Callable[..., Any], *args: Any) -> tuple[Any, bool]:
    """Call a function; return its value, and whether it called ``sys.exit(0)`` instead of returning one.

    Raises:
        RuntimeError: the function called ``sys.exit`` with any other code. A SystemExit that reached the kernel would
            end the kernel too.
    """
    pid = os.getpid()
    try:
        return function(*args), False
    except SystemExit as leaving:
        if leaving.code is None or leaving.code == 0:
            return None, True
        raise RuntimeError(_EXITED.format(leaving.code)).with_traceback(leaving.__traceback__) from None
    finally:
        if os.getpid() != pid:
            _end_subprocess()


def _display_of(value: Any) -> dict[str, Any]:
    """Return the representations of a cell's last value, by MIME type; empty for None."""
    if value is None:
        return {}
    shell = ipython_shell()
    if shell is None:
        return {"text/plain": repr(value)}
    data, _ = shell.display_formatter.format(value)
    return dict(data)


# --- code that runs like a cell of a notebook -----------------------------------------------------------------------


def _run_cell(command: Execute) -> tuple[bool, Any]:
    """Run code in ``__main__``; return whether its last line is an expression without ``;``, and its value."""
    code, filename = command.code, command.filename
    restore_sources({filename: command.source or code})
    # IPython drops empty lines at the beginning.
    num_before = command.first_line - 1 + code[: len(code) - len(code.lstrip())].count("\n")
    tree = ast.parse("\n" * num_before + _transformed(code).lstrip("\n"), filename)
    last = tree.body[-1] if tree.body else None
    is_value = isinstance(last, ast.Expr) and not code.rstrip().endswith(";")
    statements = tree.body[:-1] if is_value else tree.body
    names = vars(sys.modules["__main__"])
    _evaluate(_compiled(ast.Module(statements, tree.type_ignores), filename, "exec"), names)
    if not is_value:
        return False, None
    assert isinstance(last, ast.Expr)
    return True, _evaluate(_compiled(ast.Expression(last.value), filename, "eval"), names)


def _compiled(tree: ast.Module | ast.Expression, filename: str, mode: str) -> CodeType:
    # Compile without this module's future statements, which would turn annotations into strings.
    code: CodeType = compile(tree, filename, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def _evaluate(code: CodeType, names: dict[str, Any]) -> Any:
    value = eval(code, names)
    return _awaited(value) if code.co_flags & inspect.CO_COROUTINE else value


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine until it ends; after an interrupt, until its ``finally`` blocks have ended."""
    loop = _loop()
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        # The interrupt was raised in the loop itself, which would resume the task the next time a cell awaits
        # something.
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all cells of this process share, so that tasks and connections continue in the next
    cell.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def _transformed(code: str) -> str:
    """Return ``code`` as plain Python, in which IPython's magics and shell commands are calls."""
    shell = ipython_shell()
    return code if shell is None else str(shell.transform_cell(code))

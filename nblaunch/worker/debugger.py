"""The worker's side of the debugger: a thread that answers the kernel, and pdb over the connection to the kernel.

    kernel ── Inspect, ReadVariables ──> thread: reads the frames of the function's thread ── Reply ──> kernel
           ── Debug ──> a thread with pdb at the failure, or at the function's current line
    breakpoint() ──> pdb in the thread of the function
                              └── Prompted ──> kernel ── Line ──> ... ── Resumed ──> kernel

Even a rank that is waiting in a collective answers, because the collective releases the GIL.
"""

from __future__ import annotations

import os
import pdb  # noqa: T100 the debugger is what this module is about
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from traceback import format_exception, walk_tb
from types import FrameType, TracebackType
from typing import Any

from nblaunch.other_debuggers import own_pdb
from nblaunch.user_code import from_first_user_frame, is_user_file, line_in
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.worker_commands import (
    Close,
    CommandConnection,
    Debug,
    Inspect,
    Line,
    Prompted,
    ReadVariables,
    Release,
    Reply,
    Resumed,
    SessionCommand,
    send_reply,
)
from nblaunch.worker import frames, output
from nblaunch.worker.failure import describe_failure

_SKIPPED = ("nblaunch", "nblaunch.*")
"""Modules that pdb does not step into."""

_CALLING = ("nblaunch.worker.bootstrap", "nblaunch.session.server")
"""Modules that call the user's code in a worker and that the user's code never calls."""


class Debugger:
    """Answers the kernel's questions about this worker's frames.

    Args:
        rank: rank of this worker.
        connection: connection to the kernel.

    Attributes:
        commands: commands to a session's server, with their files. They arrive over the same connection.
        before_command: called in this object's thread with each such command, before it is in ``commands``.
    """

    def __init__(self, rank: int, connection: CommandConnection) -> None:
        self._rank = rank
        self._connection = connection
        self._terminal: _Terminal | None = None  # the last pdb's terminal
        self._released = threading.Event()
        self._traceback: TracebackType | None = None
        self._stops: Counter[tuple[str, int]] = Counter()
        self._is_idle = False
        self.commands: queue.SimpleQueue[tuple[SessionCommand, list[int]]] = queue.SimpleQueue()
        self.before_command: Callable[[SessionCommand], None] = lambda command: None

    def start(self) -> None:
        """Receive commands from now on, in a thread."""
        threading.Thread(target=self._serve, name="nblaunch-debugger", daemon=True).start()

    def wait_at(self, error: BaseException) -> None:
        """Keep the worker at ``error``, which ended the function, until the kernel releases it.

        Raises:
            KeyboardInterrupt: the launcher ends the job.
        """
        self._traceback = from_first_user_frame(error.__traceback__) or error.__traceback__
        while not self._released.wait(3600.0):
            continue

    def begin_command(self) -> None:
        """Release the frames of a session's previous command, including pdb's."""
        self._traceback, self._is_idle = None, False
        self._stops.clear()
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def end_command(self, error: BaseException | None) -> None:
        """Until the next command begins, keep the frames in which a session's command failed.

        Only frames of the user's code are kept. Other frames may hold connections, and other ranks may be
        waiting for those connections to close.
        """
        sys.settrace(None)  # pdb may still be stepping
        self._is_idle = True
        if error is not None:
            self._traceback = frames.up_to_user_code(from_first_user_frame(error.__traceback__))

    def stop_at(self, frame: FrameType) -> None:
        """Open pdb in this thread, at a frame that called ``breakpoint()``. The caller must return at once."""
        at = frame.f_code.co_filename, frame.f_lineno
        self._stops[at] += 1
        self._terminal = _Terminal(self._connection.send, Prompted("", (*at, self._stops[at])))
        _Pdb(self._terminal).set_trace(frame)

    def _serve(self) -> None:
        while True:
            try:
                command, files = self._connection.receive()
            except (EOFError, OSError):
                self._released.set()
                self.commands.put((Close(), []))
                return
            if isinstance(command, SessionCommand):
                self.before_command(command)
                self.commands.put((command, files))
            elif isinstance(command, Release):
                self._released.set()
            elif isinstance(command, Line):
                if self._terminal is not None:
                    self._terminal.put_line(command.text)
            elif isinstance(command, Debug):
                self._terminal = terminal = _Terminal(self._connection.send, Prompted(""))
                threading.Thread(
                    target=self._debug, args=(terminal,), name="nblaunch-pdb", daemon=True
                ).start()
            else:
                self._reply(command)

    def _debug(self, terminal: _Terminal) -> None:
        """Run pdb at the failure or at the function's current line.

        Pdb can't step, because neither frame will resume. If a pdb command raises an exception, pdb ends, and
        the cell in which the command was typed shows the error.
        """
        try:
            traceback = self._traceback
            frame = None if traceback is not None else frames.shown_frame(self._stack())
            if frame is None and traceback is None:
                terminal.write("this rank is idle\n")
                return
            post_mortem = _Pdb(terminal)
            post_mortem.reset()
            with suppress(_Closed):
                post_mortem.interaction(frame, traceback)
        except BaseException as error:
            terminal.write("".join(format_exception(error)))
        finally:
            terminal.end()

    def _reply(self, command: Inspect | ReadVariables) -> None:
        outbox_fd = create_memory_file(f"nblaunch-inspect-{self._rank}")
        try:
            try:
                reply = self._answer(command, outbox_fd)
            except BaseException as error:
                reply = Reply(command.number, failed=describe_failure(self._rank, error))
            send_reply(self._connection, reply, outbox_fd)
        finally:
            os.close(outbox_fd)

    def _answer(self, command: Inspect | ReadVariables, outbox_fd: int) -> Reply:
        if isinstance(command, Inspect):
            value = frames.evaluate(command.expression, frames.shown_frame(self._stack()))
            return Reply.of_value(command.number, value, outbox_fd)
        stack = self._stack()
        frame = frames.frame_of_function(stack, command.function)
        value = (
            frames.variables_of_main()
            if frame is None
            else frames.variables_of(frame, self._line_of(frame), stack)
        )
        return Reply(command.number, value=value)

    def _stack(self) -> list[FrameType]:
        if self._traceback is not None:
            return frames.frames_of_traceback(self._traceback)
        return [] if self._is_idle else frames.frames_of_main_thread()

    def _line_of(self, frame: FrameType) -> int:
        lines = (line for visited, line in walk_tb(self._traceback) if visited is frame)
        return line_in(frame.f_code, next(lines, frame.f_lineno))


class _Closed(Exception):
    """Raised when pdb must not read another line."""


class _Terminal:
    """The input and output of one pdb, over the connection to the kernel.

    Unread lines are dropped when the user leaves pdb, so that the next pdb does not run them.

    Args:
        send: sends a message to the kernel.
        first: contents of the first prompt, except its text.
    """

    encoding = "utf-8"

    def __init__(self, send: Callable[[Any], None], first: Prompted) -> None:
        self._send = send
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._next = first
        self._written: list[str] = []
        self._is_closed = False

    def put_line(self, text: str) -> None:
        """Add a line that the kernel sent."""
        self._lines.put(text)

    def close(self) -> None:
        """End pdb, even while it is waiting for the rest of a statement, as part of which it would read ``q``."""
        self._is_closed = True
        self._lines.put(None)

    def write(self, text: str) -> int:
        """Buffer pdb's output until it waits for a line."""
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because the next prompt sends the buffered output."""

    def readline(self) -> str:
        """Prompt the kernel and wait for its line.

        Raises:
            _Closed: the terminal is closed; raised again if pdb continues anyway.
        """
        if self._is_closed:
            raise _Closed
        output.flush()  # also unfinished lines, which the kernel shows before the prompt
        text, newline, prompt = self._taken().rpartition("\n")
        self._send(replace(self._next, text=text + newline, prompt=prompt))
        self._next = Prompted("")
        line = self._lines.get()
        if line is None:
            raise _Closed
        return line + "\n"

    def isatty(self) -> bool:
        """Return False, so that pdb prints no colours."""
        return False

    def end(self) -> None:
        """Report that the user has left pdb."""
        self._send(Resumed(self._taken()))

    def _taken(self) -> str:
        text = "".join(self._written)
        self._written.clear()
        return text


_OwnPdb: Any = own_pdb(pdb)
"""Python's own ``Pdb`` class, because IPython's class writes to the kernel's terminal."""


class _Pdb(_OwnPdb):
    """A pdb that begins at the user's innermost frame and reports when the program continues."""

    def __init__(self, terminal: _Terminal) -> None:
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False, skip=_SKIPPED)
        self._terminal = terminal
        self._is_stepping = False

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        self._is_stepping = True
        # Pdb's own method is redirected to breakpoint().
        super(_OwnPdb, self).set_trace(frame, **options)

    def set_continue(self) -> None:
        super().set_continue()
        if self._is_stepping:
            self._terminal.end()

    def set_quit(self) -> None:
        super().set_quit()
        if self._is_stepping:
            self._terminal.end()

    def do_interact(self, arg: str) -> None:
        """interact

        Not available in a rank, which has no terminal.
        """
        self.error(
            "a rank has no terminal. Type statements here, with ! before those that look like pdb commands"
        )

    def _cmdloop(self) -> None:
        """Let an interrupt end the session's command; pdb's own method would catch it and read the next line."""
        self.cmdloop()

    def setup(self, frame: FrameType | None, tb: TracebackType | None) -> Any:
        result = super().setup(frame, tb)
        innermost = frames.shown_frame([frame_ for frame_, _ in reversed(self.stack)])
        if innermost is not None and not self._is_stepping:
            self._select(innermost)
        return result

    def get_stack(self, frame: FrameType | None, tb: TracebackType | None) -> tuple[list[Any], int]:
        """Leave out the callers of the user's code: the kernel, and the code that prepares a worker."""
        stack, index = super().get_stack(frame, tb)
        # A forked worker also has the kernel's frames, including the cell that launched the worker.
        is_calling = [entry.f_globals.get("__name__") in _CALLING for entry, _ in stack]
        first = len(stack) - is_calling[::-1].index(True) if True in is_calling else 0
        is_user = [is_user_file(entry.f_code.co_filename) for entry, _ in stack[first:]]
        first += is_user.index(True) if True in is_user else 0
        return stack[first:], max(0, index - first)

    def _select(self, frame: FrameType) -> None:
        for index, (candidate, _) in enumerate(self.stack):
            if candidate is frame:
                self.curindex = index
                self.curframe = candidate
                # Newer releases read the frame's variables, and warn if this is set.
                if sys.version_info < (3, 14):
                    self.curframe_locals = candidate.f_locals
                self.lineno = None

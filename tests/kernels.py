"""Real Jupyter kernels for tests: start one, run cells, interrupt it, and check that nothing survives it.

    with Kernel.start() as kernel:
        cell = kernel.run("print('hello')")                     # fails the test if the cell raises
        assert cell.stdout == "hello\\n"

        cell = kernel.run("1 / 0", raises="ZeroDivisionError")  # fails the test if it does not raise that

        cell = kernel.submit("train()")                         # does not wait
        cell.wait_for_text("epoch 1")                           # synchronise on output, never by sleeping
        kernel.interrupt()
        assert cell.wait().raised.name == "KeyboardInterrupt"

Most tests take the ``kernel`` fixture of ``conftest.py``, which starts one and closes it.

The test's thread reads messages while it waits; there is no reader thread. Every wait has a timeout. At a timeout, the
kernel is aborted with SIGABRT: its fault handler writes the stack of every thread, and the error message shows the
stacks and the cell's output.

Every process that a kernel starts inherits an environment variable with the kernel's token, even across ``setsid``,
``exec`` and the death of its parent. ``kernel.processes()`` therefore finds them all, and ``close`` fails if one is
left.
"""

from __future__ import annotations

import ast
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import zmq
from jupyter_client.launcher import launch_kernel
from jupyter_client.manager import KernelManager

from tests import alarms, left_behind
from tests.forkserver import TOKEN_LENGTH, TOKEN_VARIABLE, ForkedProcess, Forkserver, imported_with

_ANSI = re.compile(r"\x1b\[[0-9;]*m")

START_TIMEOUT_S = 240.0
CELL_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CellError:
    """The exception of a cell, as a front end receives it.

    Args:
        name: class name of the exception.
        value: its text.
        traceback: the blocks that IPython formatted, with colours; ``text`` is the visible text.
    """

    name: str
    value: str
    traceback: list[str]

    @property
    def text(self) -> str:
        """Return the traceback as plain text."""
        return _ANSI.sub("", "\n".join(self.traceback))

    @property
    def lines(self) -> list[str]:
        """Return the lines of ``text``."""
        return self.text.splitlines()


@dataclass
class Display:
    """One place in a cell's output area.

    Args:
        data: the MIME bundle after all updates.
        metadata: metadata of ``data``.
        display_id: its name for updates; None if it can't be updated.
        num_updates: number of updates.
        is_result: whether it is the value of the cell's last expression.
    """

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    num_updates: int = 0
    is_result: bool = False


@dataclass(eq=False)
class Cell:
    """One execution of a cell: its messages so far, complete once ``is_done``.

    Args:
        kernel: the kernel that runs it.
        source: its code.
        msg_id: id of its execute request.
        messages: its messages from IOPub, oldest first, including messages after the reply (from threads).
        reply: content of the execute reply; None before it arrived.
        prompts: unanswered prompts of ``input()``.
    """

    kernel: Kernel
    source: str
    msg_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    reply: dict[str, Any] | None = None
    prompts: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    finished_s: float | None = None
    is_idle: bool = False

    @property
    def is_done(self) -> bool:
        """Whether both the reply and the last output of the blocking part have arrived."""
        return self.reply is not None and self.is_idle

    @property
    def status(self) -> str | None:
        """ "ok", "error" or "aborted"; None while it runs."""
        return self.reply["status"] if self.reply else None

    @property
    def elapsed_s(self) -> float:
        """Seconds from the request to the end, or until now."""
        return (self.finished_s or time.monotonic()) - self.started_s

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def result(self) -> str | None:
        """The repr of the last expression; None without one."""
        return next((d.data.get("text/plain") for d in self.displays if d.is_result), None)

    @property
    def value(self) -> Any:
        """The value of the last expression, a literal; fails the test without one."""
        assert self.result is not None, self.describe()
        return ast.literal_eval(self.result)

    @property
    def displays(self) -> list[Display]:
        """The displays in the output area, without streams and errors, after all updates."""
        shown: list[Display] = []
        for message in self.messages:
            kind, content = message["msg_type"], message["content"]
            if kind in ("display_data", "execute_result"):
                display_id = content.get("transient", {}).get("display_id")
                shown.append(
                    Display(
                        content["data"], content["metadata"], display_id, is_result=kind == "execute_result"
                    )
                )
            elif kind == "update_display_data":
                for display in shown:
                    if display.display_id == content["transient"]["display_id"]:
                        display.data, display.metadata = content["data"], content["metadata"]
                        display.num_updates += 1
        return shown

    @property
    def error(self) -> CellError | None:
        """The exception that the cell raised; None if it has not raised any."""
        for content in self.contents("error"):
            return CellError(content["ename"], content["evalue"], content["traceback"])
        return None

    @property
    def raised(self) -> CellError:
        """The exception that the cell raised; without one, fails the test with the cell's output."""
        assert self.error is not None, self.describe()
        return self.error

    @property
    def shown(self) -> str:
        """The text that a reader without HTML sees: all printed lines, then every display."""
        return self.stdout + "".join(display.data.get("text/plain", "") for display in self.displays)

    def contents(self, msg_type: str) -> list[dict[str, Any]]:
        """Return the contents of all messages of one type, such as "comm_open" or "update_display_data"."""
        return [message["content"] for message in self.messages if message["msg_type"] == msg_type]

    def wait(self, timeout_s: float = CELL_TIMEOUT_S) -> Cell:
        """Wait until the cell is done, whatever its outcome."""
        self.kernel.wait_until(lambda: self.is_done, timeout_s, "the cell to end", self)
        return self

    def wait_for(
        self,
        condition: Callable[[Cell], object],
        timeout_s: float = CELL_TIMEOUT_S,
        what: str = "a condition",
    ) -> Cell:
        """Wait until ``condition(cell)`` is true, checking it after each message."""
        self.kernel.wait_until(lambda: bool(condition(self)), timeout_s, what, self)
        return self

    def wait_for_input(self, timeout_s: float = CELL_TIMEOUT_S) -> str:
        """Wait until the cell calls ``input()``; return the prompt. Fail at once if the cell ends before."""
        self.wait_for(lambda cell: cell.prompts or cell.is_done, timeout_s, "the cell to ask for input")
        if not self.prompts:
            raise AssertionError(f"the cell ended without asking for input\n{self.describe()}")
        return self.prompts[-1]

    def type(self, text: str) -> None:
        """Answer ``input()`` once the cell has called it."""
        self.wait_for_input()
        self.prompts.clear()
        self.kernel.reply_input(text)

    def wait_for_text(self, text: str, timeout_s: float = CELL_TIMEOUT_S) -> Cell:
        """Wait until the cell has printed ``text``, on stdout or stderr. Fail at once if the cell ends before."""
        self.wait_for(
            lambda cell: cell._printed(text) or cell.is_done, timeout_s, f"the cell to print {text!r}"
        )
        if not self._printed(text):
            raise AssertionError(f"the cell ended without printing {text!r}\n{self.describe()}")
        return self

    def describe(self) -> str:
        """Return everything about this cell that helps to understand a failed test."""
        parts = [f"cell ({self.status or 'running'}, {self.elapsed_s:.1f} s):", _indent(self.source.strip())]
        for title, text in (
            ("stdout", self.stdout),
            ("stderr", self.stderr),
            ("error", self.error.text if self.error else ""),
        ):
            if text:
                parts += [f"{title}:", _indent(text.rstrip())]
        return "\n".join(parts)

    def _printed(self, text: str) -> bool:
        return text in self.stdout or text in self.stderr

    def _stream(self, name: str) -> str:
        return "".join(content["text"] for content in self.contents("stream") if content["name"] == name)

    def _receive(self, message: dict[str, Any]) -> None:
        if message["msg_type"] == "execute_reply":
            self.reply = message["content"]
        elif message["msg_type"] == "input_request":
            self.prompts.append(message["content"]["prompt"])
        else:
            self.messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                self.is_idle = True
        if self.is_done and self.finished_s is None:
            self.finished_s = time.monotonic()


class KernelTimeout(AssertionError):
    """The awaited condition did not come true in time; the message has the kernel's output and its threads' stacks."""


class LeftBehind(AssertionError):
    """Processes of a kernel were still running after its end."""


class Kernel:
    """A running IPython kernel. Create one with :meth:`start`, as a context manager."""

    def __init__(self, manager: KernelManager, token: str, folder: Path) -> None:
        self._manager = manager
        self._token = token
        self._folder = folder
        # All messages from IOPub, oldest first, whatever request they answer, because a front end follows comms in all
        # of them.
        self.messages: list[dict[str, Any]] = []
        self._cells: dict[str, Cell] = {}
        self._is_closed = False
        self._log = (folder / "kernel.log").open("w+", errors="replace")

    @classmethod
    def start(
        cls,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        python: str | Path = sys.executable,
        transport: str = "ipc",
        timeout_s: float = START_TIMEOUT_S,
        is_new: bool = False,
    ) -> Kernel:
        """Start a kernel and wait until it answers.

        Args:
            env: variables to set on top of this process's environment.
            cwd: its working folder; default: the current one.
            python: the interpreter, which must have ipykernel.
            transport: "ipc" (default; without port collisions and warnings about unencrypted TCP) or "tcp".
            timeout_s: seconds that the start may take.
            is_new: start a new interpreter instead of forking one that has imported torch; for tests of imports, and
                for measurements.
        """
        # A short path: the address of a Unix socket has room for about 100 bytes.
        folder = Path(tempfile.mkdtemp(prefix="nbk-"))
        token = secrets.token_hex(TOKEN_LENGTH // 2)
        manager = KernelManager(
            connection_file=str(folder / "k.json"),
            transport=transport,
            # A separate context, so that nothing of this kernel outlives it in the test process.
            context=zmq.Context(),
        )
        kernel = cls(manager, token, folder)
        try:
            kernel._launch(str(python), dict(env or {}), cwd, is_new)
            kernel._connect(timeout_s)
            kernel._prepare()
        except BaseException:
            kernel.kill()
            kernel.close(check=False)
            raise
        return kernel

    # --- running code -------------------------------------------------------------------------------------------------

    def run(
        self, source: str, *, raises: str | None = None, timeout_s: float = CELL_TIMEOUT_S, **request: Any
    ) -> Cell:
        """Run a cell and wait for its end.

        Args:
            source: its code.
            raises: class name of the exception that the cell must raise; None: it must not raise.
            timeout_s: seconds that the cell may take.
            **request: fields of the execute request, such as ``silent=True``.

        Raises:
            AssertionError: the cell ended otherwise than expected.
            KernelTimeout: it did not end.
        """
        cell = self.submit(source, **request).wait(timeout_s)
        raised = cell.reply.get("ename") if cell.reply else None
        if raised != raises or cell.status == "aborted":
            expected = f"to raise {raises}" if raises else "to end without an error"
            raise AssertionError(f"the cell was expected {expected}\n{cell.describe()}")
        return cell

    def submit(self, source: str, *, is_typed_into: bool = False, **request: Any) -> Cell:
        """Request the execution of a cell and return at once. Cells that are submitted together run one by one.

        Args:
            source: its code.
            is_typed_into: whether the test answers ``input()`` in the cell.
            **request: fields of the execute request.
        """
        if is_typed_into:
            request["allow_stdin"] = True
        content = {
            "code": source,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            # with it, ipykernel 6 would also abort a cell that is sent right after an error or an interrupt
            "stop_on_error": False,
        } | request
        message = self._manager.session.send(self._shell, "execute_request", content)
        cell = Cell(self, source, message["header"]["msg_id"])
        self._cells[cell.msg_id] = cell
        return cell

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, what: str, cell: Cell | None = None
    ) -> None:
        """Read messages until ``condition()`` is true, checking it after each message and ten times a second.

        Raises:
            KernelTimeout: the condition did not come true in time; the kernel was aborted to get its stacks.
            AssertionError: the kernel died in the meantime.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            self._read(min(0.1, max(0.0, deadline - time.monotonic())))
            if condition():
                return
            about = f"\n{cell.describe()}" if cell else ""
            if not self.is_alive:
                raise AssertionError(
                    f"the kernel died while the test waited for {what}{about}\n{self._story()}"
                )
            if time.monotonic() >= deadline:
                self._abort()
                raise KernelTimeout(f"waited {timeout_s:g} s for {what}{about}\n{self._story()}")

    def start_debugger(self, timeout_s: float = CELL_TIMEOUT_S) -> None:
        """Switch the debugger on as JupyterLab does: control messages attach debugpy to the kernel."""
        arguments = {
            "clientID": "jupyterlab",
            "adapterID": "",
            "linesStartAt1": True,
            "columnsStartAt1": True,
            "pathFormat": "path",
        }
        for number, (command, content) in enumerate(
            (("initialize", arguments), ("attach", {}), ("debugInfo", {}))
        ):
            request = {"type": "request", "seq": number + 1, "command": command, "arguments": content}
            message = self._manager.session.send(self._control, "debug_request", request)
            asked = Cell(self, command, message["header"]["msg_id"])
            self._cells[asked.msg_id] = asked
            asked.wait_for(lambda cell: cell.contents("debug_reply"), timeout_s, f"a reply to {command}")
            (reply,) = asked.contents("debug_reply")
            assert reply.get("success", True), reply
            del self._cells[asked.msg_id]

    def reply_input(self, text: str) -> None:
        """Send a user's input to a cell that was submitted with ``is_typed_into``."""
        self._manager.session.send(self._stdin, "input_reply", {"value": text})

    def send_comm(self, comm_id: str, data: Mapping[str, Any]) -> None:
        """Send a message to a comm of the kernel, as a frontend does for a click on a widget."""
        content = {"comm_id": comm_id, "data": dict(data)}
        self._manager.session.send(self._shell, "comm_msg", content)

    # --- stopping -----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group, as the stop button does."""
        # jupyter_client.provisioning.LocalProvisioner.send_signal does the same.
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL only to the kernel's process, as the OOM killer does; its children continue."""
        if self.is_alive:
            self.process.kill()
            self.wait_for_exit()

    def wait_for_exit(self, timeout_s: float = CLOSE_TIMEOUT_S) -> int:
        """Wait until the kernel's process has ended by itself; return its exit code, negative for a signal."""
        assert self._popen is not None, "the kernel was not started"
        return self._popen.wait(timeout_s)

    def close(self, *, check: bool = True, grace_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the kernel and everything that it started.

        Args:
            check: whether a process that outlives the kernel is an error.
            grace_s: seconds that the kernel's processes may take to end after it.

        Raises:
            LeftBehind: after the kernel's proper end, some of its processes were still running; they are killed. Only
                with ``check``.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            survivors = self._shut_down(grace_s)
        finally:
            self._log.close()
            for socket in (self._shell, self._iopub, self._control, self._stdin):
                if socket is not None:
                    socket.close(linger=0)
            self._manager.cleanup_connection_file()
            self._manager.cleanup_ipc_files()
            self._manager.context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
        if check and survivors:
            raise LeftBehind("processes outlived their kernel:\n" + "\n".join(map(_indent, survivors)))

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and _is_running(self._process)

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None, "the kernel was not started"
        return self._process

    @property
    def log(self) -> str:
        """Return the output of the kernel's process to its own stdout and stderr, outside of cells."""
        return (self._folder / "kernel.log").read_text(errors="replace") if self._folder.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return all running processes that this kernel has started, directly or not, oldest first.

        This includes processes that have left its group, its POSIX session or its process tree.
        """
        mine = [
            p
            for p in psutil.process_iter()
            if p != self._process and _is_running(p) and self._carries_token(p)
        ]
        return sorted(mine, key=lambda process: process.create_time())

    def wait_for_no_processes(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all processes that the kernel started have ended, including those that it starts in the meantime.

        Raises:
            LeftBehind: a process is still running; the message names it, and ``close`` kills it.
        """
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            psutil.wait_procs(left, deadline - time.monotonic())
        if left:
            raise LeftBehind("still running:\n" + "\n".join(_indent(_describe(p)) for p in left))

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # If the test has already failed, show its own error.
        self.close(check=error is None)

    # --- inside -------------------------------------------------------------------------------------------------------

    _popen: subprocess.Popen[bytes] | ForkedProcess | None = None
    _process: psutil.Process | None = None
    _shell: Any = None
    _iopub: Any = None
    _control: Any = None
    _stdin: Any = None

    def _launch(self, python: str, env: dict[str, str], cwd: str | Path | None, is_new: bool) -> None:
        self._manager.write_connection_file()
        args = ["-f", self._manager.connection_file]
        env = {
            **os.environ,
            # Use no profile, history or start-up file of the user who runs the tests.
            "IPYTHONDIR": str(self._folder / "ipython"),
            # jupyter_client sets the same variable.
            "JPY_PARENT_PID": str(os.getpid()),
            # The debugger's advice about frozen modules is useless here.
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            **env,
            TOKEN_VARIABLE: self._token,
        }
        forkserver = None if is_new else forkserver_for(python, env)
        if forkserver is not None:
            self._popen = forkserver.run_module(
                "ipykernel_launcher", args, env, cwd or os.getcwd(), self._log.fileno()
            )
        else:
            # Use jupyter_client's launcher, not KernelManager.start_kernel, which creates an event loop that is never
            # closed, and starts whatever this machine has registered as "python3".
            self._popen = launch_kernel(
                [python, "-m", "ipykernel_launcher", *args],
                stdout=self._log,
                stderr=self._log,
                cwd=cwd and str(cwd),
                env=env,
            )
        self._process = psutil.Process(self._popen.pid)

    def _connect(self, timeout_s: float) -> None:
        self._shell = self._manager.connect_shell(identity=self._token.encode())
        self._iopub = self._manager.connect_iopub()
        self._control = self._manager.connect_control()
        # The kernel sends prompts to the sender of the request, by this name; a prompt is lost if nothing is connected
        # yet. Without a prompt, this socket gets no message, so its monitor signals the connection.
        self._stdin = self._manager.context.socket(zmq.DEALER)
        self._stdin.identity = self._token.encode()
        monitor = self._stdin.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._stdin.connect(self._manager._make_url("stdin"))
        # A subscription takes effect with a delay, and earlier messages are lost. So repeat a request until both
        # sockets answer. The control channel is queried as well, although only the end needs it: zmq retries a refused
        # connection for up to 0.2 s, and the running test would seem to leave a late connection's file descriptor
        # behind.
        probes: dict[str, list[Cell]] = {"shell": [], "control": []}
        sockets = {"shell": self._shell, "control": self._control}

        def is_connected() -> bool:
            for channel, asked in probes.items():
                if not asked or time.monotonic() - asked[-1].started_s > 0.5:
                    message = self._manager.session.send(sockets[channel], "kernel_info_request", {})
                    asked.append(Cell(self, "", message["header"]["msg_id"]))
                    self._cells[asked[-1].msg_id] = asked[-1]
            is_answered = all(any(probe.is_idle for probe in asked) for asked in probes.values())
            return is_answered and bool(monitor.poll(0))

        try:
            self.wait_until(is_connected, timeout_s, "the kernel to start")
        finally:
            self._stdin.disable_monitor()
            monitor.close(linger=0)
        for probe in (*probes["shell"], *probes["control"]):
            del self._cells[probe.msg_id]

    def _prepare(self) -> None:
        """Make a fatal signal write all stacks to a file, because ipykernel turns stderr into a pipe that it reads
        itself.

        Also make the kernel end without a last garbage collection, which takes up to a second with torch, for memory
        that the system frees a moment later anyway.
        """
        file = str(self._folder / "stacks")
        # Use a descriptor: each forked worker would close a file object, with a warning, when it sets its own.
        self.run(
            f"__import__('faulthandler').enable(__import__('os').open({file!r}, {os.O_WRONLY | os.O_CREAT}, 0o600))\n"
            "__import__('atexit').register(__import__('gc').freeze)\n" + alarms.handler_source(),
            silent=True,
            store_history=False,
        )

    def _read(self, timeout_s: float) -> None:
        """Pass all arrived messages to their cells; wait at most ``timeout_s`` for the first."""
        poller = zmq.Poller()
        for socket in (self._shell, self._iopub, self._control, self._stdin):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(int(timeout_s * 1000)):
            _, message = self._manager.session.recv(socket, mode=zmq.NOBLOCK)
            if message is not None:
                if socket is self._iopub:
                    self.messages.append(message)
                cell = self._cells.get(message["parent_header"].get("msg_id"))
                if cell is not None:
                    cell._receive(message)

    def _shut_down(self, grace_s: float) -> list[str]:
        """End the kernel; return descriptions of processes that outlived it, after killing them, too."""
        if self._popen is None or self._process is None:
            return []
        if self.is_alive:
            self._manager.session.send(self._control, "shutdown_request", {"restart": False})
            try:
                self._popen.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
        self._popen.wait(CLOSE_TIMEOUT_S)
        # Give processes time to end by themselves after the kernel (by a parent-death signal, or at end-of-file).
        psutil.wait_procs(self.processes(), grace_s)
        survivors = self.processes()
        described = [_describe(process) for process in survivors]
        for process in survivors:
            _kill(process)
        psutil.wait_procs(survivors, CLOSE_TIMEOUT_S)
        return described

    def _abort(self) -> None:
        """Make the kernel's fault handler write the stacks of its threads; this ends the kernel."""
        if self.is_alive:
            self.process.send_signal(signal.SIGABRT)
            self.wait_for_exit()

    def _story(self) -> str:
        parts = []
        if processes := self.processes():
            parts += ["processes that it started:", *(_indent(_describe(p)) for p in processes)]
        if log := self.log.strip():
            parts += ["the kernel's own output:", _indent(log[-8000:])]
        stacks = self._folder / "stacks"
        if stacks.exists() and (text := stacks.read_text(errors="replace").strip()):
            parts += ["stacks:", _indent(text)]
        return "\n".join(parts)

    def _carries_token(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(TOKEN_VARIABLE) == self._token
        except psutil.Error:
            return False  # it has ended in the meantime, or belongs to another user


_environment = imported_with(os.environ)
_forkservers: dict[tuple[str, str | None], Forkserver] = {}


def remember_environment() -> None:
    """Use this process's present environment for all kernels, except if a test changes it."""
    global _environment
    _environment = imported_with(os.environ)


def forkserver_for(python: str, env: Mapping[str, str]) -> Forkserver | None:
    """Return the fork server of an interpreter; None if this environment might change the imports."""
    if sys.platform != "linux" or imported_with(env) != _environment:
        return None
    # Only OpenMP reads this variable, when it is loaded.
    key = python, env.get("OMP_NUM_THREADS")
    if key in _forkservers and not _forkservers[key].is_alive:
        _forkservers.pop(key).close()
    if key not in _forkservers:
        left_behind.adopt_orphans()
        _forkservers[key] = Forkserver(python, env)
        left_behind.keep(_forkservers[key].pid, _forkservers[key].channel.fileno())
    return _forkservers[key]


def close_forkservers() -> None:
    """End the processes from which kernels were forked."""
    while _forkservers:
        _forkservers.popitem()[1].close()


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline()) or process.name()
        return f"pid {process.pid} ({process.status()}, child of {process.ppid()}): {command[:300]}"
    except psutil.Error:
        return f"pid {process.pid} (ended)"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())

"""Forks kernels from a process that has made their common imports: importing torch takes longer than most tests.

    test process ──── request ────> fork server ── fork ──> middle ── fork ──> kernel
         ^                                                                        │
         └───── becomes its parent, by prctl's subreaper, since the middle ends ──┘

Such a kernel is a child of the test process with its own POSIX session, environment, folder and output, like a kernel
in a new interpreter. But torch is imported from the beginning, and at the end no module is released. Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Tests find a kernel and its descendants by this variable in /proc/PID/environ, which shows the memory of the process.
# The fork server reserves room there for its value.
TOKEN_VARIABLE = "NBLAUNCH_TEST_KERNEL"
TOKEN_LENGTH = 16

# The first optimizer imports torch._dynamo, which takes a second in each rank if the kernel has not imported it. A
# kernel imports the modules of the first two lines at its start or in its first cells.
_IMPORTS = (
    "ipykernel.kernelapp", "ipykernel.debugger", "IPython.core.completerlib", "IPython.core.debugger",
    "IPython.core.oinspect", "IPython.extensions.storemagic", "IPython.core.logger", "tornado.platform.asyncio",
    "ipywidgets", "cloudpickle", "psutil", "torch", "torch.distributed", "torch._dynamo",
)  # fmt: skip
# torch_xla's imports, which take ten times as long as its own code; torch_xla itself may be under test.
_IMPORTS_FOR_XLA = ("torch._inductor.fx_passes.post_grad", "requests")
# No import reads these variables (except OpenMP, in tests that know it), so they may differ between kernels. Importing
# the compiler sets its variable in the test process itself.
_FREE_VARIABLES = (
    "ACCELERATE_USE_CPU", "CPU_NUM_DEVICES", "HF_HUB_OFFLINE", "IPYTHONDIR", "JPY_", "JUPYTER_PATH", "MPLBACKEND",
    "NBLAUNCH_", "OMP_NUM_THREADS", "PJRT_DEVICE", "PYDEVD_DISABLE_FILE_VALIDATION", "PYTEST_",
    "TORCHINDUCTOR_CACHE_DIR", "XLA_FLAGS",
)  # fmt: skip
# No frame of these test files is below the frames of the executed module, as if the user had started it.
_PROGRAM = f"""
import runpy, sys
sys.path[0] = {str(Path(__file__).parents[1])!r}
from tests.forkserver import end, serve
runpy.run_module(serve(int(sys.argv[1]), sys.argv[2:]), run_name="__main__", alter_sys=True)
end()
"""
_MAX_BYTES = 1 << 18
_LIMIT_S = 240.0
_IMPORTS_LIMIT_S = (
    240.0  # for the first answer; on a machine that runs other tests, torch's import takes minutes
)


class ForkedProcess:
    """A running child that ``subprocess`` did not start, with the methods of ``Popen`` that kernels need."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it did not end within ``timeout`` seconds.
        """
        if self.returncode is None:
            ended = os.pidfd_open(self.pid)
            try:
                # A pidfd becomes readable when its process ends (source: man 2 pidfd_open).
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            finally:
                os.close(ended)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forkserver:
    """A process of an interpreter, ready to fork.

    Args:
        python: the interpreter.
        env: its environment.
        left_out: modules that it does not import.
    """

    def __init__(self, python: str, env: Mapping[str, str], left_out: tuple[str, ...] = ()) -> None:
        # a socket that keeps message boundaries
        self.channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [python, "-c", _PROGRAM, str(its.fileno()), *left_out],
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env={**env, TOKEN_VARIABLE: "0" * TOKEN_LENGTH},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._num_requests = 0

    def run_module(
        self,
        module: str,
        args: list[str],
        env: Mapping[str, str],
        cwd: str | Path,
        output: int,
        limit_s: float | None = None,
    ) -> ForkedProcess:
        """Do what ``python -m module *args`` does, in a new process.

        Args:
            module: name of the module.
            args: the rest of ``sys.argv``.
            env: its whole environment, including a token.
            cwd: its working folder.
            output: the file descriptor of its stdout and stderr.
            limit_s: seconds that the answer may take; default: more for the first one, which waits for the imports.

        Raises:
            TimeoutError: there was no answer.
        """
        if limit_s is None:
            limit_s = _LIMIT_S if self._num_requests else _IMPORTS_LIMIT_S
        self.channel.settimeout(limit_s)
        self._num_requests += 1
        request = {
            "number": self._num_requests,
            "module": module,
            "args": args,
            "env": dict(env),
            "cwd": str(cwd),
        }
        socket.send_fds(self.channel, [json.dumps(request).encode()], [output])
        while True:
            answer = self.channel.recv(_MAX_BYTES)
            if not answer:
                raise RuntimeError(f"the fork server (pid {self.pid}) has ended")
            number, _, pid = answer.partition(b" ")
            process = ForkedProcess(int(pid))
            if int(number) == self._num_requests:
                return process
            process.kill()  # an earlier request was given up
            process.wait(_LIMIT_S)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self.channel.close()
        self._process.wait(_LIMIT_S)


def imported_with(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that an import may have read."""
    return {name: value for name, value in env.items() if not name.startswith(_FREE_VARIABLES)}


def _fork_for_requests(channel: socket.socket) -> tuple[dict[str, Any], int]:
    """Fork a process per request until the tests close their end. Return request and output in each new process."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 1)
        if not text:
            os._exit(0)  # fork at once, while only imports have opened files
        request = json.loads(text)
        reading, writing = os.pipe()
        if (middle := os.fork()) == 0:
            middle = os.getpid()
            if os.fork() == 0:
                os.setsid()  # before the answer: the test may send a signal to its process group at once
                os.write(writing, str(os.getpid()).encode())
                for fd in (reading, writing):
                    os.close(fd)
                channel.close()
                _wait_for_end(middle)  # from now on, the test process is the parent
                return request, descriptors[0]
            os._exit(0)
        os.close(writing)
        os.waitpid(middle, 0)
        pid = os.read(reading, _MAX_BYTES) or b"nothing: no process could be forked"
        channel.send(b"%d %s" % (request["number"], pid))
        for fd in (reading, *descriptors):
            os.close(fd)


def _wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it has ended, and its parent has noticed
    select.select([pidfd], [], [])
    os.close(pidfd)


def _begin(request: dict[str, Any], output: int) -> None:
    """Make this process look like a new interpreter that was started for the request."""
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _show_token(request["env"][TOKEN_VARIABLE])
    for name in ("tests", "tests.forkserver"):
        del sys.modules[name]
    sys.path[0] = os.getcwd()
    sys.argv[1:] = request["args"]  # runpy overwrites the first entry
    sys.orig_argv[1:] = ["-m", request["module"], *request["args"]]
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _show_token(token: str) -> None:
    """Write the token into the memory that /proc/PID/environ shows, which the system filled at the start of this
    program.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # env_start and env_end; the first field after the name is the third (source: man 5 proc)
    start, end = (int(fields[number - 3]) for number in (50, 51))
    name = f"{TOKEN_VARIABLE}=".encode()
    offset = ctypes.string_at(start, end - start).index(name) + len(name)
    ctypes.memmove(start + offset, token.encode(), TOKEN_LENGTH)


def serve(fd: int, left_out: Sequence[str]) -> str:
    """Import, then fork for each request; return only in the new processes, with the module to run."""
    has_xla = importlib.util.find_spec("torch_xla") is not None
    gc.disable()
    for name in (*_IMPORTS, *(_IMPORTS_FOR_XLA if has_xla else ())):
        if name in left_out:
            continue
        with contextlib.suppress(ModuleNotFoundError):  # Colab's kernel has fewer packages
            importlib.import_module(name)
    gc.enable()
    # Collect garbage once, instead of dozens of times while imports make the heap grow.
    gc.collect()
    with socket.socket(fileno=fd) as channel:
        request, output = _fork_for_requests(channel)
    _begin(request, output)
    module: str = request["module"]
    return module


def end() -> None:
    """End this process as an interpreter ends, but without releasing imported modules.

    Their release would take half of a kernel's processor time, because it copies every page shared with the fork
    server.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""Engines that start the node program with a local command: Python for this machine, ``ssh`` or ``srun`` for others.

The command's standard input and output are the channel. Other output goes to a file, whose last lines say why a node
could not be started.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nblaunch import env, other_debuggers
from nblaunch.engines import NODE_MODULE, Engine, NodeHandle, NodesWanted
from nblaunch.errors import LaunchError
from nblaunch.events import ExitStatus
from nblaunch.host import descriptors, files
from nblaunch.worker import process_control

PROGRAM = f"from {NODE_MODULE} import main; main()"
_EXIT_S = 1.0
_LAST_BYTES = 4096
_LAST_LINES = 3


def start_all(nodes: Iterable[NodeHandle]) -> list[NodeHandle]:
    """Start the nodes one by one and return them; if one can't be started, end the others and raise its error."""
    started: list[NodeHandle] = []
    try:
        for node in nodes:
            started.append(node)
    except BaseException:
        for node in started:
            node.close(0.0)
        raise
    return started


def describe_end(exit_code: int | None, last_output: bytes) -> str:
    """Return how the process of a node program ended.

    Args:
        exit_code: its exit code, as in :class:`ExitStatus`; None if it is still running.
        last_output: the end of its output, whose last lines are shown.
    """
    if exit_code is None:
        return "it has closed its connection"
    status = ExitStatus(exit_code)
    how = f"was {status}" if status.signal_name else f"ended with {status}"
    lines = [
        line.strip()
        for line in last_output.decode(errors="replace").splitlines()
        if any(map(str.isalnum, line))
    ]
    words = f" ({' | '.join(lines[-_LAST_LINES:])})" if lines else ""
    return f"its process {how}{words}"


class CommandNode(NodeHandle):
    """A node program that runs for as long as a local command, such as ``ssh``, does.

    Args:
        command: program and arguments.
        host: name of the machine, for messages.
        log_path: file for the command's output.
        address: as in :class:`NodeHandle`.
        environment: environment of the command; None = this process's.
        folder: working folder; None = this process's.

    Raises:
        LaunchError: the command can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        host: str,
        log_path: Path,
        *,
        address: str = "",
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        self.host = host
        self.address = address
        self._log_path = log_path
        try:
            # Use a separate POSIX session, because Ctrl-C in a terminal must reach only the launcher, which forwards
            # it.
            with (
                open(log_path, "ab") as log,
                process_control.signals_blocked(),
                descriptors.forks_held_back(),
                other_debuggers.kept_out(),
            ):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=folder,
                    start_new_session=True,
                    bufsize=0,
                )
                assert self._process.stdin is not None, "it is a pipe"
                assert self._process.stdout is not None, "it is a pipe"
                self.writing_fd = self._process.stdin.fileno()
                self.reading_fd = self._process.stdout.fileno()
                descriptors.keep_from_children(self.writing_fd, self.reading_fd)
        except OSError as error:
            raise LaunchError(
                f"the node program on {host} could not be started by {command[0]}: {error}"
            ) from error

    def how_ended(self) -> str:
        """Return how the command ended, with its last output."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        return describe_end(self._process.returncode, files.read_end(self._log_path, _LAST_BYTES))

    def kill(self) -> None:
        """Kill the command."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def close(self, patience_s: float) -> None:
        """Close both pipes; kill the command if it has not ended after ``patience_s`` seconds."""
        descriptors.forget(self.writing_fd, self.reading_fd)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- this machine ----------------------------------------------------------------------------------------------------

_LOOPBACK = "127.0.0.1"


class ProcessesEngine(Engine):
    """Starts each node program as a process on this machine, for tests and for trying out a launch on several nodes."""

    is_this_machine = True

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start ``max_nodes`` processes."""
        path = [entry for entry in wanted.path if isinstance(entry, str)]
        program = f"import sys; sys.path[:] = {path!r}; {PROGRAM}"
        return start_all(
            CommandNode(
                [sys.executable, "-c", program],
                "this machine",
                wanted.log_path(number),
                address=_LOOPBACK,
                environment=wanted.environment,
                folder=wanted.folder,
            )
            for number in range(wanted.spec.max_nodes)
        )


# --- ssh -------------------------------------------------------------------------------------------------------------

_CONNECT_S = 10
_ALIVE_S = 5
_SSH_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    f"-oConnectTimeout={_CONNECT_S}",
    f"-oServerAliveInterval={_ALIVE_S}",
    "-oServerAliveCountMax=3",
)
"""Options of ``ssh``: no terminal and no prompts; a silent connection ends after 15 seconds. Source: ssh_config(5)."""


class SshEngine(Engine):
    """Starts each node program over ``ssh``, on hosts with Python, nblaunch, and a key that needs no password.

        ssh host 'exec python -c ...'      encrypted and authenticated by ssh, which has the only socket

    The node program ends when the connection closes. Users set ports, names and keys in ``~/.ssh/config``.
    """

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Connect to the first ``max_nodes`` hosts."""
        hosts = wanted.spec.hosts[: wanted.spec.max_nodes]
        command = remote_command(sys.executable, wanted.interpreter_variables)
        return start_all(
            CommandNode(["ssh", *_SSH_OPTIONS, host, command], host, wanted.log_path(number))
            for number, host in enumerate(hosts)
        )


def remote_command(python: str, variables: Mapping[str, str]) -> str:
    """Return the shell command for the node program, with the same interpreter if it exists, else ``python3``."""
    same, program = shlex.quote(python), shlex.quote(PROGRAM)
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
    return f"{exports}if [ -x {same} ]; then exec {same} -c {program}; else exec python3 -c {program}; fi"


# --- Slurm -----------------------------------------------------------------------------------------------------------

_TIMEOUT_S = 30.0
_SRUN_OPTIONS = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0")
"""Options to run one task on the node alongside the kernel's own step, with all cores and memory of the allocation."""


class SlurmEngine(Engine):
    """Starts each node program as a step of the allocation in which this process runs, for example under ``salloc``.

    Slurm transports the data, with the site's encryption and authentication; nblaunch opens no socket.
    """

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start a step on each of the first ``max_nodes`` nodes of the allocation."""
        hosts = _allocated()
        spec = wanted.spec
        if len(hosts) < spec.min_nodes:
            raise LaunchError(
                f"num_nodes={spec.num_nodes!r}, but this Slurm allocation (job {env.read('SLURM_JOB_ID')}) has "
                f"{len(hosts)}: {', '.join(hosts)}. Allocate more: salloc --nodes={spec.min_nodes}"
            )
        return start_all(
            CommandNode(
                ["srun", *_SRUN_OPTIONS, f"--nodelist={host}", sys.executable, "-c", PROGRAM],
                host,
                wanted.log_path(number),
                environment=wanted.environment,
            )
            for number, host in enumerate(hosts[: spec.max_nodes])
        )


def _allocated() -> list[str]:
    """Return the hosts of the current allocation.

    Raises:
        LaunchError: there is no allocation, or Slurm's commands are missing.
    """
    nodes = env.read("SLURM_JOB_NODELIST")
    if not nodes:
        raise LaunchError(
            "engine='slurm' starts ranks inside a Slurm allocation, but this process is not in one (SLURM_JOB_NODELIST "
            "is not set): start Jupyter with salloc or sbatch"
        )
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol can't list the nodes of the allocation, {nodes}: {error}") from error
    return listed.stdout.split()

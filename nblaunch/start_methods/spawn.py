"""Fresh interpreters: how this process starts them, and workers that are such interpreters.

Forkservers, node agents and detached jobs are fresh interpreters, too. Workers are by default in ``nblaunch launch``,
where each worker loads the script. For a function from a notebook, this is the last resort, because every worker must
load everything itself.
"""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from nblaunch import backends, env, installation, other_debuggers
from nblaunch.errors import LaunchError
from nblaunch.events import Note
from nblaunch.host import descriptors
from nblaunch.start_methods.saved_call import SavedCall, present_folder, saved_or_now
from nblaunch.start_methods.worker_group import Children, WorkerGroup, disown, kill_and_reap
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board, create_memory_file
from nblaunch.wire.channel import EventSender
from nblaunch.wire.originals import Originals
from nblaunch.wire.pickling import payload
from nblaunch.worker import bootstrap, process_control

# Set the kernel's search path first, because nblaunch itself may be found only there.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main(sys.argv[1:])"
_REST = "import os, pickle; os.environ.update(pickle.load(os.fdopen({fd}, 'rb'))); "


@dataclass(frozen=True)
class Boot:
    """Startup parameters of a fresh interpreter.

    Args:
        assignments: one assignment for a worker, or all assignments for a forkserver.
        call: the call that workers run, with the process state that it needs.
        report_fd: a forkserver's pipe to the kernel; -1 for a worker.
    """

    assignments: tuple[Assignment, ...]
    call: SavedCall
    report_fd: int


def start_interpreter(
    module: str, assignments: Sequence[Assignment], call: SavedCall, report_fd: int = -1
) -> subprocess.Popen[bytes]:
    """Start a Python process that calls a module's ``main``, which reads its :class:`Boot` with :func:`read_boot`.

    Safe in any thread, whatever other threads are doing: none of this process's code runs in the new one.

    Raises:
        LaunchError: the system could not start the process.
    """
    parent_pid, backend = os.getpid(), registered_backend(assignments[0].backend)
    boot = Boot(
        assignments=tuple(
            replace(each, parent_pid=parent_pid, registered_backend=backend) for each in assignments
        ),
        call=call,
        report_fd=report_fd,
    )
    reads_input = any(assignment.reads_input for assignment in assignments)
    inherited = {assignments[0].board_fd}
    inherited.update(fd for assignment in assignments for fd in assignment.own_fds)
    if report_fd >= 0:
        inherited.add(report_fd)
    try:
        return start_program(module, boot, inherited, call, reads_input=reads_input)
    except OSError as error:
        raise LaunchError(
            f"can't start a fresh Python process ({sys.executable}): {error}. If descriptors or "
            "processes ran out (ulimit -n, ulimit -u), use fewer workers or close other programs."
        ) from error


def read_boot(arguments: Sequence[str]) -> Boot:
    """Return this interpreter's startup parameters, read from the memory file whose descriptor is the argument."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        boot: Boot = pickle.load(file)
    return boot


def report_left(boot: Boot) -> None:
    """Report, in a note from the first rank, which of the kernel's settings could not be sent."""
    first, note = boot.assignments[0], boot.call.settings.note()
    if note is not None and first.topology.rank == 0:
        EventSender(first.event_fd).send(Note.of_job(note, "warning"))


def registered_backend(name: str) -> bytes:
    """Pickle a backend that only this process has registered; return b"" for nblaunch's own backends."""
    backend = backends.registered(name)
    return b"" if backend is None else payload.to_bytes(backend, main_by_reference=False)


def start_program(
    module: str,
    message: object,
    inherited: Iterable[int],
    call: SavedCall | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    reads_input: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a Python process that has its own POSIX session and calls a module's ``main``.

    Args:
        module: name of the module.
        message: object to pickle into a memory file, whose descriptor is the argument of ``main``.
        inherited: descriptors that the process inherits in addition to the memory files for the message and the call.
        call: the call that it will run. The process starts with the environment, search path and working folder that
            were saved with the call. None = it inherits these from this process.
        environment: the complete environment of the process; None = as described for ``call``.
        reads_input: whether it shares this process's standard input; otherwise, its input is empty.

    Raises:
        OSError: the system could not start the process.
        LaunchError: another version of nblaunch was installed in the meantime, and the process would run it.
    """
    installation.check_new_process()
    message_fd = _written("nblaunch-message", message)
    try:
        # Imports skip entries of other types, such as pathlib.Path, and their repr() would break the program.
        path = [entry for entry in (sys.path if call is None else call.path) if isinstance(entry, str)]
        program = _PROGRAM.format(path=path, module=module)
        fds = {message_fd, *inherited} if call is None else {message_fd, call.fd, *inherited}
        folder = _working_folder(None if call is None else call.folder)
        if environment is None:
            environment = env.snapshot() if call is None else call.environment
        start = partial(_open, message_fd, folder, reads_input)
        try:
            return start(program, fds, environment)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
        # The system has no room for all variables; the program sets the rest before anything else.
        small, rest = env.split_by_size(environment)
        rest_fd = _written("nblaunch-environment", rest)
        try:
            return start(_REST.format(fd=rest_fd) + program, {*fds, rest_fd}, small)
        finally:
            os.close(rest_fd)
    finally:
        os.close(message_fd)


def _open(
    message_fd: int,
    folder: str | None,
    reads_input: bool,
    program: str,
    fds: set[int],
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    # If signals were not blocked, an interrupt would print the traceback of an unfinished import into the cell.
    with process_control.signals_blocked(), descriptors.forks_held_back(), other_debuggers.kept_out():
        return subprocess.Popen(
            [sys.executable, "-c", program, str(message_fd)],
            stdin=None if reads_input else subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            pass_fds=sorted(fds),
            start_new_session=True,
        )


def _written(name: str, message: object) -> int:
    """Return the descriptor of a memory file with ``message`` pickled in it."""
    fd = create_memory_file(name)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            pickle.dump(message, file)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _working_folder(wanted: str | None) -> str | None:
    """Return the folder to start in; None = this process's folder.

    IPython and MKL fail if the current folder has been removed.
    """
    present = present_folder()
    if wanted is not None and wanted != present and os.path.isdir(wanted):
        return wanted
    return None if present is not None else tempfile.gettempdir()


# --- workers ----------------------------------------------------------------------------------------------------------


def start(
    call: FunctionCall, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None
) -> WorkerGroup:
    """Start every worker as a new Python process."""
    with saved_or_now(saved, call) as file:
        return Children(spawn_workers(assignments, file))


def spawn_workers(assignments: Sequence[Assignment], call: SavedCall) -> dict[int, int]:
    """Start one interpreter per assignment; return rank -> process id.

    Raises:
        LaunchError: the system could not start a process; those already started have been killed.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for assignment in assignments:
            processes[assignment.rank] = start_interpreter(__name__, [assignment], call)
    except BaseException:
        kill_and_reap(map(disown, processes.values()))
        raise
    return {rank: disown(process) for rank, process in processes.items()}


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the worker that this interpreter was started for."""
    boot = read_boot(arguments)
    boot.call.restore_surroundings()  # connects displays to the launcher before the call is loaded
    os.set_inheritable(boot.call.fd, False)
    originals = Originals(boot.call.fd)

    def load() -> FunctionCall:
        call, originals.address = boot.call.load()
        report_left(boot)
        return call

    bootstrap.run(boot.assignments[0], load, originals=originals)

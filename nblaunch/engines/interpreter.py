"""Starting fresh interpreters from the kernel: what spawn, forkserver and the agents of nodes share."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nblaunch.engines.boot import Boot, capture_random_states
from nblaunch.errors import LaunchError, PayloadError
from nblaunch.spec_call import name_of
from nblaunch.wire import blame, payload
from nblaunch.wire.assignment import Assignment, Call
from nblaunch.wire.board import create_memory_file
from nblaunch.worker import guard

# The kernel's search path comes first of all: nblaunch itself may have been found through it.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main(sys.argv[1:])"


def write_call(call: Call) -> int:
    """The call in a memory file, by cloudpickle; returns its descriptor.

    Raises:
        PayloadError: some variable of the call can't be pickled; names it and says what to do.
    """
    fd = create_memory_file("nblaunch-call")
    try:
        payload.dump(call, fd)
    except Exception as error:
        os.close(fd)
        raise PayloadError(_blame(call, error)) from error
    return fd


def start_interpreter(
    assignments: Sequence[Assignment], call_fd: int, report_fd: int = -1
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs ``engines/fresh.py`` for the given assignments.

    Raises:
        LaunchError: the system refused the process.
    """
    parent_pid = os.getpid()
    boot = Boot(
        assignments=tuple(replace(assignment, parent_pid=parent_pid) for assignment in assignments),
        report_fd=report_fd,
        has_shell="IPython.core.interactiveshell" in sys.modules,
        random_states=pickle.dumps(capture_random_states()),
        log_path=assignments[0].log_path + ".forkserver",
    )
    inherited = {call_fd, assignments[0].board_fd}
    inherited.update(fd for assignment in assignments for fd in assignment.own_fds)
    if report_fd >= 0:
        inherited.add(report_fd)
    try:
        return start_program("nblaunch.engines.fresh", boot, [call_fd], inherited)
    except OSError as error:
        raise LaunchError(
            f"a fresh Python process could not be started ({sys.executable}): {error}. If descriptors or processes ran "
            "out (ulimit -n, ulimit -u), close some or use fewer workers."
        ) from error


def start_program(
    module: str,
    orders: object,
    further_fds: Sequence[int] = (),
    inherited: Iterable[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python process that calls ``main`` of a module, in a session of its own.

    Args:
        module: its name.
        orders: pickled into a memory file, whose number is the first of ``main``'s arguments.
        further_fds: what follows it.
        inherited: descriptors that the process gets besides the memory file.
        environment: all of its variables; None = those of this process.

    Raises:
        OSError: the system refused the process.
    """
    orders_fd = create_memory_file("nblaunch-orders")
    os.write(orders_fd, pickle.dumps(orders))
    os.lseek(orders_fd, 0, os.SEEK_SET)
    program = _PROGRAM.format(path=sys.path, module=module)
    try:
        # Or an interrupt would print the traceback of an unfinished import into the cell.
        with guard.signals_held_back():
            return subprocess.Popen(
                [sys.executable, "-c", program, *map(str, (orders_fd, *further_fds))],
                stdin=subprocess.DEVNULL,
                cwd=_folder_instead(),
                env=environment,
                pass_fds=sorted({orders_fd, *inherited}),
                start_new_session=True,
            )
    finally:
        os.close(orders_fd)


def _folder_instead() -> str | None:
    """Where to start if the working folder was removed: neither IPython nor MKL begins to work in such a one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return tempfile.gettempdir()
    return None


def _blame(call: Call, error: Exception) -> str:
    function, args = call
    parts = blame.unpicklable_variables(function, args)
    named = "; ".join(f"{name} ({type(why).__name__}: {why})" for name, why in parts) or f"{error}"
    return (
        f"{name_of(function)} can't be sent to fresh processes, because this can't be pickled: "
        f"{named}. Create it inside the function, or pass what it is made from in args; with start_method='fork' "
        "nothing needs to be pickled."
    )

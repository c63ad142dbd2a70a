"""The node program's entry point: sends its versions, receives the key and environment, then loads the call.

    python -c "from nblaunch.engines.node import main; main()"      standard input and output are its channel

If nodes are kept between jobs, this process is a forkserver with torch imported, which forks a child per job:

    forkserver ── Boot ──> fork ──> child: NodeProgram of one job ── Leave ──> ends
       └── waits for the child, then sends Hello again ──> next Boot, with another key

The child and the forkserver share the channel, but the forkserver does not read from it while a child is running. A
job's changes, for example to variables, modules and random states, are discarded when its child process ends.

Importing this module imports neither torch nor the node program, because the first message contains environment
variables that libraries read when they are imported.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn

from nblaunch import env
from nblaunch.engines.channel import Channel
from nblaunch.engines.messages import Boot, Hello
from nblaunch.host import descriptors, heap
from nblaunch.wire import schema
from nblaunch.worker import process_control

_IMPORTS = (("torch", "torch.distributed"), ("torch._dynamo",))
"""Modules that a forkserver imports before the first job and before the second one. Ranks need the compiler for an
optimizer's first step. Importing it takes a second or more, so the first job starts without it and later jobs benefit.
"""


def main() -> NoReturn:
    """Run the node program until the coordinator closes its channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal or srun; the coordinator sends interrupts
    process_control.unblock_signals()
    channel = _take_standard_descriptors()
    exit_code = 1
    try:
        boot = _next_boot(channel)
        if boot is not None and boot.is_kept:
            _serve(boot, channel)
        elif boot is not None:
            env.apply(boot.environment)
            _run_job(boot, channel)
        exit_code = 0
    finally:
        _end(exit_code)


def _take_standard_descriptors() -> Channel:
    """Return the channel; redirect later output to standard error."""
    reading, writing = (descriptors.high_copy(fd) for fd in (0, 1))
    descriptors.keep_from_children(reading, writing)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return Channel(reading, writing, b"n")


def _next_boot(channel: Channel) -> Boot | None:
    """Send this program's versions and wait for a job; return None if the coordinator has closed the channel."""
    channel.send_mark()
    channel.send_raw(schema.dump(Hello.of_this_process()))
    while not channel.is_closed:
        channel.wait_readable()
        for body in channel.receive_raw(1):
            boot: Boot = pickle.loads(body)
            return boot
    return None


def _run_job(boot: Boot, channel: Channel) -> bool:
    """Run a job in this process until it ends; return whether the coordinator keeps the channel open for another."""
    from nblaunch.engines.node_program import NodeProgram

    channel.key = boot.key
    return NodeProgram(boot, channel).run()


def _end(exit_code: int) -> NoReturn:
    """End this process, after printing the exception that is being handled, if any."""
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(exit_code)  # a thread of the user's modules must not keep the process alive


# --- a forkserver ----------------------------------------------------------------------------------------------------


def _serve(boot: Boot, channel: Channel) -> None:
    """Run jobs one after another until the coordinator closes the channel or a job's process fails."""
    importlib.import_module("nblaunch.engines.node_program")  # once, for all jobs
    first = boot.environment
    next_boot: Boot | None = boot
    for modules in itertools.chain(_IMPORTS, itertools.repeat(())):
        if next_boot is None:
            return
        if modules:
            with env.patched(first), process_control.ending_with(channel.reading_fd):
                _import(modules)
        forkserver = os.getpid()
        descriptors.forget(channel.reading_fd, channel.writing_fd)  # the child uses these
        child = os.fork()
        descriptors.keep_from_children(channel.reading_fd, channel.writing_fd)
        if not child:
            process_control.end_with_parent(forkserver, with_children=False)
            removed = dict.fromkeys(first.keys() - next_boot.environment.keys())
            env.apply({**removed, **next_boot.environment})
            _run_in_child(next_boot, channel)
        _wait_for(child)
        channel = Channel(channel.reading_fd, channel.writing_fd, b"n")
        next_boot = _next_boot(channel)


def _import(modules: Iterable[str]) -> None:
    with heap.growing():
        for name in modules:
            with suppress(Exception):  # a job reports the error if it needs the module
                importlib.import_module(name)


def _run_in_child(boot: Boot, channel: Channel) -> NoReturn:
    exit_code = 1
    try:
        exit_code = 0 if _run_job(boot, channel) else 1
    finally:
        _end(exit_code)


def _wait_for(child: int) -> None:
    """Wait until the child has ended. If it failed, end in the same way, so that the coordinator notices."""
    signal.signal(signal.SIGTERM, lambda signum, frame: os.kill(child, signum))
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # no process can handle SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        os._exit(code)

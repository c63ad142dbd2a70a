"""The node program of nodes that are kept between jobs: a forkserver with torch imported, which forks a child per job.

    forkserver ── Boot ──> fork ──> child: NodeProgram of one job ── Leave ──> ends
       └── waits for the child, then sends Hello again ──> next Boot, with another key

The child and the forkserver share the channel, but the forkserver does not read from it while a child is running. A
job's changes, such as variables, modules and random states, end with its child.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

from nblaunch import env
from nblaunch.engines.channel import Channel
from nblaunch.engines.messages import Boot
from nblaunch.engines.node_program import NodeProgram
from nblaunch.host import descriptors, heap
from nblaunch.worker import process_control

_IMPORTS = (("torch", "torch.distributed"), ("torch._dynamo",))
"""Modules to import before the first job and before the second one. Ranks need the compiler at the first step of an
optimizer. Importing it takes a second or more, so the first job starts without it and later jobs benefit.
"""


def serve(boot: Boot, channel: Channel, wait_for_boot: Callable[[Channel], Boot | None]) -> None:
    """Run jobs one after another until the coordinator closes the channel, or the process of a job fails.

    Args:
        boot: first message of the first job.
        channel: channel to the coordinator.
        wait_for_boot: sends Hello to the coordinator, and returns the first message of the next job, or None if the
            coordinator has closed the channel.
    """
    first = boot.environment
    next_boot: Boot | None = boot
    for modules in itertools.chain(_IMPORTS, itertools.repeat(())):
        if next_boot is None:
            return
        if modules:
            with env.patched(first), process_control.ending_with(channel.reading_fd):
                _import(modules)
        forkserver = os.getpid()
        descriptors.forget(channel.reading_fd, channel.writing_fd)  # which the child uses
        child = os.fork()
        descriptors.keep_from_children(channel.reading_fd, channel.writing_fd)
        if not child:
            process_control.end_with_parent(forkserver, with_children=False)
            removed = dict.fromkeys(first.keys() - next_boot.environment.keys())
            env.apply({**removed, **next_boot.environment})
            channel.key = next_boot.key
            _run(next_boot, channel)
        _wait_for(child)
        channel = Channel(channel.reading_fd, channel.writing_fd, b"n")
        next_boot = wait_for_boot(channel)


def _import(modules: Iterable[str]) -> None:
    with heap.growing():
        for name in modules:
            with suppress(Exception):  # a job reports the error if it needs the module
                importlib.import_module(name)


def _run(boot: Boot, channel: Channel) -> NoReturn:
    """Run a job in this process until it ends."""
    exit_code = 1
    try:
        exit_code = 0 if NodeProgram(boot, channel).run() else 1
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


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

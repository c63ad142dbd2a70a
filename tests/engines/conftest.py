"""Kernels that launch on nodes of this machine, and their functions.

The fixture ``kept`` gives tests the same kernel with kept nodes, so that only one launch waits for two programs to
import torch. ``notebook`` gives a test a kernel whose launches start node programs, as a user's first launch does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel

PREAMBLE = """
import ctypes, os, signal, sys, threading, time
import psutil
import torch
import torch.distributed as dist
from torch import nn
import nblaunch
from nblaunch import Accelerator, notebook_launcher

def rank():
    return int(os.environ["RANK"])

class MyError(Exception):
    def __init__(self, text, *, code):
        super().__init__(text)
        self.code = code
    def __reduce__(self):
        return _made, (self.args[0], self.code)

def _made(text, code):
    return MyError(text, code=code)

engine = "processes"

def launch(function, *args, **settings):
    usual = {"num_processes": 4, "num_nodes": 2, "engine": engine, "interrupt_grace_s": 1.0}
    return notebook_launcher(function, args, **{**usual, **settings})

def node_programs():
    pids = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "nblaunch.engines.node" in " ".join(process.cmdline()):
                pids.append(process.pid)
        except psutil.NoSuchProcess:  # it has ended
            continue
    return pids

def are_only_programs_left():
    deadline = time.monotonic() + 120
    while node_programs() != programs and time.monotonic() < deadline:
        time.sleep(0.05)
    return node_programs() == programs
"""

NEW_PROGRAMS = """
programs = []
while len(programs) != 2:  # a process of the last launch may not have ended yet
    programs = node_programs()
"""

FAILING = """
def train(what, who):
    dist.init_process_group("gloo")
    dist.barrier()
    print("it begins")
    if rank() == who:
        if what == "error":
            raise MyError("the loss is nan", code=7)
        if what == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "SIGSEGV":
            ctypes.string_at(0)
        if what == "exit 0":
            os._exit(0)
        if what == "return":
            return "early"
        if what == "hang":
            time.sleep(3600)
    dist.all_reduce(torch.ones(2))
    return threading.Lock() if what == "unpicklable result" else rank()
"""
"""A function that ends on rank ``who`` as ``what`` says, after all ranks have begun."""

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
[ "$1" = unreachable ] && { echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255; }
echo "Welcome to $1"
cd /
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$2"
"""


@pytest.fixture
def notebook(nothing_left_behind: None, tmp_path: Path) -> Iterator[Kernel]:
    """Start a kernel with everything that the tests' cells use; its processes must have ended by the end of the
    test.
    """
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path / "logs")}) as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.fixture(scope="package")
def kernel_with_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel for all these modules, whose launches use the same two nodes."""
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}) as kernel:
        kernel.run(PREAMBLE)
        kernel.run("engine = nblaunch.Nodes(2, engine='processes'); launch(rank)")
        kernel.run(NEW_PROGRAMS)
        yield kernel
        kernel.run("engine.close()")


@pytest.fixture
def kept(kernel_with_nodes: Kernel, nothing_left_behind: None) -> Iterator[Kernel]:
    """Return the kernel with nodes; after the test, of all its processes only the nodes' two programs must be left."""
    yield kernel_with_nodes
    assert kernel_with_nodes.run("are_only_programs_left()").value is True


def comparable(text: str) -> str:
    """Return the text of an error without the parts that differ between launches: processes, folders, labels of
    nodes.
    """
    text = re.sub(r"\(pid \d+\)", "(pid N)", text)
    text = re.sub(
        r" on (node \d+ \(host [^)]*\)|[\w.-]+); complete log: \S+", " on HOST; complete log: PATH", text
    )
    text = re.sub(r"complete logs: \S+", "complete logs: PATH", text)
    # The launcher stops ranks that have not noticed the lost connection in time.
    ends = "lost the connection to it|stopped by the launcher"
    return re.sub(
        rf"ranks? [\d, and-]+: ({ends})(; ranks? [\d, and-]+: ({ends}))*", "others: ended with it", text
    )


def path_with_ssh(folder: str | Path) -> str:
    """Write a stub of ``ssh``, which runs the command on this machine, to ``folder``; return a ``PATH`` with it."""
    stub = Path(folder, "ssh")
    stub.write_text(SSH)
    stub.chmod(0o755)
    return f"{folder}:/usr/local/bin:/usr/bin:/bin"

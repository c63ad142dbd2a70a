"""Interrupts of session commands whose ranks can't raise them: ranks that wait in native code, or ignore them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.kernels import Cell, Kernel

LIMIT_S = 60.0

START = """
import os, time, torch
from nblaunch import Session
session = Session({ranks}, threads_per_process=1)
session.execute("torch.distributed.barrier(); kept = int(os.environ['RANK'])")
"""

REDUCE = "x = torch.ones(1); torch.distributed.all_reduce(x); x.item() + kept"


def start(kernel: Kernel, ranks: int) -> None:
    kernel.run(START.format(ranks=ranks))


def is_usable(kernel: Kernel, ranks: int) -> bool:
    """Return whether the ranks have kept their variables and reach each other, and end the session."""
    values = kernel.run(f"dict(session.execute({REDUCE!r}))", timeout_s=LIMIT_S).value
    kernel.run("session.close()")
    return bool(values == {rank: float(ranks + rank) for rank in range(ranks)})


def interrupted(kernel: Kernel, code: str) -> Cell:
    cell = kernel.submit(f"session.execute({code!r})").wait_for_text("begun")
    kernel.interrupt()
    cell.wait(LIMIT_S)
    assert cell.raised.name == "KeyboardInterrupt"
    return cell


WAITS = {
    "each receives from the other": (
        "",
        "torch.distributed.recv(torch.ones(1), 1 - rank)",
    ),
    "groups are mixed up": (
        "groups = [torch.distributed.new_group() for _ in range(2)]",
        "torch.distributed.all_reduce(torch.ones(1), group=groups[rank])",
    ),
    "the others have left a group that a variable refers to": (
        "group = torch.distributed.new_group()",
        "torch.distributed.all_reduce(torch.ones(1), group=group) if rank else time.sleep(1000)",
    ),
    "a key is missing": (
        "",
        "torch.distributed.distributed_c10d._get_default_store().get('missing')",
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_ends_waits_for_other_ranks(kernel: Kernel, wait: str) -> None:
    before, waits = WAITS[wait]
    start(kernel, 2)
    kernel.run(f"session.execute({'import time; rank = kept; ' + before!r})")
    interrupted(kernel, f"print('begun', flush=True)\n{waits}")
    assert is_usable(kernel, 2)


JOINS = """
from nblaunch.backends import process_group
wait_for_all = process_group._wait_for_all
def joining(*args):
    print("joining", kept, flush=True)
    try:
        wait_for_all(*args)
    finally:
        print("left", kept, flush=True)
process_group._wait_for_all = joining
"""


def test_an_interrupt_ends_the_joining_of_ranks_that_come_late(kernel: Kernel) -> None:
    start(kernel, 3)
    kernel.run(f"session.ranks(0, 1).execute({JOINS!r})")
    late = kernel.run("session.pids[2]").value
    kernel.run("session.execute('1 / 0')", raises="ZeroDivisionError")  # the ranks join another group
    os.kill(late, signal.SIGSTOP)
    cell = kernel.submit("session.execute('torch.distributed.barrier()')")
    try:
        for rank in range(2):
            cell.wait_for_text(f"joining {rank}")
        kernel.interrupt()
        for rank in range(2):
            cell.wait_for_text(f"left {rank}")
    finally:
        os.kill(late, signal.SIGCONT)
    cell.wait(LIMIT_S)
    assert cell.raised.name == "KeyboardInterrupt"
    assert is_usable(kernel, 3)


NEVER_JOINS = """
import time
from nblaunch.backends import process_group
name_next_group = process_group.name_next_group
def come_late(name):
    process_group.name_next_group = name_next_group
    time.sleep(1000)
process_group.name_next_group = come_late
"""


def test_ranks_that_had_begun_to_join_join_the_next_group(kernel: Kernel) -> None:
    start(kernel, 2)
    kernel.run(f"session.ranks(0).execute({JOINS!r})")
    kernel.run(f"session.ranks(1).execute({NEVER_JOINS!r})")
    kernel.run("session.execute('1 / 0')", raises="ZeroDivisionError")  # the ranks join another group
    cell = kernel.submit("session.execute('1')").wait_for_text("joining 0")
    kernel.interrupt()
    assert cell.wait(LIMIT_S).raised.name == "KeyboardInterrupt"
    assert is_usable(kernel, 2)


IGNORES = """
class Ignores:
    def __del__(self):
        print("begun", flush=True)
        time.sleep(1000)
ignores = Ignores()
del ignores
time.sleep(1000)
"""


def test_an_interrupt_that_python_ignores_is_raised_again(kernel: Kernel) -> None:
    start(kernel, 2)
    kernel.run("session.execute('import time')")
    cell = interrupted(kernel, IGNORES)
    assert "Exception ignored" in cell.shown
    assert is_usable(kernel, 2)


SAVES = """
import time
print("begun", kept, flush=True)
try:
    time.sleep(1000)
except KeyboardInterrupt:
    if kept == 0:
        time.sleep(2.5)    # for example, it writes a file
    torch.distributed.barrier()
    saved = True
    raise
"""


def test_an_interrupt_leaves_collectives_of_its_handlers_alone(kernel: Kernel) -> None:
    start(kernel, 2)
    cell = kernel.submit(f"session.execute({SAVES!r})")
    for rank in range(2):
        cell.wait_for_text(f"begun {rank}")
    kernel.interrupt()
    assert cell.wait(LIMIT_S).raised.name == "KeyboardInterrupt"
    assert kernel.run("dict(session['saved'])").value == {0: True, 1: True}
    kernel.run("session.close()")


HANGS = """
import time
if {fails}:
    raise ValueError("no such batch")
print("begun", flush=True)
try:
    time.sleep(1000)
finally:
    torch.distributed.recv(torch.ones(1), (kept + 1) % 2)
"""


@pytest.mark.parametrize("fails", [False, True], ids=["an interrupt", "a failure"])
def test_ranks_that_never_end_are_reported_and_killed(kernel: Kernel, fails: bool) -> None:
    start(kernel, 3 if fails else 2)
    kernel.run("from nblaunch.session import release\nrelease._NOTE_S, release._LIMIT_S = 1.0, 4.0")
    cell = kernel.submit(f"session.execute({HANGS.format(fails='kept == 2')!r})").wait_for_text("begun")
    if not fails:
        kernel.interrupt()
    cell.wait(LIMIT_S)
    assert cell.raised.name == "JobCancelled"
    cause = "rank 2 raised ValueError" if fails else "the interrupt"
    assert f"ranks 0 and 1 did not end the command within 4 s after {cause}" in cell.raised.value
    assert "session.restart()" in cell.raised.value
    assert f"ranks 0 and 1 did not end the command 1 s after {cause}:" in cell.shown
    assert "waiting in recv" in cell.shown
    assert kernel.processes() == []

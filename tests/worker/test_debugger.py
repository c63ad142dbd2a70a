"""The worker's side of the debugger, with both ends of its connection in this process."""

from __future__ import annotations

import bdb
import gc
import os
import socket
import sys
import threading

import pytest

from nblaunch.wire.worker_commands import CommandConnection, Debug, Line, Prompted, Resumed
from nblaunch.worker.debugger import Debugger


@pytest.mark.parametrize("lines", [[], ["b {}:{}", "commands"]], ids=["command", "commands"])
def test_an_ended_pdb_leaves_no_input_behind(lines: list[str]) -> None:
    """This includes a pdb that waits for the commands of a breakpoint, or for the rest of a statement."""
    line = _prompts_of_a_breakpoint_after_an_open_pdb.__code__.co_firstlineno + 2
    try:
        prompts = _prompts_of_a_breakpoint_after_an_open_pdb([one.format(__file__, line) for one in lines])
    finally:
        bdb.Breakpoint.clearBreakpoints()
    gc.collect()  # pdb refers to frames, which refer to connections
    assert prompts == ["(Pdb) ", *(["(Pdb) ", "(com) "] if lines else []), "(Pdb) "]


def _prompts_of_a_breakpoint_after_an_open_pdb(lines: list[str]) -> list[str]:
    """Return the prompts of a pdb that gets these lines and is then ended, and of a breakpoint after it."""
    ends = socket.socketpair()
    own, other = (CommandConnection(os.dup(end.fileno())) for end in ends)
    debugger = Debugger(0, own)
    debugger.start()
    try:
        raise ValueError("on purpose")
    except ValueError as error:
        debugger.end_command(error)
    other.send(Debug())
    received = [other.receive()[0]]
    for line in lines:
        other.send(Line(text=line))
        received.append(other.receive()[0])
    for _ in range(3):  # each ends a pdb that is still open, as it is until its thread runs again
        debugger.begin_command()
    # In a thread, because pdb leaves its trace function in the outermost frame.
    worker = threading.Thread(target=lambda: debugger.stop_at(sys._getframe()), daemon=True)
    worker.start()
    while sum(isinstance(one, Resumed) for one in received) < 2:  # from the previous pdb, and from this one
        received.append(other.receive()[0])
        if isinstance(received[-1], Prompted):
            other.send(Line(text="c"))
    ends[0].shutdown(socket.SHUT_RDWR)  # ends the debugger's thread
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join()
    for end in ends:
        end.close()
    return [one.prompt for one in received if isinstance(one, Prompted)]
